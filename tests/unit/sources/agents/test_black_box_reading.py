import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.errors import KvdiagError
from kvdiag.sources.agents.black_boxes import parse, read_folder

GIB = 2**30
BOX: dict[str, Any] = {
    "kvdiag_black_box": 1,
    "number": 0,
    "device": 1,
    "asked_bytes": GIB,
    "allowed_bytes": 80 * GIB,
    "free_bytes": GIB // 2,
    "document": {
        "kvdiag_agent": 1,
        "wall_seconds": 1000.5,
        "monotonic_seconds": 10.0,
        "process": {"pid": 42, "start_ticks": 7, "title": "VLLM::Worker_TP1"},
        "ranks": {"tensor": 1},
        "torch": {"backend": "native"},
        "devices": [
            {
                "index": 1,
                "uuid": None,
                "statistics": {"allocated_bytes": {"current": 70 * GIB}, "reserved_bytes": {"current": 72 * GIB}},
            }
        ],
        "errors": {},
    },
}
NAME = "oom-42-7-0.json"


def changed(**changes: Any) -> bytes:
    """The black box with other values."""
    return json.dumps({**BOX, **changes}).encode()


def test_failure_and_what_torch_held_are_read() -> None:
    """The box is an account with exact figures, also of a torch that does not name its device."""
    actual, _ = parse(changed())

    figures = actual.shortage
    assert (1000.5, "VLLM::Worker_TP1 42") == (actual.at_seconds, actual.process)
    assert (1, GIB, GIB // 2, 80 * GIB, 70 * GIB, 2 * GIB) == (
        figures.device,
        figures.asked_bytes,
        figures.free_bytes,
        figures.total_bytes,
        figures.allocated_bytes,
        figures.unallocated_bytes,
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"NaN",
        b"[" * 100_000,
        changed(kvdiag_black_box=2),
        changed(kvdiag_black_box=True),
        changed(device=-1),
        changed(asked_bytes="1"),
        changed(free_bytes=2**60),
        changed(document=None),
        changed(document={}),
        changed(document={**BOX["document"], "process": []}),
    ],
)
def test_what_is_no_black_box_is_refused(content: bytes) -> None:
    """Wrong types, ranges, versions and shapes are one error with a reason."""
    with pytest.raises(ValueError, match=r".+"):
        parse(content)


def test_impossible_statistics_leave_the_failure() -> None:
    """What torch held is left out where it cannot be; what was asked for and was there stays."""
    document = json.loads(json.dumps(BOX["document"]))
    document["devices"][0]["statistics"]["allocated_bytes"]["current"] = 99 * GIB
    actual, _ = parse(changed(document=document))
    assert (GIB, None, None) == (actual.shortage.asked_bytes, actual.shortage.allocated_bytes, actual.allocator)


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.floats(), lambda e: st.lists(e) | st.dictionaries(st.text(), e)
    )
)
def test_any_document_is_read_or_refused(document: Any) -> None:
    """Nothing that stands in a box makes it fail otherwise."""
    try:
        actual, _ = parse(json.dumps({**BOX, "document": document}))
    except ValueError:
        return
    assert actual.shortage is not None


def test_folder_is_untrusted(tmp_path: Path) -> None:
    """Links, pipes, strangers' names and damaged files are gaps or nothing; the good box is read."""
    (tmp_path / NAME).write_bytes(changed())
    (tmp_path / "oom-42-7-1.json").symlink_to(tmp_path / NAME)
    os.mkfifo(tmp_path / "oom-42-7-2.json")
    (tmp_path / "oom-42-7-3.json").write_bytes(changed()[:100])
    (tmp_path / "oom-42-7-4.json").write_bytes(b" " * 2**20)
    (tmp_path / "oom-other.json").write_bytes(changed())
    (tmp_path / "oom-42-7-5.json").mkdir()

    accounts, gaps = read_folder(tmp_path)

    assert [f"the black box {NAME}"] == [account.origin for account in accounts]
    assert 5 == len(gaps)


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The path and the reason are named."""
    with pytest.raises(KvdiagError, match="No such file"):
        read_folder(tmp_path / "none")


LEAK = "ValueError: pool memory leak detected! [full] total=100, available=92, evictable=1, protected=0, session_held=0"
LOST: dict[str, Any] = {
    "kvdiag_black_box": 1,
    "leak": LEAK,
    "document": {
        **BOX["document"],
        "devices": [],
        "kv_blocks": {
            "at_monotonic_seconds": 10.0,
            "engine": "0",
            "usable_blocks": 100,
            "owners": {
                **dict.fromkeys(("running", "waiting", "connector", "deferred", "pinned", "unconfirmed"), 0),
                "cached_free": 1,
                "free": 92,
                "orphaned": 7,
            },
            "counts": 40,
            "closed_counts": 1,
            "culprits": [{"id": "cmpl-1", "blocks": 7, "prompt_tokens": 120, "output_tokens": 9, "end": "aborted"}],
        },
    },
}


def test_scheduler_that_its_own_check_ends_is_read() -> None:
    """The count of its pool and the requests that lost pages, whose ids are hashed unless they are asked for."""
    shown, _ = parse(json.dumps(LOST), show_request_ids=True)
    hashed, _ = parse(json.dumps(LOST))
    assert ("kv_lost", [7]) == (shown.shortage.kind, [count.lost for count in shown.shortage.counts])
    assert shown.owners is not None
    assert hashed.owners is not None
    assert (7, "cmpl-1") == (shown.owners.orphaned_blocks, shown.owners.last_holders[0].request)
    assert "cmpl-1" != hashed.owners.last_holders[0].request


@pytest.mark.parametrize("leak", [7, "x" * 5000])
def test_impossible_leak_is_refused(leak: object) -> None:
    """The text of an error, and no more than one has."""
    with pytest.raises(ValueError, match="leak"):
        parse(json.dumps({**LOST, "leak": leak}))


def test_impossible_count_leaves_the_leak() -> None:
    """Owners that exceed the pool are dropped, as those of a publication are."""
    document = {**LOST["document"], "kv_blocks": {**LOST["document"]["kv_blocks"], "usable_blocks": 1}}
    read, _ = parse(json.dumps({**LOST, "document": document}))
    assert (None, "kv_lost") == (read.owners, read.shortage.kind)
