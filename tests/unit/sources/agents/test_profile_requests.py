"""Requests for a profile in the agents' folder: which are in use, which were abandoned, and whose are removed."""

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.sources.agents.agent_profiles import Asked, ProfileFolder
from tests.builders.allocation_profiles import answer
from tests.unit.sources.agents.test_profile_answers import ASKED, PUBLICATION

REQUEST, ANSWER, AGENT = "profile-request-100-7.json", "profile-100-7.json", "agent-100-7.json"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ProfileFolder]:
    """The agents' folder."""
    opened = ProfileFolder(tmp_path)
    yield opened
    opened.close()


def left(path: Path, name: str, text: Any, *, age_seconds: float = 0.0) -> None:
    """Leave a file that is so old."""
    (path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    os.utime(path / name, (time.time() - age_seconds,) * 2)


def request(seconds: Any = 10.0) -> dict[str, Any]:
    """A request as another kvdiag writes it."""
    return {"kvdiag_profile_request": 1, "id": "a1", "kind": "host", "seconds": seconds, "max_tracing_bytes": 1000}


@pytest.mark.parametrize(
    ("text", "age_seconds", "in_use"),
    [
        (request(), 69.0, True),
        (request(), 71.0, False),
        (request("long"), 71.0, True),
        (request(1e9), 661.0, False),
        (request(), -3600.0, False),
        ("", 1.0, True),
        ("", 6.0, False),
    ],
)
def test_request_is_in_use_until_its_time_is_over(
    folder: ProfileFolder, tmp_path: Path, text: Any, age_seconds: float, in_use: bool
) -> None:
    """Its own seconds and a minute for the answer; one that was never written ends within seconds."""
    left(tmp_path, REQUEST, text, age_seconds=age_seconds)
    if in_use:
        with pytest.raises(KvdiagError):
            folder.ask(PUBLICATION, "host", 5.0)
    else:
        folder.ask(PUBLICATION, "host", 5.0)
    assert in_use == ("5.0" not in (tmp_path / REQUEST).read_text())


@pytest.mark.parametrize(
    ("change", "age_seconds", "in_use"),
    [
        ({}, 6.0, False),
        ({"state": "refused"}, 6.0, False),
        ({}, 1.0, True),
        ({"state": "tracing"}, 6.0, True),
        ({"id": "b2"}, 6.0, True),
    ],
    ids=str,
)
def test_answered_request_is_abandoned_when_nobody_reads_the_answer(
    folder: ProfileFolder, tmp_path: Path, change: dict[str, Any], age_seconds: float, in_use: bool
) -> None:
    """A kvdiag that waits reads it within a second: one that was killed leaves both."""
    left(tmp_path, REQUEST, request(600.0), age_seconds=20.0)
    left(tmp_path, ANSWER, answer(**change), age_seconds=age_seconds)
    if in_use:
        with pytest.raises(KvdiagError):
            folder.ask(PUBLICATION, "host", 5.0)
    else:
        folder.ask(PUBLICATION, "host", 5.0)


def test_refusal_says_how_long_the_other_takes(folder: ProfileFolder, tmp_path: Path) -> None:
    """The time of the other profile that is left."""
    left(tmp_path, REQUEST, request(), age_seconds=10.0)
    with pytest.raises(KvdiagError, match="1 min at most"):
        folder.ask(PUBLICATION, "host", 5.0)


def test_files_of_a_later_request_stay(folder: ProfileFolder, tmp_path: Path) -> None:
    """One that was suspended for long does not end the profile of another."""
    left(tmp_path, REQUEST, request() | {"id": "later"})
    left(tmp_path, ANSWER, answer(id="later"))
    folder.withdraw(ASKED)
    assert {REQUEST, ANSWER} == {path.name for path in tmp_path.iterdir()}
    folder.withdraw(Asked(publication=PUBLICATION, identifier="later", kind="host"))
    assert [] == list(tmp_path.iterdir())


def test_removed_request_is_not_waited_for(folder: ProfileFolder, tmp_path: Path) -> None:
    """The agent traces for it no longer: the error names the folder."""
    asked = folder.ask(PUBLICATION, "host", 5.0)
    (tmp_path / REQUEST).unlink()
    with pytest.raises(KvdiagError, match=str(tmp_path)):
        folder.answer(asked)


def test_process_that_no_longer_publishes_is_not_waited_for(folder: ProfileFolder, tmp_path: Path) -> None:
    """In another container it cannot be looked up, and its file stays when it is killed."""
    document = {
        "kvdiag_agent": 1,
        "process": {"pid": 100, "start_ticks": 7, "title": "VLLM::EngineCore"},
        "sequence": 1,
        "period_seconds": 1.0,
        "monotonic_seconds": 1.0,
    }
    asked = folder.ask(PUBLICATION, "host", 5.0)
    left(tmp_path, AGENT, document, age_seconds=50.0)
    assert folder.answer(asked) is None
    left(tmp_path, AGENT, document, age_seconds=70.0)
    with pytest.raises(KvdiagError):
        folder.answer(asked)


def test_deleted_folder_is_named(tmp_path: Path) -> None:
    """Before a request, and during a profile, which does not take it for the exit of the process."""
    path = tmp_path / "published"
    path.mkdir()
    folder = ProfileFolder(path)
    asked = folder.ask(PUBLICATION, "host", 5.0)
    (path / REQUEST).unlink()
    path.rmdir()
    for attempt in (lambda: folder.ask(PUBLICATION, "host", 5.0), lambda: folder.answer(asked)):
        with pytest.raises(KvdiagError, match="deleted"):
            attempt()
    folder.withdraw(asked)
    assert () == folder.processes()
    folder.close()


def test_request_that_does_not_fit_is_not_left(folder: ProfileFolder, tmp_path: Path) -> None:
    """On a full disk, here by a limit of the file size: a half request would refuse the next profile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(KvdiagError, match="space"):
            folder.ask(PUBLICATION, "host", 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [] == list(tmp_path.iterdir())


def test_folder_that_takes_no_files_is_named() -> None:
    """One in /proc takes none from root either."""
    folder = ProfileFolder(Path("/proc/self"))
    with pytest.raises(KvdiagError, match="cannot write a request"):
        folder.ask(PUBLICATION, "host", 5.0)
    folder.close()
