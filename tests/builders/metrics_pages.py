"""Pages of metrics, parsed at once."""

from kvdiag.sources.prometheus_text import Page, PageParser


def parse_page(text: str) -> Page:
    """The page's series by name; the errors of `PageParser.parsing`."""
    steps = PageParser().parsing(text)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            page: Page = end.value
            return page
