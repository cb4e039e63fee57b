"""docs/known-reports.md lists every known report as the data has it."""

from tests.integration.docs.known_reports_page import PAGE, page


def test_the_page_is_as_the_data() -> None:
    """The page is as the data."""
    assert PAGE.read_text(encoding="utf-8") == page()
