"""Which family a model type or a class belongs to: one config with every field, read by each as its own.

Model types are those of published configs: of transformers' classes, or of code that comes with the checkpoint. Whose a
class is comes from transformers and vLLM (data/class_layers.json), or from a published config (data/published.json).
"""

import json
from collections import Counter
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.registry import FAMILIES, TYPE_OF_ARCHITECTURE
from kvdiag.kv.layout.layers import AttentionLayer
from tests.unit.kv.families.reading import letters
from tests.unit.kv.vectors import DATA

RECORD: dict[str, Any] = json.loads((DATA / "class_layers.json").read_text())["model_classes"]
PUBLISHED: dict[str, Any] = json.loads((DATA / "published.json").read_text())

EVERYTHING: dict[str, Any] = json.loads((DATA / "everything.json").read_text())
# What other families would read, too.
OF_TYPE: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
        "sliding_window_size": 16,
        "swa_num_attention_heads": 3,
        "index_topk": 8,
        "index_head_dim": 18,
    },
    "inkling_model": {"local_layer_ids": [0, 2, 4, 6, 8]},
    "inkling_text": {"local_layer_ids": [0, 2, 4, 6, 8]},
    "voxtral_realtime_text": {
        "audio_config": {
            "encoder_layers": 9,
            "encoder_attention_heads": 6,
            "d_model": 24,
            "sliding_window": 16,
            "block_pool_size": 4,
        }
    },
    "pangu_pro_moe_v2": {
        "kv_lora_rank": None,
        "param_sink_number": 32,
        "qk_nope_dim": 10,
        "qk_rope_dim": 8,
        "v_channels": 12,
    },
}
# One window in a config without layer_types holds for all layers.
ALIKE = """
    apertus arcee aria_text baichuan bailing_moe biogpt bitnet bloom chatglm codegen cohere cosmos3_edge_text deepseek
    doge ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe_text exaone flex_olmo gemma glm glm4 glm4_moe glm4v
    glm4v_moe_text glm4v_text glm_ocr_text gpt2 gpt_neo gpt_neox gptj granite granitemoe granitemoeshared grok-1 helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm internlm2 internlm3 k2_horizon llama minicpm minimax_m2
    ministral ministral3 mistral mixtral mllama_text_model molmo moondream3 nanochat nemotron olmo olmo2 olmoe opt orion
    paddleocr_vl paddleocr_vl_text param2moe persimmon phi phi3 phi3_v phi4mm phimoe qwen3_vl_moe_text qwen3_vl_text
    sarvam_moe seed_oss smollm3 solar stablelm starcoder2 telechat telechat2 telechat3
    teleflm PanguEmbedded jais2 nanbeige iquestcoder hunyuan_vl_text molmo2_text emu3_text_model
"""
# These have a window only with use_sliding_window, or never.
FULL = """
    qwen2 qwen3 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text dots_ocr Keye KeyeVL1_5 kimi_audio
    mimo minicpmo minicpmv qwen2_moe qwen3_moe qwen3_omni_moe_text falcon RefinedWeb RefinedWebModel gpt_bigcode dbrx
    minicpm3 step1 step3_text laguna hrm_text qwen3_asr_text qwen2_audio interns1_pro interns1_pro_text
    cohere_compass_text mellum minimax_m3_text minimax_m3_vl_text pangu_pro_moe_v2
"""
OF_PATTERN = {
    "WWWWWWWWW": ALIKE,
    "FFFFFFFFF": FULL,
    "WFWFWFWFW": "gemma2 vaultgemma gpt_oss step3p5 step3p7",
    "WWWWWFWWW": "gemma3_text",
    "WWWWFWWWs": "gemma3n_text",
    "WWWWWFWWs": "gemma4_text gemma4_unified_text diffusion_gemma_text",
    "WWWFWWWFW": "cohere2 cohere2_moe olmo3 afmoe exaone4 exaone_moe",
    "FWWWFWWWF": "granite_swa granitemoe_swa cwm muse_glimmer muse_glimmer_text",
    "CCCFCCCFC": "llama4_text",
    "WFFWFFWFF": "mimo_v2 mimo_v2_flash",
    "F--F--F--": "nemotron-nas",
    "WWWWFWWWW": "plamo3",
    "FFFFFFFFFWWWWWWWWW": "iquestloopcoder iquest_loopcoder",
    "LLLLLLLLL": """axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite kimi_k2 pangu_ultra_moe sarvam_mla hy_v4""",
    "IIIIIIIII": "glm_moe_dsa",
    "wwwwwwwww": "deepseek_v4",
    "wmwwwmwww": "deepseek_v41",
    "wwIwwIwwI": "dots3_note",
    "LLLLLLLLLLLLLLLLLL": "longcat_flash longcat_flash_ngram",
    "WWWWWWWWWWWWWWWWWW": "voxtral_realtime_text",
    "cWcFcWcFcWcFcWcFcW": "inkling_model inkling_text",
    "gggFgggFg": "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text olmo_hybrid"
    " interns2_mobius interns2_mobius_text",
    "1F11F11F1": "jamba",
    "111111111": "mamba falcon_mamba",
    "222222222": "mamba2 granitemoehybrid",
    "22F22F222": "bamba",
    "F2F2F2F2F2F2F2F2F2": "falcon_h1",
    "2222222F22": "zamba2",
    "2W-2W-2W-": "nemotron_h nemotron_h_puzzle",
    "ccccFcccc": "lfm2 lfm2_moe",
    "kkkLkkkLk": "kimi_linear",
    "kkkIkkkIk": "glm5_next_text",
    "lllLlllLl": "bailing_hybrid bailing_moe_v3",
    "FllFllFll": "minicpm_sala",
    "FxFxFxFxFxFxFxFxFx": "whisper cohere_asr",
    "eeeeeeeee": "bert roberta xlm-roberta modernbert nomic_bert new gte openai_privacy_filter"
    " siglip_text_model siglip2_text_model",
}
EXPECTED = {name: pattern for pattern, names in OF_PATTERN.items() for name in names.split()}


def everything(model_type: str) -> dict[str, Any]:
    """A config of that type with every field."""
    return {**EVERYTHING, **OF_TYPE.get(model_type, {}), "model_type": model_type}


def test_every_model_type_is_read_as_its_family() -> None:
    """No type more, no type less, each with its family's layers."""
    assert EXPECTED == {name: letters(everything(name)) for name in FAMILIES}


# A class that no source below knows, and the one that it is made of.
MADE_OF = {
    # Checkpoints of LongCat-Flash from before transformers had a class for it.
    "LongcatCausalLM": "LongcatFlashForCausalLM",
    # voyage.py: Qwen3Model with a head for embeddings.
    "VoyageQwen3BidirectionalEmbedModel": "Qwen3ForCausalLM",
}
BY_TYPE = {name: told["transformers"] for name, told in RECORD.items() if told["transformers"]}
BY_CONFIG = {
    name: entry
    for entry in PUBLISHED.values()
    for name in entry["config"].get("architectures", ())
    if name in TYPE_OF_ARCHITECTURE
}
BY_FILE = {name: told["vllm"] for name, told in RECORD.items() if name not in {*BY_TYPE, *BY_CONFIG, *MADE_OF}}


def read_as(class_name: str) -> set[str]:
    """The model types that a config of this class is taken for: without one, and with one that says nothing."""
    config = {**EVERYTHING, "architectures": ["Unheard", class_name]}
    return {parse_architecture({**config, **wrapper}).model_type for wrapper in ({}, {"model_type": "unheard"})}


@pytest.mark.parametrize("name", BY_TYPE)
def test_a_class_stands_in_for_its_model_type(name: str) -> None:
    """Without a model type, or with a wrapper's, the class to be loaded determines it, as in transformers."""
    assert set(BY_TYPE[name]) == read_as(name)


@pytest.mark.parametrize("name", BY_CONFIG)
def test_a_class_reads_a_published_config_as_its_model_type_does(name: str) -> None:
    """Layers and heads are those that vLLM builds, though the config had no model type."""
    entry = BY_CONFIG[name]
    config = {key: value for key, value in entry["config"].items() if key != "model_type"}

    layers = parse_architecture(config).layers

    heads = {(layer.kv_heads, layer.head_size) for layer in layers if isinstance(layer, AttentionLayer)}
    assert entry["kinds"] == Counter(str(layer.kind) for layer in layers)
    assert ({tuple(entry["heads"])} if entry["heads"] else set()) == heads


@pytest.mark.parametrize("name", BY_FILE)
def test_a_class_that_is_another_of_its_file_is_of_its_family(name: str) -> None:
    """Older spellings and second versions come from the model file that is named as the type."""
    assert {BY_FILE[name].replace("_", "-")} == {model_type.replace("_", "-") for model_type in read_as(name)}


@pytest.mark.parametrize("name", MADE_OF)
def test_a_class_that_is_made_of_another_is_read_as_that(name: str) -> None:
    """Their configs have that one's fields."""
    assert read_as(MADE_OF[name]) == read_as(name)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaBidirectionalModel"]}, "e"),
        ({"architectures": ["LlamaBidirectionalForSequenceClassification"]}, "e"),
        ({"architectures": ["VoyageQwen3BidirectionalEmbedModel"]}, "e"),
        *(({"model_type": name, "is_causal": False}, "e") for name in ("llama", "qwen2", "qwen3")),
        *(({"model_type": name, "is_causal": True}, "F") for name in ("llama", "qwen2", "qwen3")),
        ({"model_type": "mixtral", "is_causal": False}, "F"),
        ({"architectures": ["LlamaForCausalLM"]}, "F"),
    ],
)
def test_a_decoder_that_looks_both_ways_keeps_nothing(config: dict[str, Any], expected: str) -> None:
    """VLLM serves it as an encoder: by its class, or by is_causal where the family has that."""
    whole = {**EVERYTHING, "sliding_window": None, **config}
    assert [expected * 9] * 2 == [letters(whole), letters({"text_config": whole})]
