import time
from pathlib import Path

import pytest

from kvdiag.oom.account import Work
from kvdiag.oom.log import read_failures

FOLDER = Path(__file__).parents[2] / "fixtures" / "failures"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"


def text(name: str) -> str:
    """One of the logs."""
    return (FOLDER / name).read_text(encoding="utf-8")


def test_first_failure_counts_and_the_others_are_its_consequences() -> None:
    """The rank whose graphs did not fit is named, though another rank's capture and the engine fail as well."""
    actual = read_failures(text("vllm-0.32-capture.log"))

    assert actual is not None
    assert ("torch", 136 * 2**20, 1) == (actual.shortage.kind, actual.shortage.asked_bytes, actual.shortage.device)
    assert ("Worker_TP1", 1, "graph_capture", "traceback", 2) == (
        actual.process,
        actual.rank,
        actual.phase,
        actual.phase_source,
        actual.later,
    )


def test_step_that_failed_is_known_where_the_engine_dumps_it() -> None:
    """The largest request of the step and the engine's last statistics are the ones before the failure."""
    actual = read_failures(text("vllm-0.11-logprobs.log"))
    expected = Work(scheduled_tokens=6014, requests=3, largest_request="cmpl-7", largest_tokens=6012)
    assert actual is not None
    assert expected == actual.work
    assert ("logprobs", 3, 0) == (actual.phase, actual.running, actual.waiting)
    assert pytest.approx(0.118) == actual.kv_usage_ratio


def test_ranks_that_print_at_once_are_told_apart() -> None:
    """The rest of a message that another rank's lines have cut in two is found."""
    actual = read_failures(text("vllm-0.8-sampler.log"))
    assert actual is not None
    assert (1, int(605.88 * 2**20), 1024) == (actual.rank, actual.shortage.free_bytes, actual.max_num_seqs)
    assert "warmup" == actual.phase


def test_without_a_traceback_it_is_how_far_the_log_had_come() -> None:
    """The last startup message of the engine shows the phase in which it failed."""
    actual = read_failures(f"INFO Available KV cache memory: 8.0 GiB\nfar\n{'.' * 900}\n{OOM}")
    assert actual is not None
    assert ("kv_pool", "progress") == (actual.phase, actual.phase_source)


@pytest.mark.parametrize(
    "unit", ["out of memory. ", "Process 1 has ", "1" * 50, "(" * 50, "Traceback (most recent call last)\n", "Killed\n"]
)
def test_no_text_is_gone_back_over(unit: str) -> None:
    """Four times the text takes about four times as long, for any text; a pattern that backtracks takes sixteen."""
    took = []
    for size in (2**17, 2**19):
        text = f"{OOM} {unit * (size // len(unit))}"
        began = time.process_time()
        read_failures(text)
        took.append(time.process_time() - began)
    assert took[1] < 10.0 * max(took[0], 0.02)
