"""The engine's own check of its KV pool, with and without the agent's count of who lost what it misses."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.feeds.postmortem_inputs import gather
from kvdiag.model import Finding, LastHolder
from kvdiag.oom.account import Account
from tests.builders.values import owners
from tests.unit.diagnosis.postmortem.cases import case_of

LOG = "ValueError: pool memory leak detected! [full] total=1000, available=893, evictable=100, protected=0"
LOST = owners(
    orphaned_blocks=7,
    last_holders=(LastHolder(request="one", blocks=7, prompt_tokens=9, output_tokens=2, end="aborted"),),
)


def lost(*, with_box: bool) -> Finding:
    """The finding of the log, and of the black box of the same scheduler."""
    case = case_of(LOG)
    if with_box:
        (logged,) = case.accounts
        box = Account(origin="the black box", exact=True, shortage=logged.shortage, owners=LOST)
        case = replace(case, accounts=(logged, box))
    (found,) = [one for one in postmortem(case).findings if one.id == "leak.kv_blocks"]
    return found


def test_black_box_names_the_request() -> None:
    """Both reports are of one failure; the request is in the evidence."""
    found = lost(with_box=True)
    holders = [one.value for one in found.evidence if one.name == "last_holder"]
    assert ("fault", 1) == (found.status, len(holders))
    assert str(holders[0]).startswith("one: 7 blocks")
    assert "7 of 7" in found.summary


@pytest.mark.parametrize("show", [False, True])
def test_log_names_the_last_requests(tmp_path: Path, *, show: bool) -> None:
    """With --log-requests; ids are hashed unless they are asked for, and the check's own ids are those of the pool."""
    request = "[2026-11-30 10:46:14] Receive: obj=GenerateReqInput(rid='of a user', text='hi')\n"
    log = tmp_path / "sglang.log"
    log.write_text(f"{request}{LOG}, leaked_mamba_pages={{7, 9}}\n")
    case = gather((log,), show_request_ids=show)
    (found,) = [one for one in postmortem(case).findings if one.id == "leak.kv_blocks"]
    evidence = {one.name: str(one.value) for one in found.evidence}
    assert ("fault", "7, 9", show) == (
        found.status,
        evidence["lost_mamba_ids"],
        "of a user" in evidence["last_request"],
    )
    assert show is ("of a user" in found.summary)


def test_connector_that_held_blocks_is_named(tmp_path: Path) -> None:
    """With the requests, and the public reports of that connector."""
    log = tmp_path / "vllm.log"
    line = "WARNING 11-30 10:08:02 [nixl_connector.py:1] Releasing expired KV blocks for request {} which were read"
    start = "INFO 11-30 10:00:02 [core.py:1] Initializing a V1 LLM engine (v0.11.0) with config: model='m'"
    log.write_text("\n".join((start, line.format("one"), line.format("two"))))
    (found,) = [one for one in postmortem(gather((log,))).findings if one.id == "leak.kv_blocks"]
    names = [one.name for one in found.evidence]
    assert ("suspect", 2, 1) == (found.status, names.count("last_request"), names.count("connector"))
    assert "NixlConnector" in found.summary
    assert found.prescription is not None
    assert found.prescription.known_reports


def test_log_alone_says_how_to_learn_it() -> None:
    """The request is unknown; the fault is the same."""
    found = lost(with_box=False)
    assert "fault" == found.status
    assert "agent" in found.summary
