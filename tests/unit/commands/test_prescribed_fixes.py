"""The fix that a verdict prescribes, tried: simulated servers that a setting mends are started with it."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvdiag.commands.after_run.fix_check import FIRST_FIX, checked, first_fix, given_flags
from kvdiag.commands.drill import simulated
from kvdiag.errors import KvdiagError
from tests.builders.runs import judged
from tests.builders.values import OOM
from tests.builders.worlds import World
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.bad_input.refusals import call, refusal
from tests.unit.commands.conftest import Run

MENDED: Mapping[str, str] = {
    "fragmentation": "fragmentation.allocator",
    "concurrency-thrash": "capacity.concurrency",
    "long-context-oom": "capacity.long_context",
}
"""Scenarios that a setting mends, and the verdict that it ends. The others leak, or another program must go."""


QUICK_SECONDS = 10.0
"""A third of the time of one run."""


@pytest.mark.parametrize("story", MENDED)
def test_a_server_started_with_the_first_fix_has_no_fault(story: str, run: Run) -> None:
    """The flags as they were prescribed, nothing else changed: the verdict has ended, and there is no other.

    Memory that a long request took may stay unexplained without the agent, by when it was sampled: the whole is then
    unknown.
    """
    verdict = MENDED[story]
    first, *_ = run.result.finding(verdict)["prescription"]["changes"]
    assert first["mends"]
    with simulated(story, shlex.split(first["change"])) as url:
        again = kvdiag("run", "--url", url, "--output", "json")
    accepted = [(0, "ok"), (3, "unknown")] if verdict == "capacity.long_context" else [(0, "ok")]
    assert (again.code, again.document["worst"]) in accepted, again.not_ok
    assert again.finding(verdict)["status"] in ("ok", "unknown")


@pytest.mark.long
def test_a_fix_is_checked_by_one_command() -> None:
    """The server is run as it is and with the flags of its first fix: the document is the second run's."""
    result = kvdiag("run", "--simulate", "concurrency-thrash", "--check-fix", "first", "--output", "json")
    assert (0, "ok") == (result.code, result.document["worst"]), result.not_ok
    assert "with --max-num-seqs 5: capacity.concurrency: ended" == result.stderr.splitlines()[-1]


SHORT = judged(World(failing={"long_context": OOM}))
HEALTHY = judged(World())


def test_the_first_fix_is_that_of_the_worst_finding() -> None:
    """Split as a shell would; given flags stay as they are, and `first` is not known before the first run."""
    flag, size = first_fix(SHORT, "long-context-oom")
    assert ("--kv-cache-memory-bytes", True) == (flag, size.isdecimal())
    assert ("--max-num-seqs", "6") == given_flags("--max-num-seqs 6", "healthy")
    assert given_flags(FIRST_FIX, "healthy") is None


def test_no_computed_fix_is_an_error() -> None:
    """A verdict without a fault has none."""
    with pytest.raises(KvdiagError):
        first_fix(HEALTHY, "healthy")


@pytest.mark.parametrize("flags", ["", "  ", "''", "--max-num-seqs '6", "--no-such-flag", "--max-num-seqs many"])
def test_flags_that_cannot_be_checked_are_refused_before_the_first_run(flags: str) -> None:
    """Empty, ending within a quote, or none of a simulated server: in one line that names the option."""
    began_seconds = time.monotonic()
    assert "--check-fix" in refusal("run", "--simulate", "healthy", "--check-fix", flags)
    assert time.monotonic() - began_seconds < QUICK_SECONDS


@pytest.mark.long
def test_verdict_stays_where_it_has_no_fix() -> None:
    """`first` on a healthy server: its diagnosis, then the reason why nothing was checked."""
    result = kvdiag("run", "--simulate", "healthy", "--check-fix", "first", "--output", "json")
    assert (3, "ok") == (result.code, result.document["worst"])
    assert "--check-fix" in result.stderr.splitlines()[-1]


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
