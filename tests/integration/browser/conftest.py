"""One browser for the session, started by the first test that asks."""

from collections.abc import Iterator

import pytest

from tests.fixtures.require import require
from tests.integration.browser.chromium import Browser, BrowserEnvError, browsing, program


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser; the test is skipped with one line where there is none, and fails under CI=true."""
    try:
        program()
    except BrowserEnvError as error:
        require(ok=False, what=f"a browser ({error})")
    with browsing() as opened:
        yield opened
