"""The page in a real browser: nothing is requested, nothing is complained of, everything is drawn."""

import json
import shutil

import pytest

from dsv4.report.__main__ import main
from dsv4.report.samples import CONFIG

CHROMIUM = shutil.which("chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ARGS += ["--disable-component-update", "--disable-sync"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.xdist_group("report"),
]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: it drives the browser")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(failing, tmp_path_factory):
    reports = tmp_path_factory.mktemp("reports")
    assert main(["--results", str(failing), "--config", str(CONFIG), "--reports", str(reports)]) == 0
    return (reports / "index.html").as_uri()


class Seen:
    """What a page asked for and complained of."""

    def __init__(self, page):
        self.requests, self.complaints = [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))


@pytest.fixture
def opened(browser, address):
    """The page at 1280 x 900, drawn, and what it did meanwhile."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    seen = Seen(page)
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
    yield page, seen
    page.close()


def test_nothing_is_requested_and_nothing_complained_of(opened, address):
    page, seen = opened
    page.mouse.wheel(0, 4000)
    page.hover("#p-cosine .chart svg [aria-roledescription=point] >> nth=0")
    assert seen.requests == [address]
    assert seen.complaints == []


def test_every_chart_is_drawn(opened):
    page, _ = opened
    charts = page.locator(".chart")
    assert charts.count() >= 9
    for place in charts.all():
        assert place.locator("svg [role=graphics-symbol]").count() > 2, place.get_attribute("data-panel")


def test_ladder_fits_the_first_screen(opened):
    page, _ = opened
    last = page.locator(".ladder tbody tr").last.bounding_box()
    assert last["y"] + last["height"] < 900


def test_variant_select_changes_charts_and_tables(opened):
    page, seen = opened
    page.evaluate("document.querySelector('#p-cosine details').open = true")
    page.wait_for_selector("#p-cosine details table")
    before = page.inner_text("#p-cosine details table")
    drawing = page.inner_html("#p-cosine .chart")
    page.select_option("#variant", "KV_nvfp4")
    page.wait_for_function(
        "html => document.querySelector('#p-cosine .chart').innerHTML !== html", arg=drawing
    )
    assert page.inner_text("#p-cosine details table") != before
    page.select_option("#mode", "compounded")
    page.select_option("#against", "plain")  # the sample has no such rows
    page.wait_for_selector("#p-cosine .empty:visible")
    page.select_option("#mode", "isolated")
    page.wait_for_selector("#p-cosine .chart svg:visible")
    assert "✕" in page.inner_html("#p-cosine .chart")  # the non-finite attn_out of layer 6
    assert seen.complaints == []


def test_ladder_link_and_cell_pick_what_the_charts_show(opened):
    page, _ = opened
    page.click("a[data-variant=B1_q2]")
    assert page.input_value("#variant") == "B1_q2"
    page.click("#p-error .chart svg [aria-label*='tap: qr;'] >> nth=0")
    page.wait_for_function("document.querySelector('#tap').value === 'qr'")


def test_texts_stand_side_by_side_with_their_first_difference(opened, failing):
    page, seen = opened
    assert (page.input_value("#rung"), page.input_value("#prompt")) == ("B1", "code")
    document = json.loads((failing / "text/B1.json").read_text())["prompts"]["code"]
    for whose, letter in (("own", "f"), ("reference", "i")):
        pane = page.locator(f".written[data-whose={whose}] pre")
        stop = pane.locator(".stop").inner_text()
        assert (
            pane.evaluate("pane => pane.textContent") == document[whose]["text"] + stop
        )  # and no markup of its own
        assert pane.locator(".first").inner_text() == letter
        assert pane.locator(".copy").count() > 3
        top, height = pane.evaluate(
            "pane => [pane.querySelector('.first').offsetTop - pane.scrollTop, pane.clientHeight]"
        )
        assert 0 <= top < height
    page.focus(".pick[data-rung=B0_unfused][data-prompt=opposites]")
    page.keyboard.press("Enter")
    assert page.input_value("#rung") == "B0_unfused"
    assert page.input_value("#prompt") == "opposites"
    assert page.locator(".pick[aria-current]").count() == 1
    assert page.inner_text("[data-whose=own] .first") == "s"
    assert "a near tie" in page.inner_text("#pair-said")
    page.select_option("#rung", "B1_q2")
    assert page.inner_text("[data-whose=own] pre") == "forced only"
    point = "#p-kl .chart svg [aria-label*='variant: B1_pv_fp8'] >> nth=5"
    drawn = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(drawn)  # a point that is being replaced takes no click
    page.click(point, force=True)  # another rung's point may lie on it
    page.wait_for_function("() => document.querySelector('#rung').value !== 'B1_q2'")
    assert seen.complaints == []


def test_phone_has_no_sideways_scroll(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.parametrize(
    ("scheme", "media", "dark"),
    [("light", "screen", False), ("dark", "screen", True), ("dark", "print", False)],
)
def test_page_is_dark_on_a_dark_screen_and_light_on_paper(browser, address, scheme, media, dark):
    page = browser.new_page(color_scheme=scheme)
    page.emulate_media(media=media, color_scheme=scheme)
    page.goto(address)
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(red) < 60) is dark
    page.close()
