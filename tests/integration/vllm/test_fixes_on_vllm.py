"""The fix that a verdict prescribes, tried on a real vLLM: one start as it was set up, one with the first fix."""

import shlex
from pathlib import Path

import pytest

from tests.integration.vllm.cli import Result, kvdiag
from tests.integration.vllm.conftest import VllmHome
from tests.integration.vllm.engine import EngineError

pytestmark = pytest.mark.long


SMALL_POOL = ("--num-gpu-blocks-override", "106", "--block-size", "128")
"""Six of ten requests of 2K tokens."""


def run(vllm: VllmHome, when: str, trace: Path, *fix: str) -> Result:
    """One run of the steps on a server with the small pool, started with further flags."""
    with vllm.engine(f"concurrency-{when}", *SMALL_POOL, *fix, max_model_len_tokens=8_192) as server:
        return kvdiag("run", "--url", server.url, "--record", str(trace), "--output", "json")


def test_fewer_requests_at_once_are_not_preempted(vllm: VllmHome, tmp_path: Path) -> None:
    """Same model, same pool, one flag more; `baseline compare` finds no figure worse, and the later run ok."""
    traces = [tmp_path / f"{when}.jsonl" for when in ("before", "after")]
    before = run(vllm, "before", traces[0])
    found = before.finding("capacity.concurrency")
    assert found["status"] in ("suspect", "fault"), before.not_ok
    fix = found["prescription"]["changes"][0]["change"]
    assert fix.startswith("--max-num-seqs")
    after = run(vllm, "after", traces[1], *shlex.split(fix))
    assert "ok" == after.finding("capacity.concurrency")["status"], after.not_ok
    compared = kvdiag("baseline", "compare", *map(str, traces), "--output", "json")
    assert (0, "ok") == (compared.code, compared.document["after"]["worst"]), compared.stdout


def test_a_pool_below_the_admitted_length_starts_with_the_prescribed_one(vllm: VllmHome) -> None:
    """A real vLLM 0.32 refuses to start where its longest request does not fit: with the fix of its log it serves."""
    args = ("--num-gpu-blocks-override", "60", "--block-size", "128")
    refused = vllm.engine("context-before", *args, max_model_len_tokens=20_000, starts=1)
    with pytest.raises(EngineError), refused:
        pass
    (found,) = [
        one
        for one in kvdiag("diagnose", "--postmortem", str(refused.log), "--output", "json").document["findings"]
        if one["id"] == "capacity.long_context"
    ]
    assert "fault" == found["status"]
    fix = found["prescription"]["changes"][0]["change"]
    with vllm.engine("context-after", *args, *shlex.split(fix), max_model_len_tokens=20_000) as server:
        after = kvdiag("run", "--url", server.url, "--output", "json")
    assert "ok" == after.finding("capacity.long_context")["status"], after.not_ok
    assert after.finding("baseline.misconfigured")["status"] != "fault"
