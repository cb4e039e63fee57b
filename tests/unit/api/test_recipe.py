"""`kvdiag.testing.assert_no_leak`, as a test of an engine calls it, on simulated servers."""

import pytest

from kvdiag import KvdiagError
from kvdiag.commands.drill import simulated
from kvdiag.testing import assert_no_leak


@pytest.mark.long
def test_a_server_that_keeps_blocks_fails_the_test() -> None:
    """With the diagnosis as its message."""
    with simulated("kv-leak", ()) as url, pytest.raises(AssertionError, match=r"leak\.kv_blocks"):
        assert_no_leak(url, requests=10)


@pytest.mark.long
def test_a_healthy_server_passes() -> None:
    """And its diagnosis is there to look at."""
    with simulated("healthy", ()) as url:
        found = assert_no_leak(url, requests=10)
        assert ("ok", url) == (found.finding("leak.kv_blocks").status, found.history.name)


def test_a_server_that_is_not_there_is_an_error() -> None:
    """No verdict on what could not be reached."""
    with pytest.raises(KvdiagError, match=r"^(?!kvdiag:).*127\.0\.0\.1:9"):
        assert_no_leak("http://127.0.0.1:9", requests=10)
