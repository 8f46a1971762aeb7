"""The frame of a page: its template, its styles, and the policy that lets it load nothing."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dsv4.report import theme

HERE = Path(__file__).parent


def filled(template: str, context: Mapping[str, Any], script: str = "", styles: Sequence[str] = ()) -> str:
    """A template's text with ``context`` in it, and ``style``, ``script`` and ``policy`` beside.

    Parameters
    ----------
    template : file beside this one.
    context : names that the template knows.
    script : all of it.
    styles : style sheets beside this file, after page.css.

    Raises
    ------
    jinja2.UndefinedError
        The template names what is not there.
    """
    env = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = theme.variables() + "".join((HERE / name).read_text() for name in ("page.css", *styles))
    frame = {"style": Markup(style), "script": Markup(script), "policy": policy(style, script)}
    return env.get_template(template).render(frame | dict(context))


def policy(style: str, script: str = "") -> str:
    """Nothing may load, and only these texts may style or run; a script draws images of its own."""
    run = [f"script-src {_hash(script)}"] if script else []
    drawn = ["img-src data:"] if script else []
    allowed = [*run, f"style-src {_hash(style)}", *drawn]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
