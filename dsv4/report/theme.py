"""Colours, type and the charts' configuration, in one place for the page and its charts.

Charts name CSS variables instead of colours, so that one drawing serves light, dark and
print. Only discrete scales may be used with them: a browser cannot interpolate variables.
"""

from typing import Any

LIGHT = {
    "page": "#ffffff",
    "panel": "#f6f7f8",
    "ink": "#16202b",
    "soft": "#536170",
    "faint": "#8b97a3",
    "rule": "#dde2e7",
    "grid": "#e9edf0",
    "accent": "#0b62b0",
    "pass": "#1a7440",
    "fail": "#c0262b",
    "blocked": "#8a5a00",
    "idle": "#5c6975",
    "unsure": "#7542a8",
    "pass-wash": "#e5f3ea",
    "fail-wash": "#fcebea",
    "blocked-wash": "#faf1dd",
    "idle-wash": "#eef1f3",
    "unsure-wash": "#f2ebf9",
    "c0": "#0b62b0",
    "c1": "#c4520c",
    "c2": "#14806b",
    "c3": "#8e4aa8",
    "c4": "#6b7682",
    "h0": "#eef3f8",
    "h1": "#d3e2f0",
    "h2": "#abc9e4",
    "h3": "#76a8d3",
    "h4": "#3f81ba",
    "h5": "#1c5a94",
    "h6": "#0b3560",
    "x4": "#f3b58a",
    "x5": "#dd6a3c",
    "x6": "#a8201f",
    "none": "#f1f2f4",
    "x-copy": "#fdebdd",
    "x-copy-odd": "#f8d6bb",
}
DARK = {
    "page": "#11161b",
    "panel": "#182027",
    "ink": "#e4e9ee",
    "soft": "#a5b1bc",
    "faint": "#74818d",
    "rule": "#2c3741",
    "grid": "#232d36",
    "accent": "#6db3f2",
    "pass": "#5fc58a",
    "fail": "#ff7b75",
    "blocked": "#e0b04e",
    "idle": "#9aa7b3",
    "unsure": "#c39bf0",
    "pass-wash": "#15301f",
    "fail-wash": "#3d1b1d",
    "blocked-wash": "#33290f",
    "idle-wash": "#222b33",
    "unsure-wash": "#2b2140",
    "c0": "#6db3f2",
    "c1": "#f0935a",
    "c2": "#4fc3a8",
    "c3": "#cf9be6",
    "c4": "#98a4b0",
    "h0": "#1a242d",
    "h1": "#1d3346",
    "h2": "#204762",
    "h3": "#2a6391",
    "h4": "#4287bd",
    "h5": "#7ab2dd",
    "h6": "#c5e0f5",
    "x4": "#8a4a22",
    "x5": "#d2622f",
    "x6": "#ff8d80",
    "none": "#1b232b",
    "x-copy": "#33241a",
    "x-copy-odd": "#4a3120",
}
MACROS = "macros.html.j2"  # what the pages' templates share; named here, so that the rules see the file
FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
TAPS = ["c0", "c1", "c2", "c3", "c4"]
ERROR_RAMP = ["h0", "h1", "h2", "h3", "h4", "h5", "h6"]
EXCESS_RAMP = ["h0", "h1", "h2", "h3", "x4", "x5", "x6"]


def var(name: str) -> str:
    """A colour by its name, as CSS."""
    return f"var(--{name})"


def variables() -> str:
    """The style sheet's colour variables: light, dark by preference, light again on paper."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    fonts = f"--font:{FONT};--mono:{MONO};"
    return (
        f":root{{color-scheme:light dark;{fonts}{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )


def config() -> dict[str, Any]:
    """Vega-Lite configuration shared by all charts."""
    axis = {
        "labelColor": var("soft"),
        "titleColor": var("soft"),
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "domainColor": var("rule"),
        "tickColor": var("rule"),
        "gridColor": var("grid"),
        "labelPadding": 4,
        "titlePadding": 6,
    }
    legend = {
        "labelColor": var("ink"),
        "titleColor": var("soft"),
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "orient": "top",
        "symbolOpacity": 1,
        "symbolSize": 50,
        "symbolStrokeWidth": 1,
        "offset": 6,
    }
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": axis,
        "legend": legend,
        "header": {
            "labelColor": var("soft"),
            "titleColor": var("soft"),
            "labelFontSize": 11,
            "titleFontSize": 11,
        },
        "text": {"color": var("ink"), "fontSize": 11},
        "rule": {"color": var("faint")},
    }
