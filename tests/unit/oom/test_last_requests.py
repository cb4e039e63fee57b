"""The requests that a log names: before SGLang's check of its pool failed, by the lines of 0.5.23's --log-requests, and
those whose blocks a connector of vLLM held.
"""

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


VLLM = "(EngineCore_DP0 pid=2) WARNING 11-30 10:08:02 [worker.py:1131] "
LEASE = VLLM + (
    "Releasing expired KV blocks for request cmpl-{} which were retrieved by 0 remote worker(s) before lease expired."
)
# Of 0.11.
TIMEOUT = LEASE.partition(" which")[0] + " which were retrieved by 0 decode worker(s) within 480 seconds."
MOONCAKE = VLLM + (
    "Request cmpl-{} timed out after 480 seconds without being sent. Freeing its blocks on the producer side."
)


@pytest.mark.parametrize(
    ("wording", "connector"),
    [(LEASE, "NixlConnector"), (TIMEOUT, "NixlConnector"), (MOONCAKE, "MooncakeConnector")],
)
def test_requests_whose_blocks_a_connector_held(wording: str, connector: str) -> None:
    """Each once, with the connector; a prompt that quotes the line names none, and a failure counts first."""
    quoted = f"INFO 11-30 10:08:01 [logger.py:40] Received request cmpl-9: prompt: '{wording.format('evil')}'"
    held = "\n".join((quoted, *(wording.format(name) for name in ("1", "2", "1"))))
    found = read_failures(held)
    assert found is not None
    assert ("kv_held", connector, ["cmpl-1", "cmpl-2"]) == (
        found.shortage.kind,
        found.connector,
        [one.request for one in found.last_requests],
    )
    failed = read_failures(f"{held}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert failed is not None
    assert ("torch", ()) == (failed.shortage.kind, failed.last_requests)
