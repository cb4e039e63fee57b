"""What is known of each verdict: symptom, likely cause, how to confirm it, what to change. One entry for every id.

Remedies live here; a rule or the post-mortem brings its own only where it is computed from the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verdict explained to the person who has to act on it."""

    symptom: str
    likely_cause: str
    confirm: str
    remedy: str
    runbook: str


def _entry(verdict: str, *, symptom: str, likely_cause: str, confirm: str, remedy: str) -> Entry:
    return Entry(
        symptom=symptom,
        likely_cause=likely_cause,
        confirm=confirm,
        remedy=remedy,
        runbook=f"alerts/runbooks/{verdict}.md",
    )


KNOWLEDGE: Mapping[str, Entry] = {
    "leak.kv_blocks": _entry(
        "leak.kv_blocks",
        symptom="KV blocks stay in use although no request runs or waits; the pool shrinks with every request.",
        likely_cause="Blocks that are not released when their request ends: aborts during a KV transfer, a "
        "connector that "
        "delays frees, a scheduler bug, or a plugin that keeps references.",
        confirm="Stop all traffic and wait for the connector's lease or abort timeout (30 s to minutes). Usage must "
        "reach 0, since cached prefix blocks count as free; POST /reset_prefix_cache fails while blocks are in use.",
        remedy="Restart the engine to free the pool. Then upgrade vLLM or remove the newest connector or plugin, and "
        "repeat `kvdiag run`.",
    ),
    "leak.device_torch": _entry(
        "leak.device_torch",
        symptom="Torch's allocated bytes rise at equal load and are not released.",
        likely_cause="Tensors kept alive by references: caches without a size limit, collected logits or hidden "
        "states, "
        "a LoRA or multimodal cache.",
        confirm="Repeat the largest request: no growth means a high-water mark, not a leak. `gc.collect()` in the "
        "worker lowers allocated bytes if only garbage collection is late. `kvdiag run --soak` detects 128 KiB "
        "per cycle.",
        remedy="Limit or disable the growing cache. Until then restart the worker regularly, and leave more headroom "
        "(lower --gpu-memory-utilization, or --kv-cache-memory-bytes where that sizes the pool).",
    ),
    "leak.device_non_torch": _entry(
        "leak.device_non_torch",
        symptom="Device memory of the server's process rises with requests while its KV pool stays the same size.",
        likely_cause="Allocations outside torch's allocator: NCCL or custom all-reduce buffers, CUDA graphs captured "
        "late, a library that calls cudaMalloc itself. Without torch's statistics a tensor leak looks the same.",
        confirm="Compare torch.cuda.memory_reserved() in the worker before and after 100 equal requests: flat means "
        "outside torch, rising means torch holds it (leak.device_torch). `kvdiag run --soak` separates growth per "
        "request "
        "from growth while idle.",
        remedy="Upgrade or disable the library or feature that was added last. Restart the engine before memory runs "
        "out: headroom / growth per request is the number of requests left.",
    ),
    "leak.host": _entry(
        "leak.host",
        symptom="Host memory of one of the server's processes rises for hours until the kernel kills it.",
        likely_cause="Buffers outside Python (a transport, NCCL, malloc's arenas), a cache without a size limit, or "
        "objects kept per request; a limited cache that is still filling looks the same.",
        confirm="`kvdiag run --soak` takes minutes: it compares load cycles with idle ones, and new prompts with "
        "repeated ones, which do not grow a cache. Otherwise watch anonymous memory (not page cache) of each process "
        "over hours at equal load. `malloc_trim(0)` releases memory kept by malloc arenas; a cache stops at its limit.",
        remedy="Limit or disable the growing cache or transport. Restart before the memory limit is reached; a higher "
        "container limit gains time.",
    ),
    "baseline.foreign_memory": _entry(
        "baseline.foreign_memory",
        symptom="Other processes use memory on the server's device.",
        likely_cause="Another workload on the same GPU, or a worker that outlived its server.",
        confirm="nvidia-smi on the host shows the process ids; `ps` shows whether their parent is still alive.",
        remedy="Move or stop the other process and kill orphans, or lower the server's --gpu-memory-utilization so "
        "that "
        "both fit. Each byte they use is lost to the KV pool; divide by the block size for the blocks lost.",
    ),
    "baseline.duplicate_model": _entry(
        "baseline.duplicate_model",
        symptom="The idle server holds its weights more than once.",
        likely_cause="The model is loaded twice: two engines in one process, a draft model as large as the model, "
        "a reload that keeps the old copy, or a second server process.",
        confirm="The startup log prints 'Model loading took ...' once per copy; compare with the checkpoint's size.",
        remedy="Load the model once, restart after an in-place reload, and check tensor parallelism (each rank "
        "holds its "
        "share).",
    ),
    "baseline.misconfigured": _entry(
        "baseline.misconfigured",
        symptom="Memory fraction, pool size or context length do not fit the device.",
        likely_cause="--gpu-memory-utilization too high or too low for this device, a pool sized by hand "
        "(--kv-cache-memory-bytes, --num-gpu-blocks-override), or --max-model-len beyond the pool.",
        confirm="The startup log prints weights, activation peak, graphs and KV cache: compare with nvidia-smi.",
        remedy="Set --gpu-memory-utilization so that 0.3 to 1 GB stay free while idle, set --max-model-len to what the "
        "pool holds, and remove overrides.",
    ),
    "capacity.long_context": _entry(
        "capacity.long_context",
        symptom="One long request runs out of memory while short ones work.",
        likely_cause="The activations of a long prefill, or its KV cache, need more than the device has left.",
        confirm="Send the same prompt length with one output token on an idle server; halve it until it works.",
        remedy="Enable chunked prefill or lower --max-num-batched-tokens, lower --max-model-len, or leave room "
        "for activations (lower --gpu-memory-utilization, or --kv-cache-memory-bytes where that sizes the pool).",
    ),
    "capacity.concurrency": _entry(
        "capacity.concurrency",
        symptom="Requests wait for KV blocks, or are preempted and recomputed.",
        likely_cause="More tokens in flight than the pool holds: too many sequences, long outputs, or a pool made "
        "small by weights, graphs or other processes.",
        confirm="num_requests_waiting above 0 with the pool nearly full, num_preemptions_total rising under load.",
        remedy="Lower --max-num-seqs to what the pool holds, shorten contexts, use fp8 KV cache (twice the tokens), or "
        "add a replica; raise --gpu-memory-utilization only if the device has free memory.",
    ),
    "fragmentation.allocator": _entry(
        "fragmentation.allocator",
        symptom="An allocation fails although free and reserved-but-unused memory together are enough for it.",
        likely_cause="Freed blocks of unequal sizes between live ones, each smaller than the request.",
        confirm="torch.cuda.memory_summary() in the worker: inactive_split bytes large, largest free block small.",
        remedy="Restart the worker now, with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and limit the variety "
        "of shapes (fixed batch sizes, chunked prefill).",
    ),
    "fragmentation.kv_waste": _entry(
        "fragmentation.kv_waste",
        symptom="Requests use far more KV blocks than their tokens need, and release them at the end.",
        likely_cause="Contiguous reservation up to the maximum length, blocks much larger than requests, or padded "
        "pages "
        "of a hybrid model.",
        confirm="Compare blocks in use with ceil(tokens / block size) for one request of known length.",
        remedy="Use a smaller --block-size, enable paged attention, or limit max_tokens where the engine reserves "
        "by it.",
    ),
    "spike.activation": _entry(
        "spike.activation",
        symptom="One step requests more device memory than is free; memory is flat before and after it.",
        likely_cause="The profile run at start was smaller than the failed step (batch, prompt, image or "
        "log-probabilities), so the KV pool took the memory that the step needs.",
        confirm="The failed size scales with the step's tokens x hidden size, or x vocabulary (logits), not with time "
        "since start; idle memory before it equals idle memory after start.",
        remedy="Leave more room (lower --gpu-memory-utilization by what was short / the device's total), or make the "
        "step smaller: --max-num-batched-tokens, --max-num-seqs, --max-logprobs, --limit-mm-per-prompt.",
    ),
    "spike.graph_capture": _entry(
        "spike.graph_capture",
        symptom="The server crashes while capturing CUDA graphs, before its first request.",
        likely_cause="The graphs need more than the estimate that sized the KV pool, or than the headroom if there "
        "is no "
        "estimate (vLLM before 0.21).",
        confirm="The log ends between 'Capturing CUDA graphs' and 'Graph capturing finished'; the server starts with "
        "--enforce-eager.",
        remedy="Lower --gpu-memory-utilization by what was short / the device's total, or capture fewer sizes "
        "(--max-cudagraph-capture-size).",
    ),
    "imbalance.rank": _entry(
        "imbalance.rank",
        symptom="One rank of a tensor- or pipeline-parallel engine uses more GPU memory than the others.",
        likely_cause="A second process of the server on one GPU, stages of unequal layers, an encoder or drafter on "
        "one rank.",
        confirm="nvidia-smi lists the server's processes by GPU: one uses more, or two are on the same GPU.",
        remedy="Give each rank its own device, and balance the stages (VLLM_PP_LAYER_PARTITION). Every rank gets as "
        "many blocks as fit on the fullest one, so balancing enlarges the pool on every rank.",
    ),
    "isolation.prefix_cache": _entry(
        "isolation.prefix_cache",
        symptom="A request is answered from another tenant's prefix cache; response times reveal which prompts "
        "others have "
        "sent.",
        likely_cause="No cache_salt is sent, a gateway or router drops it, or the engine does not support it (vLLM "
        "before "
        "0.10 for completions).",
        confirm="Send one prompt twice with different cache_salt, straight to the engine and through the gateway: "
        "vllm:prefix_cache_hits_total must not rise with the second. A gateway that sets one salt per API key is "
        "tested only with --other-api-key.",
        remedy="Have the gateway set a secret cache_salt per tenant on every request. Until then use "
        "--no-enable-prefix-caching, or one replica per tenant.",
    ),
    "benign.warmup": _entry(
        "benign.warmup",
        symptom="Device memory grew with the first requests and stopped.",
        likely_cause="Lazily loaded kernels, workspaces and the allocator's high-water mark.",
        confirm="The same requests again do not grow it.",
        remedy="None needed. Send a few requests of the largest shape after start before measuring anything.",
    ),
}
