"""Model types whose KV cost is known, each with the function that reads its config.

A model type is listed only if its model file in vLLM 0.32.0 was read, or if it runs on vLLM's transformers backend,
which takes windows from layer_types alone. Baichuan, Bamba, InternLM, Mllama, Persimmon and TeleChat have no file there
any more: they are as in the last version that had one (0.10.2 to 0.25, registry.py::_PREVIOUSLY_SUPPORTED_MODELS).
Names are HF `model_type` values.
"""

import json
import pkgutil
from collections.abc import Mapping

from kvdiag.kv.families.attention import (
    dbrx,
    dense,
    encoder_only,
    falcon,
    minicpm3,
    nemotron_nas,
    qwen2,
    qwen_moe,
    step1,
    whisper,
)
from kvdiag.kv.families.base import Family
from kvdiag.kv.families.latent import latent, longcat_flash
from kvdiag.kv.families.looped import hrm_text, loop_coder
from kvdiag.kv.families.mamba import bamba, falcon_h1, granite_hybrid, jamba, mamba1, mamba2, nemotron_h, zamba2
from kvdiag.kv.families.state import bailing_linear, kimi_linear, lfm2, olmo_hybrid, qwen_delta
from kvdiag.kv.families.windowed import (
    exaone4,
    gemma3,
    gemma3n,
    gemma4,
    interleaved,
    llama4,
    mimo_v2,
    mistral,
    muse_glimmer,
    plamo3,
    step3p5,
)

_TYPES: Mapping[Family, str] = {
    dense: """
        apertus arcee aria_text baichuan bailing_moe biogpt bitnet bloom chatglm codegen cohere cosmos3_edge_text
        deepseek doge ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe_text exaone flex_olmo gemma glm glm4
        glm4_moe glm4v glm4v_moe_text glm4v_text glm_ocr_text gpt2 gpt_neo gpt_neox gptj granite granitemoe
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm internlm2 internlm3
        k2_horizon llama minicpm minimax_m2 mixtral mllama_text_model molmo moondream3 nanochat nemotron olmo olmo2
        olmoe opt orion paddleocr_vl paddleocr_vl_text param2moe persimmon phi phi3 phi3_v phi4mm phimoe sarvam_moe
        seed_oss smollm3 solar stablelm starcoder2 step3_text telechat telechat2 teleflm PanguEmbedded qwen3_vl_text
        qwen3_vl_moe_text ministral3
    """,
    # Those whose config class extends Qwen2Config or Qwen3Config, with the language model's fields at the top.
    qwen2: """
        qwen2 qwen3 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text dots_ocr Keye KeyeVL1_5
        kimi_audio mimo minicpmo minicpmv
    """,
    qwen_moe: "qwen2_moe qwen3_moe qwen3_omni_moe_text",
    mistral: "mistral ministral",
    falcon: "falcon RefinedWeb RefinedWebModel gpt_bigcode",
    dbrx: "dbrx",
    minicpm3: "minicpm3",
    interleaved(period=2): "gemma2 vaultgemma gpt_oss",
    gemma3: "gemma3_text",
    gemma3n: "gemma3n_text",
    gemma4: "gemma4_text gemma4_unified_text",
    interleaved(period=4, extra_window=1): "cohere2 cohere2_moe",
    interleaved(period=4): "olmo3",
    interleaved(period=4, period_fields=("global_attn_every_n_layers",)): "afmoe",
    interleaved(period=4, first=True): "granite_swa granitemoe_swa cwm",
    interleaved(period=1, period_fields=()): "laguna",
    exaone4: "exaone4 exaone_moe",
    llama4: "llama4_text",
    nemotron_nas: "nemotron-nas",
    mimo_v2: "mimo_v2 mimo_v2_flash",
    muse_glimmer: "muse_glimmer muse_glimmer_text",
    plamo3: "plamo3",
    step1: "step1",
    hrm_text: "hrm_text",
    loop_coder: "iquestloopcoder iquest_loopcoder",
    step3p5: "step3p5 step3p7",
    latent: """
        axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 pangu_ultra_moe sarvam_mla
    """,
    longcat_flash: "longcat_flash longcat_flash_ngram",
    qwen_delta: "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    olmo_hybrid: "olmo_hybrid",
    jamba: "jamba",
    mamba1: "mamba falcon_mamba",
    mamba2: "mamba2",
    granite_hybrid: "granitemoehybrid",
    bamba: "bamba",
    falcon_h1: "falcon_h1",
    zamba2: "zamba2",
    nemotron_h: "nemotron_h nemotron_h_puzzle",
    lfm2: "lfm2 lfm2_moe",
    kimi_linear: "kimi_linear",
    bailing_linear: "bailing_hybrid bailing_moe_v3",
    whisper: "whisper",
    encoder_only: "bert roberta xlm-roberta modernbert nomic_bert new gte",
}
FAMILIES: Mapping[str, Family] = {name: family for family, names in _TYPES.items() for name in names.split()}

# For configs whose model_type is a wrapper's or is missing: the classes that vLLM would load, by type.
_CLASSES: Mapping[str, list[str]] = json.loads(pkgutil.get_data(__package__, "model_classes.json") or b"")
TYPE_OF_ARCHITECTURE: Mapping[str, str] = {name: kind for kind, names in _CLASSES.items() for name in names}

# Decoders that vLLM serves as encoders where the config has is_causal false (llama.py, qwen2.py, qwen3.py), and the
# classes for which it sets that itself (models/config.py).
ENCODING_DECODERS = frozenset({"llama", "qwen2", "qwen3"})
ENCODER_CLASSES = frozenset(
    {"LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification", "VoyageQwen3BidirectionalEmbedModel"}
)
