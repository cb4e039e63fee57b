"""The report in a real browser: everything is drawn and nothing sticks out, on small and wide screens and on paper."""

import base64
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.integration.browser.chromium import Browser, Scheme
from tests.unit.outputs.report_pages import PAGES, SERVED

pytestmark = pytest.mark.xdist_group("browser")

STICKS_OUT = """
[...document.querySelectorAll("body *")].filter(one => {
  if (one.closest(".scroll") || !one.getClientRects().length) return false;
  const place = one.getBoundingClientRect();
  return place.right > innerWidth + 0.5 || place.left < -0.5;
}).map(one => one.outerHTML.slice(0, 200))
"""

TOO_WIDE = """
[...document.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.slice(0, 80))
"""

TALL = """
[...document.querySelectorAll(".replicas tr")].map(one => one.getBoundingClientRect().height)
"""

OVERLAPPING = """
[...document.querySelectorAll("svg.plot")].flatMap(plot => {
  const shown = [...plot.querySelectorAll("text.time, text.step")].filter(one => one.getClientRects().length);
  const places = shown.map(one => one.getBoundingClientRect());
  return places.flatMap((one, number) => places.slice(number + 1).filter(other =>
    one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom
  ).map(() => plot.textContent.slice(0, 80)));
})
"""

PLOTS = """
[...document.querySelectorAll("svg.plot")].map(plot => {
  const place = plot.querySelector(".stretched").getBoundingClientRect();
  return {x: place.x + scrollX, y: place.y + scrollY, width: place.width, height: place.height};
})
"""

COLOURED = """
(async () => {
  const bytes = Uint8Array.from(atob("PICTURE"), one => one.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], {type: "image/png"}));
  const context = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  context.drawImage(picture, 0, 0);
  const data = context.getImageData(0, 0, picture.width, picture.height).data;
  let coloured = 0;
  for (let at = 0; at < data.length; at += 4) {
    const pixel = data.subarray(at, at + 3);
    coloured += Math.max(...pixel) - Math.min(...pixel) > 60;
  }
  return coloured;
})()
"""
"""The pixels of a picture that are not grey."""

CONTRAST = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(one => {
      const part = one / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const ratio = one => (Math.max(one, back) + 0.05) / (Math.min(one, back) + 0.05);
  const words = [...document.querySelectorAll("p, td, th, dt, dd, h2, h3, .status, figcaption, summary")];
  const lines = [...document.querySelectorAll("path.line")];
  return {
    words: Math.min(...words.map(one => ratio(light(getComputedStyle(one).color)))),
    lines: Math.min(...lines.map(one => ratio(light(getComputedStyle(one).stroke)))),
  };
})()
"""


@cache
def content(name: str) -> str:
    """One of the pages, made once for all screens."""
    return {**PAGES, **SERVED}[name]()


def opened(browser: Browser, folder: Path, name: str) -> Browser:
    """The browser with one of the pages."""
    path = folder / f"{name}.html"
    path.write_text(content(name), encoding="utf-8")
    browser.open(path)
    return browser


@pytest.mark.parametrize(("name", "width"), [*product(PAGES, (390, 1280)), ("gpus", 1000), ("failing", 700)])
def test_nothing_sticks_out_or_overlaps(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    """No part of any page is wider than a phone or a screen, and no two labels of an axis lie on one another."""
    browser.look(width)
    page = opened(browser, tmp_path, name)
    assert [] == page.evaluate(STICKS_OUT)
    assert width == page.evaluate("document.documentElement.scrollWidth")
    assert [] == page.evaluate(OVERLAPPING)


@pytest.mark.parametrize("width", [390, 760, 1280])
@pytest.mark.parametrize("name", ["fleet", *SERVED])
def test_a_fleet_can_be_read_on_any_screen(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    """Nothing sticks out, no table has to be scrolled but by tablets, and no column is squeezed to a few letters."""
    browser.look(width)
    page = opened(browser, tmp_path, name)
    assert [] == page.evaluate(STICKS_OUT)
    assert width == 760 or [] == page.evaluate(TOO_WIDE.replace('".scroll"', '".scroll:has(.replicas, .groups)"'))
    assert max(page.evaluate(TALL), default=0.0) < 300.0


@pytest.mark.parametrize("name", ["leak", "agents", "soak"])
def test_a_wide_screen_has_room_for_every_table(browser: Browser, tmp_path: Path, name: str) -> None:
    """At 1280 pixels no table has to be scrolled."""
    browser.look(1280)
    assert [] == opened(browser, tmp_path, name).evaluate(TOO_WIDE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_plots_are_drawn(browser: Browser, tmp_path: Path, scheme: Scheme) -> None:
    """A picture of each plot has the colours that only its lines have: ground, bands, grid and text are grey."""
    browser.look(1280, scheme=scheme)
    page = opened(browser, tmp_path, "agents")
    plots: list[dict[str, float]] = page.evaluate(PLOTS)
    pictures = [base64.b64encode(page.shot(plot)).decode() for plot in plots]
    drawn = [page.evaluate(COLOURED.replace("PICTURE", picture)) for picture in pictures]
    assert 4 == len(plots)
    assert min(drawn) > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(browser: Browser, tmp_path: Path, scheme: Scheme) -> None:
    """Text stands out from the page by 4.5 to 1, lines by 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    browser.look(1280, scheme=scheme)
    contrast = opened(browser, tmp_path, "agents").evaluate(CONTRAST)
    assert contrast["words"] >= 4.5
    assert contrast["lines"] >= 3.0


def test_light_and_dark_are_as_the_reader_has_them(browser: Browser, tmp_path: Path) -> None:
    """The page's background is white or near black as the system prefers; in print it is always white."""
    grounds = []
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        browser.look(1280, scheme=scheme, media=media)  # type: ignore[arg-type]
        page = opened(browser, tmp_path, "leak")
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert ["rgb(255, 255, 255)", "rgb(15, 20, 25)", "rgb(255, 255, 255)"] == grounds


def test_paper_has_all_of_it(browser: Browser, tmp_path: Path) -> None:
    """Printed on A4, nothing sticks out."""
    # A page as wide as A4 within its margins (182 mm at 96 to the inch).
    browser.look(688, media="print")
    page = opened(browser, tmp_path, "agents")
    assert [] == page.evaluate(STICKS_OUT)
    assert [] == page.evaluate(OVERLAPPING)
    assert 4 <= len(page.evaluate(PLOTS))
    assert page.call("Page.printToPDF", printBackground=False)["data"].startswith("JVBERi0")


def test_nothing_is_fetched_and_nothing_runs(browser: Browser, tmp_path: Path) -> None:
    """A page of hostile names asks for nothing but itself, and makes no element of theirs."""
    # A server whose every name is markup.
    browser.look(1280)
    page = opened(browser, tmp_path, "hostile")
    assert [(tmp_path / "hostile.html").as_uri()] == page.requested
    assert 0 == page.evaluate("document.querySelectorAll('script, img, iframe, a, form, link, object').length")
    assert page.evaluate("typeof window.hurt") == "undefined"
