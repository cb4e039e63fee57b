"""The rules, one file per verdict family. A new rule is one file and one name here.

Their order is that of the output: what is lost for good first (leaks), then what was wrong from the start (baseline),
then demand beyond capacity, then spikes, fragmentation and the rest. No rule depends on the result of another.
"""

from kvdiag.diagnosis.rule import Rule
from kvdiag.diagnosis.rules import (
    baseline_duplicate_model,
    baseline_foreign_memory,
    baseline_misconfigured,
    benign_warmup,
    capacity_concurrency,
    capacity_long_context,
    fragmentation_allocator,
    fragmentation_kv_waste,
    imbalance_rank,
    isolation_prefix_cache,
    leak_device,
    leak_host,
    leak_kv_blocks,
    spike_activation,
    spike_graph_capture,
)

RULES: tuple[Rule, ...] = (
    leak_kv_blocks.judge,
    leak_device.judge,
    leak_host.judge,
    baseline_foreign_memory.judge,
    baseline_duplicate_model.judge,
    baseline_misconfigured.judge,
    capacity_long_context.judge,
    capacity_concurrency.judge,
    spike_activation.judge,
    spike_graph_capture.judge,
    fragmentation_allocator.judge,
    fragmentation_kv_waste.judge,
    imbalance_rank.judge,
    isolation_prefix_cache.judge,
    benign_warmup.judge,
)
