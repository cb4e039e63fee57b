"""`kvdiag fit --from-log` of other engines: pools by that engine's arithmetic, inside the print's rounding."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main
from kvdiag.commands.fitting.engine_calibration import calibrate_engine, contradictions
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from tests.unit.commands.fit.fitting import refusal
from tests.unit.kv.pools.recorded_engines import vectors
from tests.unit.sources.gguf_files import gguf

GIB, MIB = 1 << 30, 1 << 20
HALF_GIB_DIGIT = GIB // 200
OPTIONS = FitOptions(output="json", offline=True)
PRINTED_STARTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "printed_starts.json").read_bytes())
LIMITED = [row for row in vectors("sglang", measured=True) if row["id"] in ("sglang-0.5.23-57", "sglang-0.5.23-49")]


def compared(
    capsys: pytest.CaptureFixture[str], model: str, report: EngineReport, options: FitOptions = OPTIONS
) -> tuple[int, dict[str, float]]:
    """The exit code, and the drift of each figure."""
    code = calibrate_engine(model, report, "the log", options)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, {one["figure"]: one["drift_ratio"] for one in document["comparisons"]}


def printed(gib: float) -> RankReport:
    """A rank's pool as SGLang prints it, two digits of GiB."""
    return RankReport(name="TP0", pool=PrintedSize(nominal_bytes=round(gib * GIB), slack_bytes=HALF_GIB_DIGIT))


def test_a_tensorrt_llm_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published start of Llama-2-7B: 64.75 GiB for 132,608 tokens, as printed last."""
    log = tmp_path / "server.log"
    log.write_text(
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.25 GiB for max tokens in paged KV cache (2560).\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 64.75 GiB for max tokens in paged KV cache (132608).\n"
    )

    code = main(["fit", "llama_7b", "--from-log", str(log), "--block-size", "64", "--output", "json", "--offline"])
    document = json.loads(capsys.readouterr().out)

    drifts = {one["figure"]: one["drift_ratio"] for one in document["comparisons"]}
    assert (code, drifts["kv_pool_bytes"], drifts["capacity_tokens"]) == (0, 0.0, 0.0)


def test_a_log_of_the_newer_manager_says_how_to_plan_its_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KVCacheManagerV2 prints the bytes of its pool with all digits, and no tokens."""
    log = tmp_path / "server.log"
    log.write_text(
        "[TRT-LLM] [I] TensorRT LLM version: 1.3.0\n"
        "[TRT-LLM] [I] KV cache manager v2 device quota set to 35.412312316894531GiB\n"
    )

    said = refusal(capsys, "llama_7b", "--from-log", str(log), "--offline")

    assert "--engine trtllm --kv-pool-bytes 38023680818" in said


def test_an_sglang_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Latent rows at pages of 64: 9,984 tokens in 0.06 GiB; twice the size is a drift."""
    (row,) = [one for one in LIMITED if one["id"] == "sglang-0.5.23-57"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(row["model_config"]))
    settings = EngineSettings(block_size_tokens=64, kv_dtype="bfloat16", device="cpu")
    report = EngineReport(
        engine_name="sglang", settings=settings, tokens=9_984, ranks=(printed(row["figures"]["kv_gib"]),)
    )

    same = compared(capsys, str(path), report)
    other = compared(capsys, str(path), replace(report, ranks=(printed(0.12),)))

    assert same == (0, {"kv_pool_bytes": 0.0, "capacity_tokens": 0.0})
    assert other[0] == 1
    assert other[1]["kv_pool_bytes"] < -0.4


def test_a_llama_cpp_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four slots of 8,192 cells with q8_0 keys: both caches together, on whichever devices."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    cells = 4 * (8_192 * 2 + 1_024 * 10) * (128 * 34 // 32 + 128 * 2)
    devices = [PrintedSize(nominal_bytes=part, slack_bytes=MIB // 200) for part in (cells // 3, cells - cells // 3)]
    report = EngineReport(
        engine_name="llamacpp",
        settings=EngineSettings(kv_dtype="q8_0/f16", max_model_len_tokens=8_192, block_size_tokens=1),
        tokens=32_768,
        ranks=tuple(RankReport(name=f"CUDA{place}", pool=size) for place, size in enumerate(devices)),
    )

    assert compared(capsys, str(path), report) == (0, {"kv_pool_bytes": 0.0, "capacity_tokens": 0.0})


@pytest.mark.parametrize("start", PRINTED_STARTS, ids=[start["why"] for start in PRINTED_STARTS])
def test_printed_starts(start: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What servers printed is predicted inside the print's rounding."""
    log, config = tmp_path / "server.log", tmp_path / "config.json"
    log.write_text("\n".join(start["lines"]))
    config.write_bytes(gguf(start["gguf"]) if "gguf" in start else json.dumps(start.get("config")).encode())
    options = ["--engine", start["engine"], "--output", "json", "--offline", *start["options"]]

    subject = [] if "listed" in start else [start.get("model") or str(config)]
    code = main(["fit", *subject, "--from-log", str(log), *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)

    drifts = {one["figure"]: one["drift_ratio"] for one in document["comparisons"]}
    assert abs(drifts.pop("weights_bytes", 0.0)) <= start.get("weights_within", 0.0)
    assert (code, set(drifts.values())) == (0, {0.0})
    assert {"kv_pool_bytes", "capacity_tokens"} <= drifts.keys()


@pytest.mark.parametrize(("types", "assumed"), [("", True), (", K (f16): 4096.00 MiB, V (f16): 4096.00 MiB", False)])
def test_types_that_a_log_does_not_show(
    types: str, assumed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are assumed to be the default, which a note says."""
    log = tmp_path / "server.log"
    log.write_text(f"llama_kv_cache: size = 8192.00 MiB (131072 cells, 16 layers, 1/1 seqs){types}\n")
    main(["fit", "qwen3.6-27b", "--from-log", str(log), "--output", "json", "--offline"])
    notes = json.loads(capsys.readouterr().out)["notes"]

    assert assumed is any("-ctk" in note for note in notes)


def test_a_log_that_lists_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison is with MODEL; beyond the limit a note names the way to the model's own settings."""
    (start,) = [one for one in PRINTED_STARTS if "listed" in one]
    log = tmp_path / "server.log"
    log.write_text("\n".join(start["lines"]))

    assert main(["fit", "llama_7b", "--from-log", str(log), "--output", "json", "--offline"]) == 1
    assert any("omit MODEL" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_a_listed_model_whose_layers_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """llama.cpp prints 40 characters of a list: heads of 48 layers are not known by it."""
    (start,) = [one for one in PRINTED_STARTS if "listed" in one]
    heads = "arr[i32,48]  = [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, ..."
    log = tmp_path / "server.log"
    log.write_text("\n".join(re.sub(r"(head_count_kv) u32 += 1", rf"\1 {heads}", line) for line in start["lines"]))

    assert "pass MODEL" in refusal(capsys, "--from-log", str(log), "--offline")


def test_blocks_of_a_size_that_the_log_does_not_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LMDeploy's log of InternLM-Chat-7B: blocks of 128 tokens, the default until 2024; no default is evidence."""
    log, config = tmp_path / "server.log", tmp_path / "config.json"
    printed_blocks = "[TM][INFO] [BlockManager] block_size = {} MB\n[TM][INFO] [BlockManager] max_block_count = 159\n"
    log.write_text(printed_blocks.format(64))
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    config.write_text(json.dumps({"model_type": "internlm", "vocab_size": 103_168, "torch_dtype": "float16", **shape}))

    asked = [str(config), "--from-log", str(log), "--engine", "lmdeploy", "--output", "json"]
    assert main(["fit", *asked]) == 0
    assert any("128" in note for note in json.loads(capsys.readouterr().out)["notes"])

    log.write_text(printed_blocks.format(60))
    assert "--block-size" in refusal(capsys, *asked)


def test_flags_that_the_log_contradicts() -> None:
    """A public log of Ling 3.0: neither the page nor the state slots of the command that was published with it."""
    report = EngineReport(engine_name="sglang", tokens=1_226_984, state_slots=117, ranks=(printed(9.21),))
    own = {"page_size": 64, "state_slots": 64}

    assert [True, True] == [any(word in note for note in contradictions(report, own)) for word in ("page", "slots")]
    assert [] == list(contradictions(report, {"page_size": 8, "state_slots": 117}))


@pytest.mark.parametrize(("model", "tokens"), [(None, 100), ("llama_7b", None)])
def test_nothing_to_compare(model: str | None, tokens: int | None) -> None:
    """Without MODEL, or without a capacity, there is no comparison."""
    with pytest.raises(KvdiagError):
        calibrate_engine(model, EngineReport(engine_name="sglang", tokens=tokens), "the log", OPTIONS)


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("llamacpp", "srv load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'true'\n"),
        ("tgi", "INFO text_generation_launcher: KV-cache blocks: 455553, size: 1\n"),
    ],
)
def test_tokens_without_bytes_are_nothing_to_compare(
    engine: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that prints no bytes of pool or weights is no agreement."""
    log = tmp_path / "server.log"
    log.write_text(line)

    assert str(log) in refusal(capsys, "llama_70b", "--engine", engine, "--from-log", str(log), "--offline")
