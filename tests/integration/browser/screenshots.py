"""Pictures of reports of every kind, to be looked at: `make screenshots OUT=folder`.

Other reports can be named too: `python -m tests.integration.browser.screenshots FOLDER FILE.html...`
"""

import base64
import sys
from pathlib import Path

from tests.integration.browser.chromium import Scheme, browsing
from tests.unit.outputs.report_pages import PAGES

SCREENS: tuple[tuple[int, Scheme], ...] = ((1280, "light"), (1280, "dark"), (390, "light"))


def main(folder: Path, more: list[Path]) -> None:
    """Write each page, its pictures, and what a printer would make of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.html").write_text(page(), encoding="utf-8")
    with browsing() as browser:
        for path in (*(folder / f"{name}.html" for name in PAGES), *more):
            for width, scheme in SCREENS:
                browser.look(width, scheme=scheme)
                browser.open(path.resolve())
                (folder / f"{path.stem}-{width}-{scheme}.png").write_bytes(browser.whole())
            paper = browser.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
            (folder / f"{path.stem}.pdf").write_bytes(base64.b64decode(paper["data"]))
    print(folder)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
