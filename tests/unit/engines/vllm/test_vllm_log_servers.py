"""vLLM's startup log as a whole: several ranks, engines and starts in one file, and logs of several versions."""

import pytest

from kvdiag.engines import read_startup_log
from kvdiag.engines.vllm.startup_log import parse_log
from kvdiag.kv.calibration.engine_report import GIB
from tests.builders.answers import containing
from tests.unit.engines.vllm.vllm_logs import AUDIT, CONSUMED, LOGS, gib


def test_ranks_are_kept_apart_and_the_smallest_pool_decides() -> None:
    """Reported by each rank is there under its name; the engine gives all of them what the smallest affords."""
    lines = [
        "(Worker_PP0_TP0 pid=11) INFO [g.py:1] Available KV cache memory: 17.79 GiB",
        "(Worker_PP0_TP1 pid=12) INFO [g.py:1] Available KV cache memory: 17.73 GiB",
        "(Worker_PP1_TP0 pid=13) INFO [g.py:1] Available KV cache memory: 19.02 GiB",
    ]

    report = parse_log("\n".join(lines))

    assert [("Worker_PP0_TP0", 0), ("Worker_PP0_TP1", 0), ("Worker_PP1_TP0", 1)] == [
        (one.name, one.stage) for one in report.ranks
    ]
    assert report.deciding_rank == report.ranks[1]


def test_workers_of_one_name_are_told_apart_by_their_process() -> None:
    """V0's workers are all called VllmWorkerProcess, and its main process has no name."""
    names = ["", "(VllmWorkerProcess pid=521) ", "(VllmWorkerProcess pid=507) "]
    report = parse_log("\n".join(f"{name}INFO 04-12 08:21:19 [worker.py:267] {AUDIT}" for name in names))
    assert ["main process", "VllmWorkerProcess 1 of 2", "VllmWorkerProcess 2 of 2"] == [
        one.name for one in report.ranks
    ]


def test_of_data_parallel_engines_the_smallest_is_taken() -> None:
    """Each engine has a pool of its own; figures of two are never mixed."""
    lines = [
        "(EngineCore_DP0 pid=1) INFO [g.py:1] Available KV cache memory: 9.0 GiB",
        "(EngineCore_DP1 pid=2) INFO [g.py:1] Available KV cache memory: 8.0 GiB",
        "(EngineCore_DP0 pid=1) INFO [k.py:1] GPU KV cache size: 9,000 tokens",
        "(EngineCore_DP1 pid=2) INFO [k.py:1] GPU KV cache size: 8,000 tokens",
    ]

    report = parse_log("\n".join(lines))

    assert (8000, ["EngineCore_DP1"]) == (report.tokens, [one.name for one in report.ranks])
    assert "2 data-parallel engines" in report.notes[0]


def test_the_last_start_counts() -> None:
    """A server that was restarted into the same file, with other settings the second time."""
    first = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_text()
    second = (LOGS / "vllm-0.18.0-V1-reconstructed.log").read_text()
    report = parse_log(first + second)
    assert ("0.18.0", 245_360) == (report.settings.version, report.tokens)
    assert (None, None) == (report.settings.max_num_batched_tokens, report.num_blocks)
    assert containing("2 starts") in list(report.notes)


def test_a_start_that_has_not_told_its_memory_yet_does_not_hide_the_one_before() -> None:
    """A log that is copied while the server starts again."""
    text = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_text()
    again = "\n".join(text.splitlines()[:4])
    report = parse_log(f"{text}{again}\n")
    assert (136_080, True) == (report.tokens, any("a later start" in note for note in report.notes))


def test_a_sentence_that_is_wrapped_is_read_as_one() -> None:
    """Terminals and tickets break long lines where they like."""
    wrapped = CONSUMED.replace("utilization is ", "utilization is\n").replace("non-torch), ", "non-torch),\n")
    report = parse_log(f"(Worker_PP1_EP0 pid=1749) INFO 09-04 10:06:12 [gpu_worker.py:804] {wrapped}")

    told = report.ranks[0]

    assert ("Worker_PP1_EP0", gib(52.92), gib(2.32), gib(94.97), 0.92) == (
        told.name,
        told.consumed,
        told.activation,
        told.total,
        report.settings.memory_fraction_ratio,
    )


def test_the_model_is_told_and_not_its_drafter() -> None:
    """A drafter's architecture and length are printed after the model's own."""
    lines = [
        "INFO [model.py:1] Resolved architecture: Qwen3_5ForConditionalGeneration",
        "INFO [model.py:1] Using max model len 262144",
        "INFO [model.py:1] Resolved architecture: Qwen3_5MTP",
        "INFO [core.py:1] Initializing a V1 LLM engine (v0.24.0) with config: model='m', max_seq_len=65536",
        "INFO [k.py:1] GPU KV cache size: 8,000 tokens",
    ]

    told = parse_log("\n".join(lines)).settings

    assert ("Qwen3_5ForConditionalGeneration", 65_536) == (told.architecture, told.max_model_len_tokens)


def test_blocks_set_while_graphs_are_estimated_are_not_the_servers() -> None:
    """The estimate runs on a handful of blocks, and says so with the same words as --num-gpu-blocks-override."""
    override = "Overriding num_gpu_blocks={} with num_gpu_blocks_override={}"
    pool = "INFO [g.py:1] Available KV cache memory: 13.1 GiB\n"
    estimated = parse_log(f"INFO [k.py:1] {override.format(0, 16)}\n{pool}")
    chosen = parse_log(f"{pool}INFO [k.py:1] {override.format(900, 512)}")
    assert (None, 512) == (estimated.settings.blocks_override, chosen.settings.blocks_override)


def test_a_pool_below_zero_is_a_start_that_failed() -> None:
    """The figure is not used, and the note says why."""
    report = parse_log("INFO [g.py:1] Model loading took 5.0 GiB\nINFO [g.py:1] Available KV cache memory: -2.81 GiB")
    assert (None, True) == (report.ranks[0].pool, "-2.81 GiB: this start failed" in report.notes[0])


FIXTURES: dict[str, dict[str, object]] = {
    "vllm-0.32.0-cpu-llama": {"version": "0.32.0", "tokens": 521_783, "concurrency": 26.09, "ranks": 1, "pool": 1.0},
    "vllm-0.6.4-V0-reconstructed": {
        "version": "0.6.4.post1", "num_blocks": 1952, "concurrency": 1.56, "ranks": 1, "pool": 3.81, "total": 23.58},
    "vllm-0.7.3-V0-reconstructed": {
        "version": "0.7.3", "num_blocks": 5519, "concurrency": 2.69, "ranks": 1, "pool": 2.36, "total": 14.56},
    "vllm-0.9.1-V1-reconstructed": {
        "version": "0.9.1", "tokens": 136_080, "concurrency": 3.32, "ranks": 1, "pool": 18.69},
    "vllm-0.11.2-V1-tp4-reconstructed": {
        "version": "0.11.2", "tokens": 1_391_552, "concurrency": 169.87, "ranks": 4, "pool": 106.17},
    "vllm-0.18.0-V1-reconstructed": {
        "version": "0.18.0", "tokens": 245_360, "concurrency": 7.49, "ranks": 1, "pool": 13.1},
    "vllm-0.32.0-V1-tp2-composed": {
        "version": "0.32.0", "tokens": 1_013_008, "concurrency": 7.73, "ranks": 2, "pool": 61.83, "total": 79.19},
}  # fmt: skip


@pytest.mark.parametrize("name", FIXTURES)
def test_whole_logs(name: str) -> None:
    """Logs of several versions, from the first line to the last."""
    report = read_startup_log(LOGS / f"{name}.log")
    pool = report.deciding_rank.pool if report.deciding_rank else None
    told: dict[str, object] = {
        "version": report.settings.version,
        "tokens": report.tokens,
        "num_blocks": report.num_blocks,
        "concurrency": report.concurrency,
        "ranks": len(report.ranks),
        "pool": None if pool is None else round(pool.nominal_bytes / GIB, 2),
        "total": None if report.total_bytes is None else round(report.total_bytes / GIB, 2),
    }

    assert FIXTURES[name] == {field: value for field, value in told.items() if value is not None}


def test_nothing_secret_is_kept() -> None:
    """V0 prints its whole arguments, a key among them."""
    assert "not-for-eyes" not in repr(read_startup_log(LOGS / "vllm-0.6.4-V0-reconstructed.log"))
