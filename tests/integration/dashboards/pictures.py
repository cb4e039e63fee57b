"""The pictures of README and dashboards/README.md: `make pictures`, about 20 minutes in real time.

A report of a run on a simulated server that leaks KV blocks, and the frame of `top` in README; both boards, drawn from
their JSON and a Prometheus that has scraped simulated servers.
By hand: `python -m tests.integration.dashboards.pictures FOLDER [MINUTES]`.
"""

import sys
import tempfile
import time
from pathlib import Path

from dashboards.drawing.board_page import WIDTH
from kvdiag.commands.drill import simulated
from tests.integration.browser.chromium import Scheme, browsing
from tests.integration.dashboards.boards import Prometheus, drawn
from tests.integration.dashboards.scene import SCRAPE_SECONDS, scene
from tests.integration.vllm.cli import kvdiag

README = Path(__file__).parents[3] / "README.md"
USUAL_URL = "http://127.0.0.1:8000"
START_MINUTES = 5.0
"""Before the range that is shown: a slope over the first seconds of a process is no growth."""

REPORT_WIDTH, REPORT_HEIGHT = 1000, 1130
LEAKS = "10.42.0.11:8000"
FIRST_ROWS = 37
"""Lines of the grid that a reader of README needs: from the verdict to growth."""


def main(folder: Path, minutes: float = 15.0) -> None:
    """Write report.png, dashboard.png and fleet.png, and the frame in README."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        report = scratch / "report.html"
        with simulated("kv-leak") as url:
            kvdiag("run", "--url", url, "--report", str(report))
            _renew_frame(kvdiag("top", "--url", url, "--once").stdout, url)
        _shot(report, folder / "report.png", REPORT_WIDTH, "light", REPORT_HEIGHT)
        with scene(scratch / "data") as url:
            time.sleep((START_MINUTES + minutes) * 60)
            now = time.time() - SCRAPE_SECONDS
            ask = Prometheus(url=url, end_seconds=now, range_seconds=minutes * 60, step_seconds=SCRAPE_SECONDS)
            pages = {
                "dashboard": drawn("kvdiag.json", ask, rows=FIRST_ROWS, instance=LEAKS),
                "fleet": drawn("kvdiag-fleet.json", ask),
            }
        for title, text in pages.items():
            path = scratch / f"{title}.html"
            path.write_text(text, encoding="utf-8")
            _shot(path, folder / f"{title}.png", WIDTH, "dark")


def _renew_frame(frame: str, url: str) -> None:
    """Put a frame of `top` into README, with the usual address of a server instead of a simulated one's."""
    title, _, rest = frame.partition("\n")
    name, _, moment = title.replace(url, USUAL_URL).rpartition(" ")
    title = f"{name.ljust(len(title) - len(moment))}{moment}"
    text = README.read_text(encoding="utf-8")
    before, opening, after = text.partition("```\nkvdiag top  ")
    assert opening, "README has no frame of top"
    README.write_text(f"{before}```\n{title}\n{rest.rstrip()}\n```{after.partition('```')[2]}", encoding="utf-8")


def _shot(path: Path, picture: Path, width: int, scheme: Scheme, height: int | None = None) -> None:
    with browsing() as browser:
        browser.look(width, scheme=scheme)
        browser.open(path)
        clip = None if height is None else {"x": 0.0, "y": 0.0, "width": float(width), "height": float(height)}
        picture.write_bytes(browser.whole() if clip is None else browser.shot(clip))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
