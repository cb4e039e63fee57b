"""The upper rows of a board: is it healthy, what is wrong and since when, where the memory is."""

from dashboards.grafana import Json, Panel, Row, Target
from dashboards.panels import by_name, fixed, graph, stat, table, timeline
from dashboards.queries import (
    SCRAPED_SILENT_SECONDS,
    UNKNOWN,
    WRONG,
    each,
    finding_codes,
    gpu,
    own,
    verdict_codes,
)
from dashboards.states import AGE, ANY_IS_BAD, ANY_UNKNOWN, FULL, MAPPINGS, PLAIN, STEPS, TIME_LEFT
from kvdiag.outputs.current_verdict import STALE_SECONDS

_WORDS: list[Json] = [
    {
        "type": "value",
        "options": {
            "fault": {"color": "red", "index": 0, "text": "Fault"},
            "suspect": {"color": "orange", "index": 1, "text": "Suspect"},
        },
    }
]


_COMPONENTS = {
    "weights": "blue",
    "kv_held": "orange",
    "kv_free": "light-orange",
    "kv_pool": "light-orange",
    "torch_other": "purple",
    "torch_with_kv_pool": "dark-orange",
    "torch_unused": "light-purple",
    "torch_pending": "super-light-purple",
    "torch_private": "semi-dark-purple",
    "torch_releasable": "light-purple",
    "torch_stranded": "dark-red",
    "outside_torch": "green",
    "server_other": "dark-green",
    "process": "yellow",
    "other_process": "red",
    "driver_reserved": "semi-dark-blue",
    "unaccounted": "#808080",
}

_CAPACITY = by_name(
    "capacity",
    color=fixed("red"),
    custom_fillOpacity=0,
    custom_lineStyle={"dash": [10, 10], "fill": "dash"},
    custom_lineWidth=2,
    custom_stacking={"group": "A", "mode": "none"},
)


def health() -> Row:
    """One number each: verdict, pressure, time to exhaustion, free tokens, and what kvdiag cannot read."""
    return Row(
        title="Is it healthy?",
        panels=(
            stat(
                "Verdict",
                "The worst verdict of the chosen replicas. *Unknown*: kvdiag has no sample of the last "
                f"{SCRAPED_SILENT_SECONDS // 60} minutes, no diagnosis of the last {STALE_SECONDS // 60}, or cannot "
                "read the engine or the driver.\n\n"
                "Metrics: `kvdiag_diagnosis_status`, `kvdiag_source_up`, `kvdiag_server_state`, "
                "`kvdiag_sample_timestamp_seconds`, `kvdiag_diagnosis_timestamp_seconds`",
                f"max({verdict_codes()})",
                unit="none",
                steps=STEPS,
                mappings=MAPPINGS,
                width=4,
                no_value="Unknown: no kvdiag",
                background=True,
            ),
            stat(
                "Memory pressure",
                "For the fullest device: the higher of the KV pool's usage (1 while requests wait) and "
                "the device's usage without the pool's free bytes.\n\nMetric: `kvdiag_memory_pressure_ratio`",
                f"max({gpu('memory_pressure_ratio')})",
                unit="percentunit",
                steps=FULL,
                width=4,
                no_value="Unknown",
            ),
            stat(
                "Time to exhaustion",
                "Shortest time until memory is exhausted at the observed growth.\n\n"
                "Metric: `kvdiag_time_to_exhaustion_seconds`",
                f"min({own('time_to_exhaustion_seconds')})",
                unit="s",
                steps=TIME_LEFT,
                width=4,
                no_value="None known",
                no_value_color="text",
            ),
            stat(
                "Free KV tokens",
                "Tokens that still fit into the KV pools.\n\nMetric: `kvdiag_kv_headroom_tokens`",
                f"sum({own('kv_headroom_tokens')})",
                unit="short",
                steps=PLAIN,
                width=3,
                no_value="Unknown",
            ),
            stat(
                "Unknown verdicts",
                "Verdicts whose data is missing, over all chosen replicas: neither healthy nor faulty. The list "
                "below names them.\n\nMetric: `kvdiag_finding`",
                f"sum({own('finding', UNKNOWN)})",
                unit="none",
                steps=ANY_UNKNOWN,
                width=3,
                no_value="Unknown",
            ),
            stat(
                "Sources down",
                "Sources that kvdiag cannot read: the driver, the engine, the agent, the host.\n\n"
                "Metric: `kvdiag_source_up`",
                f"sum(1 - {own('source_up')})",
                unit="none",
                steps=ANY_IS_BAD,
                width=3,
                no_value="Unknown",
            ),
            stat(
                "Diagnosis age",
                "Age of the newest diagnosis, of the replica where it is oldest; a few seconds is normal.\n\n"
                "Metric: `kvdiag_diagnosis_timestamp_seconds`",
                f"max(time() - {own('diagnosis_timestamp_seconds')})",
                unit="s",
                steps=AGE,
                width=3,
                no_value="None",
            ),
        ),
    )


def wrong() -> Row:
    """Suspects and faults now, and every verdict over time."""
    bad = f"{own('finding', WRONG)} == 1"
    first = each("min", "id, status", f"min_over_time(timestamp({bad})[$__range:1m])")
    left = f"{own('time_to_exhaustion_seconds')} * on (instance, id) group_left (status) ({bad})"
    holder = f"{own('finding_holder_info')} * on (instance, id) group_left (status) ({bad})"
    coloured: list[Json] = [
        by_name("Status", mappings=_WORDS, custom_cellOptions={"type": "color-text"}),
        by_name("First found in this range", unit="dateTimeFromNow"),
        by_name("Exhausted in", unit="s", noValue="-"),
    ]
    return Row(
        title="What is wrong, and since when?",
        panels=(
            table(
                "Problems now",
                "Verdicts that are suspect or fault now, when each was first found in the time range, and the time "
                "until memory is exhausted. An empty list does not prove health: see *Verdict* and *Unknown verdicts*. "
                "The runbook of a verdict is `alerts/runbooks/<verdict>.md`.\n\n"
                "Metrics: `kvdiag_finding`, `kvdiag_finding_holder_info`, `kvdiag_time_to_exhaustion_seconds`",
                keys={"replica": "Replica", "id": "Verdict", "status": "Status", "holder": "Holder"},
                columns={
                    "Now": each("max", "id, status", bad),
                    "First found in this range": (f"1000 * {first} and {each('max', 'id, status', bad)}"),
                    "Exhausted in": each("min", "id, status", left),
                    "Holder": each("max", "id, status, holder", holder),
                },
                width=10,
                height=10,
                sort_by="Status",
                descending=False,
                hidden=("Now", "Holder"),
                overrides=coloured,
            ),
            timeline(
                "Verdicts over time",
                "Every verdict's status, the worst of the chosen replicas. A gap: kvdiag did not answer.\n\n"
                "Metric: `kvdiag_finding`",
                Target(expr=finding_codes("id"), legend="{{id}}"),
                mappings=MAPPINGS,
                steps=STEPS,
                width=14,
                height=10,
            ),
        ),
    )


def ledger_graph(width: int) -> Panel:
    """The ledger of the chosen GPUs over time.

    Without an agent the ledger has the pool as a whole: it is divided by the usage of the engines, where that is known.
    """
    pool, rest = (gpu("memory_component_bytes", f'component{sign}"kv_pool"') for sign in ("=", "!="))
    usage = f"avg by (instance) ({own('kv_usage_ratio')})"
    held, free = (
        f'label_replace({pool} * on (instance) group_left () ({share}), "component", "{name}", "", "")'
        for share, name in ((usage, "kv_held"), (f"1 - {usage}", "kv_free"))
    )
    return graph(
        "Memory by component",
        "Used bytes of the devices by component, stacked, with the capacity. *unaccounted* is the unexplained "
        "rest; *other_process* does not belong to the server.\n\n"
        "Metrics: `kvdiag_memory_component_bytes`, `kvdiag_kv_usage_ratio`, `kvdiag_gpu_memory_total_bytes`",
        Target(
            expr=f"sum by (component) ({rest} or {held} or {free} or {pool} unless on (instance) {usage})",
            legend="{{component}}",
        ),
        Target(expr=f"sum({gpu('gpu_memory_total_bytes')})", legend="capacity"),
        unit="bytes",
        width=width,
        height=11,
        stacked=True,
        least=None,
        legend_right=True,
        overrides=(
            *(by_name(name, color=fixed(color)) for name, color in _COMPONENTS.items()),
            by_name("kv_free", custom_fillOpacity=15),
            _CAPACITY,
        ),
    )


def memory() -> Row:
    """The ledger against capacity, and each GPU now."""

    def of(components: str) -> str:
        return each("sum", "gpu", gpu("memory_component_bytes", f'component=~"{components}"'))

    used, total = each("sum", "gpu", gpu("gpu_memory_used_bytes")), each("sum", "gpu", gpu("gpu_memory_total_bytes"))
    return Row(
        title="Where is the memory?",
        panels=(
            ledger_graph(12),
            table(
                "Each GPU now",
                "Used bytes of each device by component. *Pressure* leaves out the pool's free bytes.\n\n"
                "Metrics: `kvdiag_gpu_memory_used_bytes`, `kvdiag_gpu_memory_total_bytes`, "
                "`kvdiag_memory_pressure_ratio`, `kvdiag_memory_component_bytes`",
                keys={"replica": "Replica", "gpu": "GPU"},
                columns={
                    "Pressure": each("max", "gpu", gpu("memory_pressure_ratio")),
                    "Used": f"{used} / {total}",
                    "Capacity": total,
                    "Weights": of("weights"),
                    "KV pool": of("kv_.+"),
                    "torch": of("torch_.+"),
                    "Other processes": of("other_process|process"),
                    "Unaccounted": of("unaccounted"),
                },
                width=12,
                height=11,
                sort_by="Pressure",
                overrides=(
                    by_name(
                        "Pressure",
                        unit="percentunit",
                        thresholds=FULL,
                        color={"mode": "thresholds"},
                        custom_cellOptions={"type": "color-text"},
                    ),
                    by_name("Used", unit="percentunit"),
                    *(
                        by_name(name, unit="bytes")
                        for name in ("Capacity", "Weights", "KV pool", "torch", "Other processes", "Unaccounted")
                    ),
                ),
            ),
        ),
    )
