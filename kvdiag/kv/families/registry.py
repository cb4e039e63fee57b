"""Model types whose KV cost is known, each with the function that reads its config.

A model type is listed only if its model file in vLLM 0.32.0 was read, or if it runs on vLLM's transformers backend,
which takes windows from layer_types alone. Baichuan, Bamba, InternLM, Mllama, Persimmon and TeleChat have no file there
any more: they are as in the last version that had one (0.10.2 to 0.25, registry.py::_PREVIOUSLY_SUPPORTED_MODELS).
Names are HF `model_type` values.
"""

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
    laguna,
    llama4,
    mimo_v2,
    mistral,
    muse_glimmer,
    plamo3,
    step3p5,
)

_DENSE = (
    "apertus", "arcee", "aria_text", "baichuan", "bailing_moe", "biogpt", "bitnet", "bloom", "chatglm", "codegen",
    "cohere", "cosmos3_edge_text", "deepseek", "doge", "ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl",
    "ernie4_5_vl_moe_text", "exaone", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "glm4v", "glm4v_moe_text",
    "glm4v_text", "glm_ocr_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm", "internlm2", "internlm3",
    "k2_horizon", "llama", "minicpm", "minimax_m2", "mixtral", "mllama_text_model", "molmo", "moondream3", "nanochat",
    "nemotron", "olmo", "olmo2", "olmoe", "opt", "orion", "paddleocr_vl", "paddleocr_vl_text", "param2moe",
    "persimmon", "phi", "phi3", "phi3_v", "phi4mm", "phimoe", "sarvam_moe", "seed_oss", "smollm3", "solar",
    "stablelm", "starcoder2", "step3_text", "telechat", "telechat2", "teleflm", "PanguEmbedded",
)  # fmt: skip
# Those whose config class extends Qwen2Config or Qwen3Config, with the language model's fields at the top.
_QWEN = (
    "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "dots_ocr",
    "Keye", "KeyeVL1_5", "kimi_audio", "mimo", "minicpmo", "minicpmv",
)  # fmt: skip
_QWEN_ALWAYS_FULL = ("qwen3_vl_text", "qwen3_vl_moe_text")
_LATENT = (
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "pangu_ultra_moe",
    "sarvam_mla",
)  # fmt: skip
_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_DENSE, dense),
    **dict.fromkeys(_QWEN, qwen2),
    **dict.fromkeys(_QWEN_ALWAYS_FULL, dense),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text"), qwen_moe),
    **dict.fromkeys(("mistral", "ministral"), mistral),
    "ministral3": dense,
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "gpt_bigcode": falcon,
    "dbrx": dbrx,
    "minicpm3": minicpm3,
    "gemma2": interleaved(period=2),
    "vaultgemma": interleaved(period=2),
    "gpt_oss": interleaved(period=2),
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
    "cohere2": interleaved(period=4, extra_window=1),
    "cohere2_moe": interleaved(period=4, extra_window=1),
    "olmo3": interleaved(period=4),
    "afmoe": interleaved(period=4, period_fields=("global_attn_every_n_layers",)),
    "granite_swa": interleaved(period=4, first=True),
    "granitemoe_swa": interleaved(period=4, first=True),
    "cwm": interleaved(period=4, first=True),
    "laguna": laguna,
    "exaone4": exaone4,
    "exaone_moe": exaone4,
    "llama4_text": llama4,
    "nemotron-nas": nemotron_nas,
    "mimo_v2": mimo_v2,
    "mimo_v2_flash": mimo_v2,
    "muse_glimmer": muse_glimmer,
    "muse_glimmer_text": muse_glimmer,
    "plamo3": plamo3,
    "step1": step1,
    "hrm_text": hrm_text,
    "iquestloopcoder": loop_coder,
    "iquest_loopcoder": loop_coder,
    "step3p5": step3p5,
    "step3p7": step3p5,
    **dict.fromkeys(_LATENT, latent),
    "longcat_flash": longcat_flash,
    "longcat_flash_ngram": longcat_flash,
    **dict.fromkeys(_DELTA, qwen_delta),
    "olmo_hybrid": olmo_hybrid,
    "jamba": jamba,
    "mamba": mamba1,
    "falcon_mamba": mamba1,
    "mamba2": mamba2,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "zamba2": zamba2,
    "nemotron_h": nemotron_h,
    "nemotron_h_puzzle": nemotron_h,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_linear,
    "bailing_moe_v3": bailing_linear,
    "whisper": whisper,
    "bert": encoder_only,
    "roberta": encoder_only,
    "xlm-roberta": encoder_only,
    "modernbert": encoder_only,
    "nomic_bert": encoder_only,
    "new": encoder_only,
    "gte": encoder_only,
}

# For configs whose model_type is a wrapper's or is missing: the class that vLLM would load.
TYPE_OF_ARCHITECTURE: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Phi3ForCausalLM": "phi3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "DeciLMForCausalLM": "nemotron-nas",
    "NemotronHForCausalLM": "nemotron_h",
    "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeV2ForCausalLM": "bailing_moe",
    "MiMoForCausalLM": "mimo",
    "Step3p5ForCausalLM": "step3p5",
    "LongcatCausalLM": "longcat_flash",
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash_ngram",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "HrmTextForCausalLM": "hrm_text",
    "IQuestLoopCoderForCausalLM": "iquest_loopcoder",
    "K2HorizonForCausalLM": "k2_horizon",
    "MolmoForCausalLM": "molmo",
    "Param2MoEForCausalLM": "param2moe",
    "Plamo3ForCausalLM": "plamo3",
    "SarvamMLAForCausalLM": "sarvam_mla",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "Step1ForCausalLM": "step1",
    "TeleChat2ForCausalLM": "telechat2",
    "LlamaBidirectionalModel": "llama",
    "LlamaBidirectionalForSequenceClassification": "llama",
    "VoyageQwen3BidirectionalEmbedModel": "qwen3",
}

# Decoders that vLLM serves as encoders where the config has is_causal false (llama.py, qwen2.py, qwen3.py), and the
# classes for which it sets that itself (models/config.py).
ENCODING_DECODERS = frozenset({"llama", "qwen2", "qwen3"})
ENCODER_CLASSES = frozenset(
    {
        "LlamaBidirectionalModel",
        "LlamaBidirectionalForSequenceClassification",
        "VoyageQwen3BidirectionalEmbedModel",
    }
)
