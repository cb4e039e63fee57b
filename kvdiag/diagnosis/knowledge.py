"""What is known of each verdict: symptom, likely cause, how to confirm it, what to change. One entry for every id."""

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
        symptom="KV blocks stay held although no request runs or waits; the pool shrinks with every request.",
        likely_cause="Requests whose blocks are not given back: aborts during a KV transfer, a connector that delays "
        "frees, a scheduler bug, or a plugin that keeps references.",
        confirm="Stop all traffic and wait for the connector's lease or abort timeout (30 s to minutes). Free "
        "prefix-cache blocks do not count as held: usage must reach 0; POST /reset_prefix_cache fails while some are.",
        remedy="Restart the engine to get the pool back; then upgrade vLLM or remove the connector or plugin that "
        "is new, and run `kvdiag run` again.",
    ),
    "leak.device_torch": _entry(
        "leak.device_torch",
        symptom="Torch's allocated bytes rise at equal load and do not come back.",
        likely_cause="Tensors kept alive by references: caches without a bound, logits or hidden states collected, "
        "a LoRA or multimodal cache.",
        confirm="Repeat the largest request: growth of 0 means high-water mark, not leak. `gc.collect()` inside the "
        "worker lowers allocated bytes where only the collector is late. `kvdiag run --soak` sees 128 KiB a cycle.",
        remedy="Bound or disable the cache that grows; restart the worker until then; leave more headroom to "
        "win time (lower --gpu-memory-utilization, or --kv-cache-memory-bytes where that sizes the pool).",
    ),
    "leak.device_non_torch": _entry(
        "leak.device_non_torch",
        symptom="Device memory of the server's process rises with requests while its KV pool stays the same size.",
        likely_cause="Allocations beside torch's allocator: NCCL or custom all-reduce buffers, CUDA graphs captured "
        "late, a library that calls cudaMalloc itself. Without torch's statistics a tensor leak looks the same.",
        confirm="Compare torch.cuda.memory_reserved() in the worker before and after 100 equal requests: flat means "
        "outside torch, rising means torch holds it (leak.device_torch). `kvdiag run --soak` tells what requests add "
        "from what grows while nothing runs.",
        remedy="Upgrade or disable the library or feature that was added last; restart the engine before the memory is "
        "gone: headroom divided by growth per request tells how many requests are left.",
    ),
    "leak.host": _entry(
        "leak.host",
        symptom="Host memory of one of the server's processes rises for hours, until the kernel ends it.",
        likely_cause="Buffers outside Python (a transport, NCCL, malloc's arenas), a cache without a bound, or objects "
        "kept per request; a bounded cache that still fills looks the same.",
        confirm="`kvdiag run --soak` in minutes: load cycles against idle ones, new contents against repeated ones, "
        "which no cache keeps twice. Else anonymous memory (not page cache) of each process over hours, at equal load. "
        "`malloc_trim(0)` gives back what arenas keep, and a cache stops at its bound.",
        remedy="Bound or disable the cache or transport that grows; restart before the limit is met; raise the "
        "container's memory limit to win time.",
    ),
    "baseline.foreign_memory": _entry(
        "baseline.foreign_memory",
        symptom="The device holds bytes that are not the server's.",
        likely_cause="Another workload on the same GPU, or a worker that outlived its server.",
        confirm="nvidia-smi on the host shows the process ids; `ps` tells whether their parent is still alive.",
        remedy="Move or stop the other process, kill orphans; or give the server a smaller --gpu-memory-utilization so "
        "that both fit. Every byte is pool lost: divide by the bytes of one block.",
    ),
    "baseline.duplicate_model": _entry(
        "baseline.duplicate_model",
        symptom="The idle server holds its weights more than once.",
        likely_cause="The model is loaded twice: two engines in one process, a draft model as large as the model, "
        "a reload that keeps the old copy, or a second server process.",
        confirm="The startup log prints 'Model loading took ...' once per copy; compare with the checkpoint's size.",
        remedy="Load it once; restart after a reload in place; check tensor parallelism (each rank holds its share).",
    ),
    "baseline.misconfigured": _entry(
        "baseline.misconfigured",
        symptom="Memory fraction, pool size or context length do not fit the device.",
        likely_cause="--gpu-memory-utilization too high or too low for this device, a pool sized by hand "
        "(--kv-cache-memory-bytes, --num-gpu-blocks-override), or --max-model-len beyond the pool.",
        confirm="The startup log prints weights, activation peak, graphs and KV cache: compare with nvidia-smi.",
        remedy="Set --gpu-memory-utilization so that 0.3 to 1 GB stay free at idle; set --max-model-len to what the "
        "pool holds; remove the override.",
    ),
    "capacity.long_context": _entry(
        "capacity.long_context",
        symptom="One long request runs out of memory while short ones work.",
        likely_cause="The activations of a long prefill, or its KV cache, need more than the device has left.",
        confirm="Send the same prompt length with one output token on an idle server; halve it until it works.",
        remedy="Enable chunked prefill or lower --max-num-batched-tokens; lower --max-model-len; leave room "
        "for activations (lower --gpu-memory-utilization, or --kv-cache-memory-bytes where that sizes the pool).",
    ),
    "capacity.concurrency": _entry(
        "capacity.concurrency",
        symptom="Requests wait for room in the KV pool, or are preempted and computed again.",
        likely_cause="More tokens in flight than the pool holds: too many sequences, long outputs, or a pool made "
        "small by weights, graphs or other processes.",
        confirm="num_requests_waiting above 0 with the pool nearly full, num_preemptions_total rising under load.",
        remedy="Lower --max-num-seqs to what the pool holds, shorten contexts, use fp8 KV cache (twice the tokens), or "
        "add a replica; raise --gpu-memory-utilization only if the device has free memory.",
    ),
    "fragmentation.allocator": _entry(
        "fragmentation.allocator",
        symptom="An allocation fails although free and reserved-but-unused memory together are enough for it.",
        likely_cause="Freed blocks of unequal sizes between live ones: the holes are smaller than what is asked for.",
        confirm="torch.cuda.memory_summary() in the worker: inactive_split bytes large, largest free block small.",
        remedy="Restart the worker now; start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; cap the "
        "variety of shapes (fixed batch sizes, chunked prefill).",
    ),
    "fragmentation.kv_waste": _entry(
        "fragmentation.kv_waste",
        symptom="Requests hold far more KV blocks than their tokens need, and give them back at the end.",
        likely_cause="Contiguous reservation to the maximum length, blocks much larger than requests, or padded pages "
        "of a hybrid model.",
        confirm="Compare blocks held with ceil(tokens / block size) for one request of known length.",
        remedy="Use a smaller --block-size; enable paged attention; cap max_tokens where the engine reserves by it.",
    ),
    "spike.activation": _entry(
        "spike.activation",
        symptom="One step asks for more device memory than the headroom has; before it and after it memory is flat.",
        likely_cause="A larger batch, prompt, image or number of log-probabilities than the profile run of the start "
        "had, so that the KV pool was given what the step needs.",
        confirm="The failed size grows with tokens of the step x hidden size, or x vocabulary (logits), and not with "
        "the time since the start; the idle floor before it is the floor after the start.",
        remedy="Leave more room (lower --gpu-memory-utilization by what was short / the device's total), or make the "
        "step smaller: --max-num-batched-tokens, --max-num-seqs, --max-logprobs, --limit-mm-per-prompt.",
    ),
    "spike.graph_capture": _entry(
        "spike.graph_capture",
        symptom="The server dies while it captures CUDA graphs, before its first request.",
        likely_cause="The graphs need more than the estimate that the KV pool was sized by, or than the headroom where "
        "none is made (vLLM before 0.21).",
        confirm="The log ends between 'Capturing CUDA graphs' and 'Graph capturing finished'; it starts with "
        "--enforce-eager.",
        remedy="Lower --gpu-memory-utilization by what was short / the device's total, or capture fewer sizes "
        "(--max-cudagraph-capture-size).",
    ),
    "imbalance.rank": _entry(
        "imbalance.rank",
        symptom="One rank of a tensor- or pipeline-parallel engine holds more of its GPU than the others of theirs.",
        likely_cause="A second process of the server on one GPU, stages of unequal layers, an encoder or drafter on "
        "one rank.",
        confirm="nvidia-smi lists the server's processes by GPU: one holds more, or two are on the same GPU.",
        remedy="Give each rank its own device; even out the stages (VLLM_PP_LAYER_PARTITION). All ranks get the blocks "
        "that the fullest has room for: what is evened out comes back as pool on every rank.",
    ),
    "isolation.prefix_cache": _entry(
        "isolation.prefix_cache",
        symptom="A request is answered from the prefix cache of another tenant's; who times answers learns what others "
        "have asked.",
        likely_cause="No cache_salt is sent, a gateway or router drops it, or the engine does not know it (vLLM before "
        "0.10 for completions).",
        confirm="Send one prompt twice with different cache_salt, straight to the engine and through the gateway: "
        "vllm:prefix_cache_hits_total may not move by the second. A gateway that sets salts itself, one for each key, "
        "shows only with --other-api-key.",
        remedy="Have the gateway set cache_salt, a secret of each tenant's, in every request, and pass it on; until "
        "then --no-enable-prefix-caching, or a replica for each tenant.",
    ),
    "benign.warmup": _entry(
        "benign.warmup",
        symptom="Device memory grew with the first requests and stopped.",
        likely_cause="Lazily loaded kernels, workspaces and the allocator's high-water mark.",
        confirm="The same requests again do not grow it.",
        remedy="None needed. Send a few requests of the largest shape after start before measuring anything.",
    ),
}
