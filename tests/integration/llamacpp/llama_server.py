"""llama.cpp's own C++ HTTP server from the wheel `xllamacpp`, with llama-server's arguments and environment.

Runs in the environment of `llama_env`, as a program of its own: the command line is what llama-server's would be. It
serves until its standard input closes, so that it never outlives the tests. With TEST_LEAK_BYTES in its environment it
leaks: so many bytes of its process with each prompt token; needs --metrics.
"""

import argparse
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

import xllamacpp

FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
KINDS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("-m", "--model", required=True)
    add("--port", type=int, required=True)
    env = os.environ.get
    add("-c", "--ctx-size", type=int, default=int(env("LLAMA_ARG_CTX_SIZE", "0")))
    add("-np", "--parallel", type=int, default=int(env("LLAMA_ARG_N_PARALLEL", "-1")))
    add("-kvu", "--kv-unified", action="store_true", default=env("LLAMA_ARG_KV_UNIFIED") == "on")
    add("-no-kvu", "--no-kv-unified", action="store_true", default=env("LLAMA_ARG_KV_UNIFIED") == "off")
    add("-ctk", "--cache-type-k", choices=KINDS, default=env("LLAMA_ARG_CACHE_TYPE_K", "f16"))
    add("-ctv", "--cache-type-v", choices=KINDS, default=env("LLAMA_ARG_CACHE_TYPE_V", "f16"))
    add("-b", "--batch-size", type=int, default=2048)
    add("-ub", "--ubatch-size", type=int, default=512)
    add("-fa", "--flash-attn", choices=tuple(FLASH), default="auto")
    add("-cram", "--cache-ram", type=int, default=int(env("LLAMA_ARG_CACHE_RAM", "8192")))
    add("-ctxcp", "--ctx-checkpoints", type=int, default=32)
    add("-cms", "--checkpoint-min-step", type=int, default=8192)
    add("--swa-full", action="store_true")
    add("-md", "--model-draft", default="")
    add("--api-key", default="")
    add("--embeddings", action="store_true")
    add("-lv", "--verbosity", type=int, default=3)
    add("--metrics", action="store_true")
    add("--no-slots", action="store_true")
    add("--slot-save-path", default="")
    add("--sleep-idle-seconds", type=int, default=-1)
    add("--alias", default="")
    add("--offline", action="store_true")
    add("--no-webui", action="store_true")
    return parser.parse_args()


def _params(asked: argparse.Namespace) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = asked.model
    params.hostnames, params.port = ["127.0.0.1"], asked.port
    params.n_ctx, params.n_batch, params.n_ubatch = asked.ctx_size, asked.batch_size, asked.ubatch_size
    flash = f"LLAMA_FLASH_ATTN_TYPE_{FLASH[asked.flash_attn]}"
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, flash)
    # What llama-server does where the number of slots is not given (common/arg.cpp, since 2025-12).
    params.n_parallel = asked.parallel if asked.parallel > 0 else 4
    params.kv_unified = asked.kv_unified or (asked.parallel <= 0 and not asked.no_kv_unified)
    for name, kind in (("cache_type_k", asked.cache_type_k), ("cache_type_v", asked.cache_type_v)):
        setattr(params, name, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}"))
    params.endpoint_metrics, params.endpoint_slots = asked.metrics, not asked.no_slots
    params.cache_ram_mib, params.verbosity = asked.cache_ram, asked.verbosity
    params.slot_save_path, params.sleep_idle_seconds = asked.slot_save_path, asked.sleep_idle_seconds
    params.n_ctx_checkpoints, params.checkpoint_min_step = asked.ctx_checkpoints, asked.checkpoint_min_step
    params.swa_full, params.embedding = asked.swa_full, asked.embeddings
    if asked.embeddings:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    if asked.model_draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = asked.model_draft
    if asked.api_key:
        params.api_keys = [asked.api_key]
    if asked.alias:
        params.model_alias = {asked.alias}
    params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 4
    return params


def _leak(url: str, token_bytes: int) -> None:
    """Keep so many bytes for each prompt token that the server has processed."""
    kept, seen = [], 0
    while True:
        time.sleep(0.2)
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                page = answer.read().decode()
        except OSError:
            continue
        tokens = int(page.partition("\nllamacpp:prompt_tokens_total ")[2].split()[0])
        if tokens > seen:
            kept.append(b"x" * token_bytes * (tokens - seen))
            seen = tokens


if __name__ == "__main__":
    Path("/proc/self/comm").write_text("llama-server", encoding="ascii")
    server = xllamacpp.Server(_params(_parsed()))
    if leaked := os.environ.get("TEST_LEAK_BYTES"):
        url = f"http://127.0.0.1:{_parsed().port}"
        threading.Thread(target=_leak, args=(url, int(leaked)), daemon=True).start()
    sys.stdin.read()
