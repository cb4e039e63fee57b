"""Parameters of models that no recording holds, by the shapes in vLLM's model files; names; sizes beyond belief."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.weights.linear_layers import LayerParameters, Parameters
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.recordings import recorded_config

H = 60
# Six heads of 14, three with K and V of their own.
BASE = {
    "vocab_size": 211, "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 14, "intermediate_size": 86,
}  # fmt: skip
LATENT = {"kv_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 13}
QUERY = H * 6 * 14


def parameters(**config: Any) -> Parameters:
    """The parameters of a config."""
    return count_parameters(config, parse_architecture(config))


def of_layer(layer: LayerParameters) -> dict[str, int]:
    """The matrices of a layer by their names."""
    return {one.name: one.parameters for one in layer.linears}


def attention(index: int = 0, **config: Any) -> dict[str, int]:
    """The attention matrices of one layer of a config like BASE."""
    found = of_layer(parameters(**{**BASE, **config}).layers[index])
    return {name: count for name, count in found.items() if name.startswith("self_attn")}


def test_values_may_be_chosen_among() -> None:
    """K2-Horizon routes among value projections in its expert layers (k2_horizon.py::K2HorizonMoVAAttention)."""
    config = {
        "model_type": "k2_horizon", "num_experts": 5, "moe_intermediate_size": 34, "first_k_dense_replace": 1,
        "mova_num_experts": 4,
    }  # fmt: skip
    plain = {
        "self_attn.q_proj": QUERY,
        "self_attn.k_proj": H * 3 * 14,
        "self_attn.v_proj": H * 3 * 14,
        "self_attn.o_proj": QUERY,
    }

    assert plain == attention(0, **config)
    assert {**plain, "self_attn.v_experts.0": 3 * H * 3 * 14} == attention(1, **config)
    assert 0 == attention(1, **{**config, "mova_num_experts": None})["self_attn.v_experts.0"]
    assert 0 == attention(1, **{**config, "mova_num_experts": 0})["self_attn.v_experts.0"]
    values = parameters(**{**BASE, **config}).layers[1].linears[4]
    assert 3 == values.most_parts


@pytest.mark.parametrize(
    ("config", "query"),
    [
        ({"model_type": "llama", "attention_gate_func": "sigmoid"}, QUERY),
        ({"model_type": "k2_horizon"}, QUERY),
        ({"model_type": "k2_horizon", "attention_gate_func": "sigmoid"}, 2 * QUERY),
        ({"model_type": "muse_glimmer"}, 2 * QUERY),
        ({"model_type": "muse_glimmer_text", "use_attn_output_gate": False}, QUERY),
        ({"model_type": "laguna"}, QUERY + H * 6),
        ({"model_type": "laguna", "gating": True}, QUERY + H * 6),
        ({"model_type": "laguna", "gating": "per-head"}, QUERY + H * 6),
        ({"model_type": "laguna", "gating": "per-element"}, 2 * QUERY),
        ({"model_type": "laguna", "gating": False}, QUERY),
        ({"model_type": "laguna", "gating": False, "num_attention_heads_per_layer": [9, 6]}, H * 9 * 14),
        ({"model_type": "laguna", "gating": False, "num_attention_heads_per_layer": [1]}, H * 14),
    ],
)
def test_a_gate_is_as_wide_as_the_query_or_has_an_output_for_each_head(config: dict[str, Any], query: int) -> None:
    """Gates of attention's output are counted with the query, where a model has them."""
    assert query == attention(**{**BASE, **config})["self_attn.q_proj"]


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"])
def test_every_qwen_with_states_has_a_gate(model_type: str) -> None:
    """Qwen3-Next and Qwen3.5 gate attention, under each of their names (qwen3_next.py: attn_output_gate)."""
    states = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 7, "linear_value_head_dim": 9,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 1, "num_experts": 0,
    }  # fmt: skip

    assert 2 * QUERY == attention(model_type=model_type, **states)["self_attn.q_proj"]


@pytest.mark.parametrize("model_type", ["iquestloopcoder", "iquest_loopcoder"])
def test_a_loop_runs_the_same_layers(model_type: str) -> None:
    """What runs three times is stored once (iquest_loopcoder.py)."""
    layers = parameters(**{**BASE, "model_type": model_type, "loop_num": 3, "head_dim": None}).layers

    assert [4, 4] == [sum(one.name.startswith("self_attn") for one in layer.linears) for layer in layers]


@pytest.mark.parametrize("stack", [{"num_layers_per_stack": 3, "num_hidden_layers": 99}, {"num_hidden_layers": 3}])
def test_two_stacks_run_in_cycles(stack: dict[str, int]) -> None:
    """Two stacks of three layers are stored, and 24 are run (hrm_text.py)."""
    config = {**BASE, "model_type": "hrm_text", "head_dim": 10, "H_cycles": 2, "L_cycles": 3, **stack}
    layers = parameters(**config).layers

    assert [True] * 6 + [False] * 18 == [layer.total > 0 for layer in layers]


def test_sliding_layers_may_have_heads_of_their_own() -> None:
    """MiMo-V2's sliding layers have heads, KV heads and sizes of their own (mimo_v2.py)."""
    config = {
        "model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1], "sliding_window": 64, "v_head_dim": 10,
        "swa_num_attention_heads": 9, "swa_num_key_value_heads": 1, "swa_head_dim": 16, "swa_v_head_dim": 8,
    }  # fmt: skip

    assert [H * 6 * 14, H * 3 * 14, H * 3 * 10, H * 6 * 10] == list(attention(0, **config).values())
    assert [H * 9 * 16, H * 1 * 16, H * 1 * 8, H * 9 * 8] == list(attention(1, **config).values())


def test_linear_attention_has_a_gate_beside_query_key_and_value() -> None:
    """Ring-linear projects into q, k, v and a gate, of every head (bailing_moe_linear.py); heads divide the width
    where no size is given.
    """
    config = {**LATENT, "model_type": "bailing_hybrid", "layer_group_size": 2, "q_lora_rank": None}

    assert {"self_attn.in_proj": 4 * QUERY, "self_attn.out_proj": QUERY} == attention(0, **config)
    assert {"self_attn.in_proj": 4 * H * H, "self_attn.out_proj": H * H} == attention(0, **{**config, "head_dim": None})


def test_delta_attention_has_whole_gates_without_a_low_rank() -> None:
    """Ling 3's two gates are as wide as its heads (bailing_moe_v3.py), Kimi-Linear's go through one head's size."""
    config = {
        **LATENT, "model_type": "bailing_hybrid", "layer_group_size": 2, "short_conv_kernel_size": 4, "q_lora_rank": 22
    }  # fmt: skip
    whole = attention(0, **config, no_kda_lora=True)
    low = attention(0, **config)

    assert {
        "self_attn.q_proj": 3 * QUERY,
        "self_attn.b_proj": H * 6,
        "self_attn.g_proj": 2 * QUERY,
        "self_attn.o_proj": QUERY,
    } == whole
    assert [2 * 14 * 84, 2 * H * 14] == [low["self_attn.f_b_proj"], low["self_attn.f_a_proj"]]
    assert "self_attn.g_proj" not in low


@pytest.mark.parametrize(("query_rank", "query"), [(None, {"q_proj"}), (22, {"q_b_proj", "q_a_proj"})])
def test_a_latent_query_has_two_matrices(query_rank: int | None, query: set[str]) -> None:
    """With q_lora_rank a query goes through a narrow space (deepseek_v2.py::DeepseekV2MLAAttention)."""
    names = attention(model_type="deepseek_v2", q_lora_rank=query_rank, **LATENT)

    assert {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} | query == {one.removeprefix("self_attn.") for one in names}


@pytest.mark.parametrize(
    ("name", "index", "names"),
    [
        ("qwen3_next", 0, {f"linear_attn.{one}" for one in ("in_proj_qkv", "in_proj_z", "in_proj_ba", "out_proj")}),
        ("bamba", 0, {"mamba.in_proj", "mamba.out_proj"}),
        ("jamba", 0, {"mamba.in_proj", "mamba.out_proj", "mamba.x_proj"}),
        ("lfm2", 0, {"conv.in_proj", "conv.out_proj"}),
        ("zamba2", 1, {"mamba.in_proj", "mamba.out_proj", "linear"}),
        ("gemma3n_text", 0, {"laurel.linear_left", "per_layer_input_gate"}),
    ],
)  # fmt: skip
def test_matrices_of_states_have_the_names_that_quantization_configs_use(
    name: str, index: int, names: set[str]
) -> None:
    """A config leaves layers in 16 bits by name."""
    found = of_layer(parameters(**recorded_config(name)).layers[index])

    assert names == {one for one in found if not one.startswith(("self_attn", "mlp"))}


def test_olmos_values_are_twice_as_long_as_its_keys() -> None:
    """Without sizes of its own, a key of OLMo Hybrid has 3 * 60 // (4 * 6) = 7 numbers (OlmoHybridConfig)."""
    config = {"model_type": "olmo_hybrid", "head_dim": None, "layer_types": ["linear_attention", "full_attention"]}
    layer = of_layer(parameters(**{**BASE, **config}).layers[0])

    assert (H * 6 * 14, H * 6 * (7 + 7 + 14)) == (layer["linear_attn.in_proj_z"], layer["linear_attn.in_proj_qkv"])


@pytest.mark.parametrize("field", ["mamba_dt_rank", "time_step_rank"])
def test_a_rank_left_to_the_model_is_a_sixteenth_of_the_width(field: str) -> None:
    """Mamba's step goes through ceil(272 / 16) = 17 numbers where the config says "auto" (MambaConfig)."""
    config = {
        "vocab_size": 211, "hidden_size": 272, "num_hidden_layers": 1, "state_size": 11, "conv_kernel": 5, "expand": 2,
        "model_type": "mamba", field: "auto",
    }  # fmt: skip

    assert 544 * (17 + 2 * 11) + 17 * 544 == of_layer(parameters(**config).layers[0])["mamba.x_proj"]


def test_what_gemma_3n_and_zamba2_leave_to_their_class() -> None:
    """LAuReL has rank 64, there are four streams, adapters have rank 128, and one block of attention is shared."""
    gemma = {**recorded_config("gemma3n_text"), "laurel_rank": None, "altup_num_inputs": None}
    zamba = {**recorded_config("zamba2"), "adapter_rank": None, "num_mem_blocks": None}
    streams = parameters(**gemma)
    blocks = parameters(**zamba)

    assert 2 * H * 64 == of_layer(streams.layers[0])["laurel.linear_left"]
    assert 2 * H + 4 * H + 16 + 64 == streams.layers[0].plain
    assert 3 * 2 * H * H == streams.other - parameters(**{**gemma, "model_type": "gemma4_text"}).other
    assert 128 * (H + 2 * 86) == of_layer(blocks.layers[1])["mlp.gate_up_proj_adapter_list"]
    assert [1, 3] == [index for index in range(5) if "linear" in of_layer(blocks.layers[index])][:2]
    assert [1] == [index for index in range(5) if "self_attn.q_proj" in of_layer(blocks.layers[index])]


def test_layers_that_share_a_cache_have_queries_as_wide_as_those_of_their_type() -> None:
    """Gemma 4's every sixth layer and its last are full, with heads of 512, and have no K and V where they share."""
    config = {**BASE, "model_type": "gemma4_text", "num_hidden_layers": 8, "num_kv_shared_layers": 5}
    layers = [attention(index, **config) for index in range(8)]

    assert [14, 14, 512, 14, 512] == [layer["self_attn.q_proj"] // (6 * H) for layer in layers[3:]]
    assert [layer["self_attn.q_proj"] for layer in layers[3:]] == [layer["self_attn.o_proj"] for layer in layers[3:]]
    assert [True] * 3 + [False] * 5 == ["self_attn.k_proj" in layer for layer in layers]


def test_an_encoder_has_all_projections_and_no_output_layer() -> None:
    """A Llama that looks both ways keeps its grouped KV heads; without a head size, heads divide the width."""
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaBidirectionalModel"]}

    assert [QUERY, H * 3 * 14, H * 3 * 14, QUERY] == list(attention(**config).values())
    assert [H * H, H * 3 * 10, H * 3 * 10, H * H] == list(attention(**config, head_dim=None).values())
    assert 0 == parameters(**BASE, **config).head


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma", "tie_word_embeddings": False}, False),
        ({"model_type": "gemma"}, True),
        ({"model_type": "gemma4_unified_text"}, True),
        # LFM2 and Molmo have names of their own.
        ({"model_type": "lfm2", "tie_embedding": False}, False),
        ({"model_type": "molmo", "weight_tying": True}, True),
        ({"model_type": "molmo", "weight_tying": False}, False),
    ],
)
def test_a_tied_output_layer_is_the_embedding(config: dict[str, Any], tied: bool) -> None:
    """The config says whether it is, under one of three names, or the class does."""
    assert (0 if tied else 211 * H) == parameters(**BASE, **config).head


def test_a_language_model_within_another_config_may_be_tied_by_either() -> None:
    """The language model's own word counts before the whole's."""
    text = {**BASE, "model_type": "llama"}

    assert 0 == parameters(text_config=text, tie_word_embeddings=True).head
    assert 211 * H == parameters(text_config={**text, "tie_word_embeddings": False}, tie_word_embeddings=True).head


def test_a_vocabulary_may_be_padded() -> None:
    """ChatGLM gives the padded one alone."""
    assert 224 * H == parameters(**{**BASE, "model_type": "chatglm", "vocab_size": None, "padded_vocab_size": 224}).head
