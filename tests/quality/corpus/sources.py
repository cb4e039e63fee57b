"""Where each incident is told in public."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "host-ucx-nixl": (
            "https://github.com/vllm-project/vllm/issues/24264",
            "https://github.com/vllm-project/vllm/pull/32181",
            "https://github.com/ai-dynamo/nixl/pull/1210",
            "https://vuink.com/post/zvfgeny-d-dnv/news/debugging-memory-leak-in-vllm",
        ),
        "host-nccl-ws1": ("https://github.com/NVIDIA/nccl/issues/1944",),
        "host-tgi-974": ("https://github.com/huggingface/text-generation-inference/issues/974",),
        "host-n-gt-1": (
            "https://github.com/vllm-project/vllm/issues/14353",
            "https://github.com/vllm-project/vllm/issues/15597",
            "https://github.com/modelscope/ms-swift/pull/3515",
        ),
        "host-sglang-embed": ("https://github.com/sgl-project/sglang/issues/6914",),
        "host-llm-scaler-pp": ("https://github.com/intel/llm-scaler/issues/590",),
        "host-cudagraph-nccl": (
            "https://github.com/vllm-project/vllm/issues/2323",
            "https://github.com/vllm-project/vllm/pull/2811",
        ),
        "host-ik-cacheram": ("https://github.com/ikawrakow/ik_llama.cpp/issues/2320",),
        "host-max-tokens-1": ("https://github.com/vllm-project/vllm/issues/13464",),
        "host-new-block-ids": (
            "https://github.com/vllm-project/vllm/pull/44490",
            "https://github.com/vllm-project/vllm/issues/44175",
            "https://github.com/vllm-project/vllm/pull/47381",
        ),
        "host-outlines-fsm": (
            "https://github.com/vllm-project/vllm/issues/7332",
            "https://github.com/vllm-project/vllm/issues/10981",
        ),
        "fa-triton-shapes": ("https://github.com/triton-lang/triton/issues/9244",),
        "fa-rerank-ab": ("https://github.com/ggml-org/llama.cpp/issues/26293",),
        "fa-spark-43": ("https://github.com/eugr/spark-vllm-docker/issues/43",),
        "frag-tok-36295": ("https://github.com/sgl-project/sglang/pull/36295",),
        "fa-ollama-cacheram": (
            "https://github.com/ollama/ollama/issues/18264",
            "https://github.com/ollama/ollama/pull/18265",
        ),
        "frag-pt-35901": ("https://github.com/pytorch/pytorch/issues/35901",),
        "fa-triton-malloc": (
            "https://github.com/triton-inference-server/server/pull/5161",
            "https://github.com/triton-inference-server/server/issues/6781",
            "https://github.com/triton-inference-server/server/issues/8457",
        ),
        "frag-load-57440": ("https://github.com/vllm-project/vllm/issues/57440",),
        "frag-skyrl-1768": ("https://github.com/NovaSky-AI/SkyRL/pull/1768",),
        "frag-tgi-655": ("https://github.com/huggingface/text-generation-inference/issues/655",),
        "fa-glibc-arena": ("https://github.com/vllm-project/vllm-omni/issues/6462",),
        "frag-vllm-37428": ("https://github.com/vllm-project/vllm/pull/37428",),
        "fa-pt-95668": (
            "https://github.com/pytorch/pytorch/issues/95668",
            "https://github.com/pytorch/pytorch/pull/100919",
        ),
        "fa-trtllm-732": ("https://github.com/NVIDIA/TensorRT-LLM/issues/732",),
        "fa-llamacpp-cacheram": (
            "https://github.com/ggml-org/llama.cpp/issues/25740",
            "https://github.com/ggml-org/llama.cpp/pull/16391",
        ),
        "fa-235": ("https://github.com/vllm-project/vllm/issues/235",),
        "fa-vllm-10637": ("https://github.com/vllm-project/vllm/issues/10637",),
        "fa-pt-60150": ("https://github.com/pytorch/pytorch/issues/60150",),
        "fa-4723": ("https://github.com/vllm-project/vllm/issues/4723",),
        "dev-trtllm-318": ("https://github.com/NVIDIA/TensorRT-LLM/issues/318",),
        "dev-sglang-pixel": (
            "https://github.com/sgl-project/sglang/pull/7340",
            "https://github.com/sgl-project/sglang/issues/8902",
            "https://github.com/sgl-project/sglang/issues/9365",
            "https://github.com/sgl-project/sglang/pull/17324",
        ),
        "dev-whisper-encoder": (
            "https://github.com/vllm-project/vllm/pull/32789",
            "https://github.com/vllm-project/vllm/issues/31577",
            "https://github.com/vllm-project/vllm/issues/16966",
        ),
        "dev-encoder-noevict": ("https://github.com/hiyouga/EasyR1/pull/11002",),
        "dev-llama-dspark": ("https://github.com/ggml-org/llama.cpp/issues/27155",),
        "dev-nccl-cumem": (
            "https://github.com/vllm-project/vllm/pull/5091",
            "https://github.com/vllm-project/vllm/issues/4472",
        ),
        "dev-sglang-ctx": (
            "https://github.com/sgl-project/sglang/issues/16106",
            "https://github.com/sgl-project/sglang/pull/22662",
        ),
        "shard-dp0-3184": ("https://github.com/vllm-project/vllm-ascend/pull/3184",),
        "dev-ctx-ranks": (
            "https://github.com/pytorch/pytorch/issues/135279",
            "https://github.com/pytorch/pytorch/issues/49481",
        ),
        "kv-xllm-828": (
            "https://github.com/xLLM-AI/xllm/issues/828",
            "https://github.com/xLLM-AI/xllm/pull/829",
        ),
        "kv-sglang-mamba": ("https://github.com/sgl-project/sglang/pull/16067",),
        "kv-sglang-11970": ("https://github.com/sgl-project/sglang/issues/11970",),
        "kv-abort-final-step": (
            "https://github.com/vllm-project/vllm/pull/29987",
            "https://github.com/vllm-project/vllm/pull/35506",
            "https://github.com/llm-d/llm-d/pull/1138",
        ),
        "kv-nixlpush-abort": (
            "https://github.com/vllm-project/vllm/issues/46283",
            "https://github.com/vllm-project/vllm/pull/46289",
        ),
        "kv-lmcache-987": (
            "https://github.com/LMCache/LMCache/issues/987",
            "https://github.com/LMCache/LMCache/pull/993",
        ),
        "kv-imp-1115": ("https://github.com/kekzl/imp/issues/1115",),
        "kv-vllm-27073": ("https://github.com/vllm-project/vllm/issues/27073",),
        "frag-sglang-109": ("https://github.com/sgl-project/sglang/issues/109",),
        "act-logprobs-5907": (
            "https://github.com/vllm-project/vllm/issues/5907",
            "https://github.com/vllm-project/vllm/pull/52054",
        ),
        "act-gonka": ("https://github.com/gonka-ai/gonka/pull/1171",),
        "act-6027": ("https://github.com/sgl-project/sglang/issues/6027",),
        "waste-page-54458": ("https://github.com/vllm-project/vllm/issues/54458",),
        "waste-dsv4-42948": ("https://github.com/vllm-project/vllm/issues/42948",),
        "base-ds-2578": ("https://github.com/deepspeedai/DeepSpeed/issues/2578",),
        "base-orphan-55510": (
            "https://github.com/vllm-project/vllm/issues/55510",
            "https://github.com/vllm-project/vllm/pull/55846",
            "https://github.com/vllm-project/vllm/issues/34643",
        ),
        "base-nopid": ("https://github.com/NVIDIA/k8s-device-plugin/issues/12",),
        "base-assert-56830": ("https://github.com/vllm-project/vllm/issues/56830",),
        "base-v1-profile": (
            "https://github.com/vllm-project/vllm/pull/18974",
            "https://github.com/vllm-project/vllm/pull/19312",
        ),
        "base-coldcompile": (
            "https://github.com/vllm-project/vllm/issues/54122",
            "https://github.com/vllm-project/vllm/pull/54479",
        ),
        "base-warmup-36973": ("https://github.com/vllm-project/vllm/issues/36973",),
        "base-srt-172": ("https://github.com/NVIDIA/srt-slurm/issues/172",),
        "cap-5578": ("https://github.com/vllm-project/vllm/issues/5578",),
        "cap-23444": ("https://github.com/vllm-project/vllm/issues/23444",),
        "cap-2163": (
            "https://github.com/vllm-project/vllm/pull/2163",
            "https://github.com/vllm-project/vllm/issues/1206",
            "https://github.com/vllm-project/vllm/issues/1607",
        ),
        "cap-6211": ("https://github.com/vllm-project/vllm/issues/6211",),
        "cg-57475": (
            "https://github.com/vllm-project/vllm/issues/57475",
            "https://github.com/vllm-project/vllm/pull/57595",
        ),
        "cg-49224": ("https://github.com/vllm-project/vllm/issues/49224",),
    }
)
