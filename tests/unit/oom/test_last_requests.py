"""The requests that SGLang's log shows before its check of the pool failed, by the lines of 0.5.23's --log-requests."""

import pytest

from kvdiag.oom.last_requests import MAX_REQUESTS
from kvdiag.oom.log import read_failures

CHECK = "ValueError: pool memory leak detected! [full] total=8192, available=8000, evictable=100, protected=0"


def line(second: int, what: str, rid: str, text: str = "hi") -> str:
    """A line of the request logger."""
    return f"[2026-11-30 10:46:{second:02}] {what}: obj=GenerateReqInput(rid='{rid}', session_id=None, text='{text}')"


def found(*lines: str) -> list[tuple[str, bool]]:
    """The requests, and whether each finished, of a log that ends with the failed check."""
    failure = read_failures("\n".join((*lines, CHECK)))
    assert failure is not None
    return [(one.request, one.finished) for one in failure.last_requests]


BEFORE = (line(1, "Receive", "before"), line(2, "Finish", "before"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), []),
        ((*BEFORE, line(4, "Receive", "one")), [("one", False)]),
        ((*BEFORE, line(4, "Receive", "one"), line(4, "Finish", "one")), [("one", True)]),
        # Less than a second may lie between these times.
        ((*BEFORE, line(3, "Receive", "one")), [("before", True), ("one", False)]),
        # While one has not ended the engine is not idle.
        ((line(1, "Receive", "open"), line(9, "Receive", "one")), [("open", False), ("one", False)]),
        # The beginning of the log was cut.
        ((line(1, "Finish", "begun before"),), [("begun before", True)]),
        ((line(1, "Receive", "one").replace("11-30", "19-39"),), [("one", False)]),
    ],
)
def test_last_requests(lines: tuple[str, ...], expected: list[tuple[str, bool]]) -> None:
    """Those since the engine was surely idle."""
    assert expected == found(*lines)


def test_lines_that_users_write_name_no_request() -> None:
    """A prompt may quote a line of the log, with a line break before it; later lines than the failure do not count."""
    quoted = line(9, "Receive", "quoted").replace("'", "\\'")
    lines = [
        line(4, "Receive", "one", text=f"hi\\n{quoted}"),
        f"Received request x: prompt: {line(9, 'Receive', 'no')}",
    ]
    assert [("one", False)] == found(*lines)
    failure = read_failures("\n".join((*lines, CHECK, line(5, "Receive", "later"))))
    assert failure is not None
    assert ["one"] == [one.request for one in failure.last_requests]


def test_too_many_requests_are_none() -> None:
    """One of hundreds is no answer."""
    assert [] == found(*(line(1, "Receive", str(number)) for number in range(MAX_REQUESTS + 1)))
