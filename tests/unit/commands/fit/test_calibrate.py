"""`kvdiag fit --from-log` and `--calibrate`: exit codes, what is printed, and the profile that a later plan uses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main
from kvdiag.commands.fitting.calibrate import on_gpu
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.sim import SCENARIOS, Drill
from kvdiag.sim.model_folder import ModelShape
from tests.unit.commands.fit.fitting import answer, refusal

GIB = 1 << 30
LOGS = Path(__file__).parents[3] / "fixtures" / "logs"
TWO_RANKS = str(LOGS / "vllm-0.32.0-V1-tp2-composed.log")
V0 = str(LOGS / "vllm-0.6.4-V0-reconstructed.log")
CPU = str(LOGS / "vllm-0.32.0-cpu-llama.log")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 32_768,
    "dtype": "bfloat16",
}
"""The model of the CPU server's log."""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Its folder."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "tiny")


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The usual file of profiles, in a home of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "kvdiag" / "profiles.json"


def drifts(document: dict[str, Any]) -> dict[str, float]:
    """Figure to drift."""
    return {one["figure"]: one["drift_ratio"] for one in document["comparisons"]}


def test_a_real_cpu_server_is_as_modelled(capsys: pytest.CaptureFixture[str], tiny: str, profiles: Path) -> None:
    """The log of a running vLLM 0.32: tokens and concurrency exact, and no profile of a CPU."""
    code, document = answer(capsys, tiny, "--from-log", CPU)

    assert (0, {"capacity_tokens": 0.0, "max_concurrency": 0.0}) == (code, drifts(document))
    assert (None, False) == (document["profile_file"], profiles.exists())
    assert any("on a CPU" in note for note in document["notes"])


def test_the_estimate_drifts_and_its_profile_does_not(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    """The first time the plan's pool is an estimate's, 2.1 % off; the second time it is measured."""
    arguments = ("llama-3.1-8b", "--from-log", TWO_RANKS, "--gpu", "h100")

    first, estimated = answer(capsys, *arguments)
    second, measured = answer(capsys, *arguments)

    assert (1, 0) == (first, second)
    pool = next(one for one in estimated["comparisons"] if one["figure"] == "kv_pool_bytes")
    assert "estimate" in pool["reasons"][0]
    assert abs(drifts(measured)["kv_pool_bytes"]) < 0.002
    assert str(profiles) == measured["profile_file"]


def test_every_rank_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Both with their reported sizes; the pool is that of the smaller one."""
    _, document = answer(capsys, "llama-3.1-8b", "--from-log", TWO_RANKS)
    pool = next(one for one in document["comparisons"] if one["figure"] == "kv_pool_bytes")

    assert ["Worker_TP0", "Worker_TP1"] == [rank["name"] for rank in document["ranks"]]
    assert ("Worker_TP1", round(61.83 * GIB)) == (pool["where"], pool["reported"])


def test_a_later_plan_uses_what_was_measured(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    """Context, activation and graphs of the log, the total that the engine saw, and where they come from."""
    plan = ("llama-3.1-8b", "--gpu", "h100", "--tp", "2", "--context", "8192")
    _, before = answer(capsys, *plan)
    main(["fit", "llama-3.1-8b", "--from-log", TWO_RANKS, "--gpu", "h100"])
    capsys.readouterr()

    _, after = answer(capsys, *plan)
    _, without = answer(capsys, *plan, "--no-profile")
    _, other = answer(capsys, "llama-3.1-8b", "--gpu", "a100", "--tp", "2", "--context", "8192")

    budget = after["budgets"][0]
    assert [round(gib * GIB) for gib in (8.41 - 7.51, 2.61 - 0.58, 0.58, 79.19)] == [
        pytest.approx(budget[name], abs=2)
        for name in ("context_bytes", "activation_bytes", "graph_bytes", "total_bytes")
    ]
    assert "measured: profile of 20" in after["notes"][0]
    assert TWO_RANKS in after["notes"][0]
    assert before == without
    assert "estimate" in other["notes"][0]
    assert profiles.exists()


def test_a_plan_for_another_batch_is_not_the_measured_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Activation grows with the batch: a profile of 8,192 tokens says nothing of 2,048."""
    main(["fit", "llama-3.1-8b", "--from-log", TWO_RANKS, "--gpu", "h100"])
    capsys.readouterr()

    _, plan = answer(capsys, "llama-3.1-8b", "--gpu", "h100", "--tp", "2", "--max-num-batched-tokens", "2048")

    assert "estimate" in plan["notes"][0]


def test_a_profile_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path, profiles: Path) -> None:
    """--profile names the file for both, and the usual one stays as it was."""
    own = tmp_path / "own.json"

    main(["fit", "llama-3.1-8b", "--from-log", V0, "--gpu", "rtx3090", "--profile", str(own)])
    capsys.readouterr()
    _, plan = answer(capsys, "llama-3.1-8b", "--gpu", "rtx3090", "--context", "2048", "--profile", str(own))

    assert "measured" in plan["notes"][0]
    assert (True, False) == (own.exists(), profiles.exists())


def test_no_profile_compares_and_keeps_nothing(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    """--no-profile leaves no trace."""
    main(["fit", "llama-3.1-8b", "--from-log", V0, "--gpu", "rtx3090", "--no-profile"])

    assert ("--no-profile" in capsys.readouterr().out, False) == (True, profiles.exists())


def test_a_broken_profile_file_is_an_error_with_a_way_out(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    """Neither ignored nor overwritten."""
    profiles.parent.mkdir(parents=True)
    profiles.write_text("{")

    lines = [refusal(capsys, "llama_70b", "--tp", "4"), refusal(capsys, "llama-3.1-8b", "--from-log", V0)]
    code = main(["fit", "llama_70b", "--tp", "4", "--gpu", "h100", "--no-profile"])

    assert all(str(profiles) in line and "--no-profile" in line for line in lines)
    assert (0, "{") == (code, profiles.read_text())


@pytest.mark.parametrize(
    ("model", "log", "code"),
    [
        ("qwen2.5-1.5b", "vllm-0.7.3-V0-reconstructed", 1),
        ("qwen3-8b", "vllm-0.9.1-V1-reconstructed", 0),
        ("qwen2.5-7b", "vllm-0.18.0-V1-reconstructed", 0),
        ("llama_70b", "vllm-0.11.2-V1-tp4-reconstructed", 1),
    ],
)
def test_published_logs(capsys: pytest.CaptureFixture[str], model: str, log: str, code: int) -> None:
    """Capacities are exact in all; what drifts is the estimate of a T4's activation, and weights taken as bf16."""
    found, document = answer(capsys, model, "--from-log", str(LOGS / f"{log}.log"))

    assert code == found
    capacities = ("num_blocks", "capacity_tokens", "max_concurrency")
    assert not [figure for figure, drift in drifts(document).items() if figure in capacities and drift]


def test_weights_in_another_format_are_named(capsys: pytest.CaptureFixture[str], profiles: Path) -> None:
    """The engine loaded fp8 and MODEL's config has bf16: the report names the mismatch, and no profile is stored."""
    arguments = ("llama_70b", "--from-log", str(LOGS / "vllm-0.11.2-V1-tp4-reconstructed.log"), "--gpu", "h200")

    _, document = answer(capsys, *arguments)
    code, right = answer(capsys, *arguments, "--weights", "fp8")

    weights = next(one for one in document["comparisons"] if one["figure"] == "weights_bytes")
    assert any("--quantization fp8" in reason for reason in weights["reasons"])
    assert (None, 0, str(profiles)) == (document["profile_file"], code, right["profile_file"])
    assert right["measured"]["overhead_bytes"] > 0
    assert right["measured"]["activation_bytes"] is None


def test_weights_in_host_memory_are_not_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profiles: Path
) -> None:
    """With --cpu-offload-gb a rank's weights are not the model's, and neither is the pool what a plan leaves."""
    log = tmp_path / "server.log"
    log.write_text(
        Path(TWO_RANKS).read_text().replace("non-default args: {", "non-default args: {'cpu_offload_gb': 10.0, ")
    )

    code, document = answer(capsys, "llama-3.1-8b", "--from-log", str(log), "--gpu", "h100")

    assert (code, set(drifts(document))) == (0, {"capacity_tokens", "max_concurrency"})


def test_a_log_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    """`kubectl logs pod | kvdiag fit MODEL --from-log -`."""
    with Path(CPU).open(encoding="utf-8") as log:
        monkeypatch.setattr("sys.stdin", log)
        code, document = answer(capsys, tiny, "--from-log", "-")

    assert (0, "the log from stdin") == (code, document["engine"]["origin"])


def test_a_name_in_a_log_moves_no_cursor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a log says goes to the terminal without its control characters."""
    log = tmp_path / "evil.log"
    log.write_text("(Worker\u202e pid=1) INFO [g.py:1] Available KV cache memory: 1.00 GiB\n# GPU blocks: 1\n")

    main(["fit", "llama-3.1-8b", "--from-log", str(log)])

    assert "\u202e" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama-3.1-8b", "--from-log", "/nonexistent.log"), ("/nonexistent.log", "No such file")),
        (("llama-3.1-8b", "--from-log", str(LOGS / "SOURCES.md")), ("SOURCES.md", "memory figures")),
        (("--from-log", V0), ("MODEL", "meta-llama/Llama-3.1-8B-Instruct")),
        (("gemma-3-27b", "--from-log", TWO_RANKS), ("different models", "LlamaForCausalLM", "gemma-3-27b")),
        (("llama-3.1-8b", "--from-log", TWO_RANKS, "--tp", "4"), ("--tp is 4", "reports 2")),
        (("llama-3.1-8b", "--from-log", V0, "--gpu", "h100"), ("--gpu h100", "23.6 GiB")),
        (("llama-3.1-8b", "--calibrate", "http://127.0.0.1:9"), ("127.0.0.1:9",)),
        (("llama-3.1-8b", "--profile", "/nonexistent.json"), ("/nonexistent.json",)),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Absent files and servers, logs of other models, and options that contradict the log."""
    line = refusal(capsys, *arguments)

    assert not [word for word in words if word not in line], line


def test_a_log_without_anything_to_compare_names_the_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A start that was cut off after its graphs."""
    log = tmp_path / "short.log"
    log.write_text("INFO [g.py:1] Graph capturing finished in 2 secs, took 0.11 GiB\n")

    line = refusal(capsys, "llama-3.1-8b", "--from-log", str(log))

    assert "Available KV cache memory" in line
    assert "Model loading took" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3.1-8b", "--from-log", V0, "--calibrate", "http://127.0.0.1:9"),
        ("llama-3.1-8b", "--from-log", V0, "--kv-pool-bytes", "1"),
        ("llama-3.1-8b", "--from-log", V0, "--grid"),
        ("llama-3.1-8b", "--gpu", "h100", "--profile", "x.json", "--no-profile"),
    ],
)
def test_wrong_usage_is_code_3(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """Options that exclude one another."""
    code = main(["fit", *arguments])

    assert (3, True) == (code, capsys.readouterr().err.startswith("kvdiag: "))


SHAPE = ModelShape(layers=32, hidden=2560, intermediate=7680, heads=24, kv_heads=8, head_dim=128, vocab=128_256)


@pytest.fixture
def server() -> Iterator[str]:
    """A simulated server that sizes its pool by its GPU, as a real one does."""
    story = replace(SCENARIOS["healthy"], model=SHAPE, kv_cache_memory_bytes=None)
    with Drill(story) as drill:
        yield drill.url


def test_a_server_is_compared_and_measured(capsys: pytest.CaptureFixture[str], server: str, profiles: Path) -> None:
    """Without MODEL the config comes from a local folder that kvdiag can read, and the GPU from NVML."""
    _, document = answer(capsys, "--calibrate", server)
    code, again = answer(capsys, "--calibrate", server)

    found = drifts(document)
    assert (0.0, 0.0) == (found["capacity_tokens"], found["max_concurrency"])
    assert str(profiles) == document["profile_file"]
    assert document["measured"]["overhead_bytes"] > 0
    assert (0, True) == (code, abs(drifts(again)["kv_pool_bytes"]) < 0.001)


def test_a_server_of_another_model_is_a_contradiction(capsys: pytest.CaptureFixture[str], server: str) -> None:
    """The server's own config says so."""
    line = refusal(capsys, "qwen3-8b", "--calibrate", server)

    assert "catalogue entry qwen3-8b" in line
    assert "llama with 32 full layers" in line


def test_a_fraction_that_the_log_does_not_tell_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5 7B under 0.18 at half of an L40S: 0.5 x 44.99 - 14.25 - 13.1 GiB are negative, at 0.9 they are not."""
    arguments = ("qwen2.5-7b", "--from-log", str(LOGS / "vllm-0.18.0-V1-reconstructed.log"), "--gpu", "l40s")

    _, small = answer(capsys, *arguments, "--memory-fraction", "0.5")
    _, usual = answer(capsys, *arguments)

    assert (None, True) == (small["measured"], "50 %" in small["notes"][-1])
    overhead = round(46_068 * 2**20 * 0.9 - (14.25 + 13.1) * GIB)
    assert usual["measured"]["overhead_bytes"] == pytest.approx(overhead, abs=8)
    assert (round(0.24 * GIB), False) == (usual["measured"]["graph_bytes"], usual["measured"]["graphs_in_fraction"])


SPARSE_START = """\
INFO 03-27 06:01:30 [core.py:101] Initializing a V1 LLM engine (v0.32.0) with config: \
model='deepseek-ai/DeepSeek-V3.2', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=8, kv_cache_dtype=fp8
INFO 03-27 06:01:30 [gpu_worker.py:101] Available KV cache memory: 40.0 GiB
INFO 03-27 06:01:30 [kv_cache_utils.py:826] GPU KV cache size: 893,504 tokens
"""


@pytest.mark.parametrize(("gpu", "assumed"), [((), True), (("--gpu", "h200"), False)])
def test_a_format_that_is_assumed_for_a_log_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, gpu: tuple[str, ...], *, assumed: bool
) -> None:
    """Without --gpu a log does not show the GPU's generation."""
    log = tmp_path / "start.log"
    log.write_text(SPARSE_START)

    _, document = answer(capsys, "deepseek-v3.2", "--from-log", str(log), "--no-profile", *gpu)

    assert 0.0 == drifts(document)["capacity_tokens"]
    assert assumed is any(note.startswith("formats of Hopper assumed") for note in document["notes"])


@pytest.mark.parametrize(
    ("known", "name", "expected"), [(None, "b200", 100), (90, "b200", 90), (None, None, None), (None, "mi300x", None)]
)
def test_the_servers_gpu_decides_the_generation(known: int | None, name: str | None, expected: int | None) -> None:
    """As NVML names it, unless --gpu does."""
    assert expected == on_gpu(Deployment(compute_capability=known), name).compute_capability
