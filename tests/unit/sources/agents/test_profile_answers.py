"""Answers of agents to a request for a profile: whose they are, and that impossible ones are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.model import ProfiledLoad
from kvdiag.sources.agents.agent_profiles import Asked, ProfileFolder, read_profile
from kvdiag.sources.agents.agent_publication import Publication
from tests.builders.allocation_profiles import answer

PUBLICATION = Publication(
    pid=100, start_ticks=7, title="VLLM::EngineCore", sequence=1, period_seconds=1.0, monotonic_seconds=1.0
)
ASKED = Asked(publication=PUBLICATION, identifier="a1", kind="host")
SNAPSHOT = answer()["last"]
STACK = answer()["stacks"][0]
FRAME = STACK["frames"][0]


def test_answer_is_read() -> None:
    """Both snapshots, the stacks and what is left of them."""
    profile = read_profile(answer(stacks=[{**STACK, "bytes": 7005}], other_stacks=1, other_bytes=-5), ASKED)
    assert ((7005, "a.py", 3), 7000, -5, 45.0) == (
        (profile.stacks[0].bytes, profile.stacks[0].frames[0].file, profile.stacks[0].frames[0].line),
        profile.traced_growth_bytes,
        profile.other_bytes,
        profile.seconds,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"process": {"pid": 101, "start_ticks": 7}},
        {"process": {"pid": 100, "start_ticks": 8}},
        {"process": None},
        {"last": None},
        {"last": {**SNAPSHOT, "traced_bytes": -1}},
        {"last": {**SNAPSHOT, "anonymous_bytes": 2**60}},
        {"last": {**SNAPSHOT, "held_seconds": "long"}},
        {"stacks": {}},
        {"stacks": [STACK] * 65},
        {"stacks": [7]},
        {"stacks": [{**STACK, "frames": [FRAME] * 17}]},
        {"stacks": [{**STACK, "frames": [7]}]},
        {"stacks": [{**STACK, "frames": [{**FRAME, "line": "3"}]}]},
        {"stacks": [{**STACK, "bytes": 2**60}]},
        {"stacks": [{**STACK, "blocks": -(2**60)}]},
        {"other_bytes": 2**60},
        {"other_bytes": 1.5},
        {"tracing_full": 1},
        {"ended_monotonic_seconds": 1e999},
        {"began_monotonic_seconds": 1e308, "ended_monotonic_seconds": 1e308},
        {"began_monotonic_seconds": 116.0},
        {"ended_monotonic_seconds": 159.0},
        {"last": {**SNAPSHOT, "at_monotonic_seconds": 114.0, "traced_bytes": 9000}},
        {"first": None, "stacks": [{**STACK, "bytes": 9000}]},
        {"stacks": [{**STACK, "bytes": 7001}]},
        {"stacks": [{**STACK, "frames": [{**FRAME, "line": -1}]}]},
        {"other_bytes": -1, "stacks": [{**STACK, "bytes": 7001}]},
        {"other_stacks": -1},
    ],
    ids=str,
)
def test_impossible_answer_is_refused(changes: dict[str, Any]) -> None:
    """Of another process, or with figures that no process has."""
    with pytest.raises(ValueError):  # noqa: PT011 - its text is for people
        read_profile(answer(**changes), ASKED)


def test_growth_is_since_the_start_where_the_traces_were_full() -> None:
    """Before the first snapshot: then there is none, and all that is traced grew."""
    profile = read_profile(answer(first=None, tracing_full=True, stacks=[{**STACK, "bytes": 9000}]), ASKED)
    assert (9000, 60.0) == (profile.traced_growth_bytes, profile.seconds)


def test_an_answer_has_no_counts_of_requests() -> None:
    """Kvdiag counts them: an agent's are not read."""
    assert ProfiledLoad() == read_profile(answer(load={"requests": 7.0}), ASKED).load


def test_names_of_files_may_be_shown() -> None:
    """A file may be called anything: line ends and control characters do not reach a terminal."""
    frame = {**FRAME, "file": "a\x1b[31m\n.py" + "x" * 500}
    profile = read_profile(answer(stacks=[{**STACK, "frames": [frame]}]), ASKED)
    shown = profile.stacks[0].frames[0].file
    assert (False, True) == (any(one in shown for one in "\x1b\n"), len(shown) <= 160)


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_folder_that_cannot_be_opened_is_refused(tmp_path: Path, folder: str) -> None:
    """With the reason, before anything is asked."""
    (tmp_path / "file").write_text("")
    with pytest.raises(KvdiagError):
        ProfileFolder(tmp_path / folder)


def test_answer_by_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """What stands in for an answer neither blocks nor is read."""
    os.mkfifo(tmp_path / "profile-100-7.json")
    folder = ProfileFolder(tmp_path)
    with pytest.raises(KvdiagError):
        folder.answer(ASKED)
    folder.close()


def test_refusal_is_the_reason(tmp_path: Path) -> None:
    """An agent that does not profile says why."""
    (tmp_path / "profile-100-7.json").write_text(json.dumps(answer(state="refused", reason="no\nGPU")))
    folder = ProfileFolder(tmp_path)
    with pytest.raises(KvdiagError, match="GPU"):
        folder.answer(ASKED)
    folder.close()


def test_answer_to_another_request_is_not_this_ones(tmp_path: Path) -> None:
    """It is waited for as long as the process lives; a process that exited will not answer."""
    (tmp_path / "profile-100-7.json").write_text(json.dumps(answer(id="b2")))
    folder = ProfileFolder(tmp_path)
    with pytest.raises(KvdiagError):
        folder.answer(ASKED)
    folder.close()
