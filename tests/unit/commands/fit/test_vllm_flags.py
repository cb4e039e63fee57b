"""Flags of `vllm serve` and its environment on the command line of `kvdiag fit`."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands.fit import command
from kvdiag.kv.fit.vllm_flags import VLLM_FLAGS, VLLM_OPTIONS
from tests.unit.commands.fit.fitting import GIB, answer, refusal

MODEL = ("llama-3-8b", "--context", "2048")
WINDOWS = "gemma-3-27b"
POOL = ("--kv-pool-bytes", str(10 * GIB))


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document's figures, without its notes."""
    document = answer(capsys, *arguments)[1]
    return {name: value for name, value in document.items() if name not in ("notes", "levers", "combinations")}


def budget(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """The budget of the GPU."""
    return dict(answer(capsys, *MODEL, *arguments)[1]["budgets"][0])


def test_no_flag_is_an_option_too() -> None:
    """It would be taken out before the option is read; and every option without a meaning elsewhere is one."""
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}

    assert set() == own & set(VLLM_FLAGS)
    assert set() == set(VLLM_OPTIONS) - {option.name for option in command.params}


@pytest.mark.parametrize(
    "flags",
    [
        "--port 8001 --host=::",
        "--trust_remote_code --served-model-name a b --disable-log-stats",
        "--no-enable-lora --enable-prefix-caching --enable-chunked-prefill",
        "--prefill-context-parallel-size 1 -pcp=1 --watermark 0.0",
        "--model-impl auto --runner generate --load-format safetensors",
        "--kv-sharing-fast-prefill --kv-offloading-size 20",
        '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}',
        "--attention-backend FLASH_ATTN --enable-expert-parallel -dp 2",
        "--reasoning-config.a b",
    ],
)
def test_flags_that_change_nothing_are_accepted(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    """The figures are those without them, and no note speaks of them."""
    plain, document = answer(capsys, *MODEL), answer(capsys, *MODEL, *flags.split())

    assert plain == document


@pytest.mark.parametrize(
    "flag", ["-O3", "-O 1", "--compilation-config {}", "--compilation-config.mode 3", "--limit-mm-per-prompt.image 1"]
)
def test_flags_outside_the_estimate_are_noted(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Their figures are as without them, which a note says."""
    plain, noted = answer(capsys, *MODEL)[1], answer(capsys, *MODEL, *flag.split())[1]

    assert plain["num_blocks"] == noted["num_blocks"]
    assert len(plain["notes"]) + 1 == len(noted["notes"])
    assert any("the estimate leaves out" in note for note in noted["notes"])


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--fully-sharded-loras", "--fully-sharded-loras"),
        ("--lora-target-modules q_proj k_proj", "--lora-target-modules"),
        ("--prefill-context-parallel-size 2", "--prefill-context-parallel-size"),
        ("-pcp 2", "-pcp"),
        ("--use_replayssm", "--use-replayssm"),
        ("--runner pooling", "--runner"),
        ("--eplb-config.num_redundant_experts 2", "--eplb-config"),
        ("--speculative-config.method mtp", "one JSON object"),
        ("--config server.yaml", "--config"),
        ('--kv-transfer-config {"kv_connector":"HiSparseConnector"}', "HiSparseConnector"),
        ("--attention-backend CUTLASS_MLA", "--attention-backend"),
        ("--mamba-cache-dtype int3", "--mamba-cache-dtype"),
        ("--cpu-offload-gb -1", "--cpu-offload-gb"),
        ("--kv-cache-memory-bytes 1GiB --num-gpu-blocks-override 9", "not both"),
        ("--engine sglang --kv-cache-memory-bytes 1GiB", "--kv-cache-memory-bytes"),
        ("--num-speculative-tokens 2", "--speculative-config with a method"),
    ],
)
def test_flags_that_are_not_modelled_are_refused(capsys: pytest.CaptureFixture[str], flags: str, word: str) -> None:
    """By one line that names the flag."""
    assert word in refusal(capsys, *MODEL, *flags.split())


@pytest.mark.parametrize(
    ("model", "flags", "word"),
    [
        ("mixtral-8x7b", "--data-parallel-size 2", "--data-parallel-size"),
        ("mixtral-8x7b", "--tp 3 --enable-expert-parallel", "--enable-expert-parallel"),
        (WINDOWS, "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 5", "sliding"),
        ("deepseek-v3", "--tp 8 --attention-backend FLASH_ATTN", "--attention-backend"),
    ],
)
def test_flags_that_are_not_modelled_for_a_model(
    capsys: pytest.CaptureFixture[str], model: str, flags: str, word: str
) -> None:
    """Experts over replicas, and layers of another format where vLLM itself does not start."""
    assert word in refusal(capsys, model, "--context", "2048", *flags.split())


@pytest.mark.parametrize("pool", [GIB, 4 * GIB])
def test_a_pool_in_bytes_replaces_the_fraction(capsys: pytest.CaptureFixture[str], pool: int) -> None:
    """The pool is that large with any --gpu-memory-utilization, and the rest of the GPU is free."""
    given = budget(capsys, "--kv-cache-memory-bytes", str(pool), "--gpu-memory-utilization", "0.3")

    assert (pool, 0) == (given["kv_pool_bytes"], given["reserve_bytes"])


def test_a_pool_in_bytes_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and pool together exceed the GPU, however short the requests are."""
    code, document = answer(capsys, *MODEL, "--kv-cache-memory-bytes", "75GiB")

    assert (2, 0) == (code, document["max_requests"])
    assert "--kv-cache-memory-bytes" in document["notes"][0]


def test_a_pool_in_bytes_without_a_gpu_is_the_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """As --kv-pool-bytes."""
    from kvdiag.commands import main  # noqa: PLC0415

    printed = []
    for option in ("--kv-pool-bytes", "--kv-cache-memory-bytes"):
        assert 0 == main(["fit", *MODEL, option, "4GiB", "--output", "json"])
        printed.append(capsys.readouterr().out)

    assert printed[0] == printed[1]


def test_weights_in_host_memory_leave_room_for_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """So many GiB less on each GPU."""
    plain, offloaded = budget(capsys), budget(capsys, "--cpu-offload-gb", "4")

    assert 4 * GIB == plain["weights_bytes"] - offloaded["weights_bytes"]
    assert 4 * GIB == offloaded["kv_pool_bytes"] - plain["kv_pool_bytes"]


@pytest.mark.parametrize("variable", [False, True])
def test_graphs_take_nothing_of_the_fraction(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, variable: bool
) -> None:
    """Where there are none, or where vLLM does not count them."""
    if variable:
        monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")

    assert 0 == budget(capsys, *(() if variable else ("--enforce-eager",)))["graph_bytes"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 8_192),
        ("--performance-mode throughput", 16_384),
        ("--max-num-seqs 2 --max-model-len 2048", 4_096),
        ("--no-enable-chunked-prefill --context 20000", 20_000),
        ("--max-num-batched-tokens 1024 --performance-mode throughput", 1_024),
    ],
)
def test_tokens_of_a_step(capsys: pytest.CaptureFixture[str], flags: str, expected: int) -> None:
    """Their default on an H100 follows other flags: the blocks of a window's request are those of that step."""
    flag = ("--context", "20000") if "context" not in flags and "len" not in flags else ()
    given = figures(capsys, WINDOWS, *POOL, "--gpu", "h100", *flag, *flags.split())
    context = ("--context", "2048") if "len" in flags else ("--context", "20000")
    step = figures(capsys, WINDOWS, *POOL, "--gpu", "h100", *context, "--max-num-batched-tokens", str(expected))

    assert step == given


def test_sequences_are_the_demand_without_another(capsys: pytest.CaptureFixture[str]) -> None:
    """--concurrency is what is asked for where both are given."""
    alone = answer(capsys, *MODEL, "--max-num-seqs", "7")[1]
    both = answer(capsys, *MODEL, "--max-num-seqs", "7", "--concurrency", "3")[1]

    assert (7, 3) == (alone["requests"], both["requests"])


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ("--concurrency 32", None),
        ("--concurrency 32 --max-num-seqs 8", 8),
        ("--concurrency 1024", None),
        ("--concurrency 1025", 1_024),
        ("--concurrency 1025 --performance-mode throughput", None),
        ("--concurrency 257 --gpu l4", 256),
    ],
)
def test_requests_beyond_those_of_a_step_wait(capsys: pytest.CaptureFixture[str], flags: str, most: int | None) -> None:
    """The others wait, however large the pool is; the default depends on the GPU."""
    notes = answer(capsys, *MODEL, *flags.split())[1]["notes"]

    assert [most] == [int(one.split()[4]) for one in notes if "--max-num-seqs" in one] or [None]


@pytest.mark.parametrize(("flags", "most"), [("", 8), ("--max-num-seqs 128", 8), ("--max-num-seqs 16", 16)])
def test_a_model_that_denoises_runs_few_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: str, most: int
) -> None:
    """DiffusionGemma: sampling a block of tokens takes memory that is in no estimate."""
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1_000}
    path.write_text(json.dumps({"model_type": "diffusion_gemma_text", "max_position_embeddings": 8_192, **sizes}))
    asked = (str(path), "--weights", "20GiB", "--concurrency", "32", *flags.split())
    notes = answer(capsys, *asked)[1]["notes"]

    assert [most] == [int(one.split()[4]) for one in notes if "--max-num-seqs" in one]


def test_a_connector_without_the_hybrid_manager_turns_it_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Windows then cost their full length; one that has it changes nothing."""
    plain = figures(capsys, WINDOWS, *POOL)
    other = '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[{"kv_connector":"Mine"}]}}'

    assert plain == figures(capsys, WINDOWS, *POOL, "--kv-transfer-config", '{"kv_connector":"OffloadingConnector"}')
    off = figures(capsys, WINDOWS, *POOL, "--disable-hybrid-kv-cache-manager")
    assert plain != off
    assert off == figures(capsys, WINDOWS, *POOL, "--kv-transfer-config", other)
    assert off == figures(capsys, WINDOWS, *POOL, "--kv-offloading-size", "4", "--kv-offloading-backend", "lmcache")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("VLLM_KV_CACHE_LAYOUT", "HND", "VLLM_KV_CACHE_LAYOUT"),
        ("VLLM_PP_LAYER_PARTITION", "20,x", "VLLM_PP_LAYER_PARTITION"),
        ("VLLM_PP_LAYER_PARTITION", "20,20", "VLLM_PP_LAYER_PARTITION"),
    ],
)
def test_variables_that_are_not_usable_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
) -> None:
    """By one line that names the variable."""
    monkeypatch.setenv(name, value)

    assert word in refusal(capsys, *MODEL, "--pp", "2")


def test_layers_of_stages_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage with 24 of 32 layers has three quarters of the cache."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "24,8")
    document = figures(capsys, *MODEL, "--pp", "2", *POOL)

    assert 10 * GIB // document["num_blocks"] // (16 * 4_096) == 24


def test_longer_requests_than_the_model_s_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 turns the check off."""
    arguments = ("llama-3-8b", "--context", "100000")
    refused = answer(capsys, *arguments)[0]
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")

    assert (2, 0) == (refused, answer(capsys, *arguments)[0])


def test_whole_heads_are_not_modelled_beside_an_indexer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_MLA_DISABLE=1 with sparse latent attention is refused by its name."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")

    assert "VLLM_MLA_DISABLE" in refusal(capsys, "deepseek-v3.2", "--tp", "8", "--context", "2048")


@pytest.mark.parametrize("flags", ["--port --fully-sharded-loras", "--watermark", "--port", "--attention-config"])
def test_a_flag_without_its_value_is_refused(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    """The next flag is not taken for the value, and a flag at the end is not taken for a harmless one."""
    assert flags.split(maxsplit=1)[0] in refusal(capsys, *MODEL, *flags.split())


def drafting(method: str, model: str) -> tuple[str, str]:
    """Three drafts of another model."""
    return "--speculative-config", json.dumps({"method": method, "model": model, "num_speculative_tokens": 3})


def test_a_draft_model_adds_its_own_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, with its embedding, divided by the same ranks."""
    alone = answer(capsys, "llama-3.2-1b", "--context", "2048", "--tp", "2")[1]["budgets"][0]["weights_bytes"]
    plain, with_drafts = (
        budget(capsys, "--tp", "2", *flags)["weights_bytes"] for flags in ((), drafting("draft_model", "llama-3.2-1b"))
    )

    assert alone == with_drafts - plain


def eagle(folder: Path, *, checkpoint: bool) -> str:
    """An EAGLE drafter's folder: its config, and a checkpoint with one layer's output and what joins two states."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if checkpoint:
        shapes = {"midlayer.self_attn.o_proj.weight": [8, 16], "fc.weight": [16, 8]}
        offsets = ([0, 256], [256, 512])
        header = json.dumps(
            {
                name: {"dtype": "BF16", "shape": shape, "data_offsets": span}
                for (name, shape), span in zip(shapes.items(), offsets, strict=True)
            }
        ).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(512))
    return str(folder)


def test_an_eagle_drafter_adds_what_its_checkpoint_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it lacks is the model's; what joins its inputs is whole on every rank."""
    folder = eagle(tmp_path, checkpoint=True)
    plain, with_drafts = (
        budget(capsys, "--tp", "2", *flags)["weights_bytes"] for flags in ((), drafting("eagle3", folder))
    )

    assert 128 + 256 == with_drafts - plain


def test_an_eagle_drafter_without_a_checkpoint_is_not_weighed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whether it shares the model's embedding is not in its config; a note says so."""
    notes = answer(capsys, *MODEL, *drafting("eagle3", eagle(tmp_path, checkpoint=False)))[1]["notes"]

    assert any("weights of the drafter" in note for note in notes)


def test_slots_of_adapters_are_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight adapters of rank 16 for Llama 3 8B, which a note names; without --enable-lora the sizes say nothing."""
    flags = ("--max-loras", "8", "--max-lora-rank", "16")
    plain, unused, used = (budget(capsys, *given)["weights_bytes"] for given in ((), flags, ("--enable-lora", *flags)))
    layer = 7 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336

    assert plain == unused
    assert 8 * 16 * 2 * (32 * layer + 2 * (128_256 + 4096)) == used - plain
    assert any("LoRA slots" in note for note in answer(capsys, *MODEL, "--enable-lora")[1]["notes"])


def test_a_rank_that_vllm_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks are named."""
    assert "--max-lora-rank is 12" in refusal(capsys, *MODEL, "--enable-lora", "--max-lora-rank", "12")
