"""The fix that a verdict prescribes, tried: simulated servers that a setting mends are started with it."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvdiag.commands.drill import simulated
from kvdiag.commands.fix_check import FIRST_FIX, checked, fix_flags
from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis
from tests.builders.runs import judged
from tests.builders.values import OOM
from tests.builders.worlds import World
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.bad_input.refusals import call
from tests.unit.commands.conftest import Run

MENDED: Mapping[str, str] = {
    "fragmentation": "fragmentation.allocator",
    "concurrency-thrash": "capacity.concurrency",
    "long-context-oom": "capacity.long_context",
}
"""Scenarios that a setting mends, and the verdict that it ends. The others leak, or another program must go."""


@pytest.mark.parametrize("story", MENDED)
def test_a_server_started_with_the_first_fix_has_no_fault(story: str, run: Run) -> None:
    """The flags as they were prescribed, nothing else changed: the verdict has ended, and there is no other."""
    verdict = MENDED[story]
    first, *_ = run.result.finding(verdict)["prescription"]["changes"]
    assert first["mends"]
    with simulated(story, shlex.split(first["change"])) as url:
        again = kvdiag("run", "--url", url, "--output", "json")
    assert (0, "ok") == (again.code, again.document["worst"]), again.not_ok
    assert again.finding(verdict)["status"] in ("ok", "unknown")


@pytest.mark.long
def test_a_fix_is_checked_by_one_command() -> None:
    """The server is run as it is and with the flags of its first fix: the document is the second run's."""
    result = kvdiag("run", "--simulate", "concurrency-thrash", "--check-fix", "first", "--output", "json")
    assert (0, "ok") == (result.code, result.document["worst"]), result.not_ok
    assert "with --max-num-seqs 5: capacity.concurrency: ended" == result.stderr.splitlines()[-1]


SHORT = judged(World(failing={"long_context": OOM}))
HEALTHY = judged(World())


def test_the_first_fix_is_the_default() -> None:
    """Of the worst finding that has one, split as a shell would; given flags stay as they are."""
    flag, size = fix_flags(FIRST_FIX, SHORT)
    assert ("--kv-cache-memory-bytes", True) == (flag, size.isdecimal())
    assert ("--max-num-seqs", "6") == fix_flags("--max-num-seqs 6", None)


@pytest.mark.parametrize(("given", "before"), [(FIRST_FIX, HEALTHY), (FIRST_FIX, None), ("--max-num-seqs '6", SHORT)])
def test_what_cannot_be_checked_is_refused(given: str, before: Diagnosis | None) -> None:
    """No finding has a fix, or the flags end within a quote."""
    with pytest.raises(KvdiagError):
        fix_flags(given, before)


def test_the_line_names_what_has_ended_and_what_remains() -> None:
    """By the ids of the findings of both runs."""
    both = replace(SHORT, findings=(*SHORT.findings, *judged(World(leaked_blocks_per_request=4)).findings))
    line = checked(both, SHORT, ("--max-num-seqs", "6"))
    assert "leak.kv_blocks: ended" in line
    assert "capacity.long_context: remains" in line
    assert "capacity.long_context: new" in checked(HEALTHY, SHORT, ("--block-size", "32"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "http://127.0.0.1:9", "--check-fix", "--max-num-seqs 6"),
        ("--simulate", "healthy", "--check-fix", "--max-num-seqs 6", "--dry-run"),
    ],
    ids=["a real server", "a dry run"],
)
def test_only_a_simulated_server_is_started_again(arguments: tuple[str, ...]) -> None:
    """No server of anybody is restarted by kvdiag."""
    assert "--check-fix" in call("run", *arguments).stderr
