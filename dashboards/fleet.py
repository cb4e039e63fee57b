"""The board `kvdiag-fleet`: every replica in one list, the worst first, each with a link to its own board."""

from typing import Any

from dashboards.grafana import Board, Json, Panel, Row, Target
from dashboards.panels import by_name, graph, stat, table, timeline
from dashboards.queries import (
    ANNOTATIONS,
    CODES,
    CONCURRENCY,
    UNKNOWN,
    VARIABLES,
    WRONG,
    each,
    named,
    own,
    ratio,
    served,
    silent,
    verdict_codes,
)
from dashboards.states import ANY, ANY_IS_BAD, ANY_UNKNOWN, FULL, MAPPINGS, PLAIN, ROUND_AGE, STEPS, TEXTS, TIME_LEFT

_BY_REPLICA = f"max by (replica) ({verdict_codes()})"


def _count(title: str, description: str, status: str, steps: Json) -> Panel:
    return stat(
        title,
        f"{description}\n\nMetrics: `kvdiag_diagnosis_status`, `kvdiag_source_up`, `kvdiag_server_state`, "
        "`kvdiag_sample_timestamp_seconds`, `kvdiag_diagnosis_timestamp_seconds`",
        f"sum({_BY_REPLICA} == bool {CODES[status]})",
        unit="none",
        steps=steps,
        width=4,
        no_value="Unknown",
    )


def _counts() -> Row:
    return Row(
        title="How many replicas are healthy?",
        panels=(
            _count("Fault", "Replicas with at least one fault.", "fault", ANY_IS_BAD),
            _count("Suspect", "Replicas whose worst verdict is suspect.", "suspect", ANY),
            _count(
                "Unknown",
                "Replicas without a current diagnosis, or whose engine or driver kvdiag cannot read.",
                "unknown",
                ANY_UNKNOWN,
            ),
            _count("Nothing found", "Replicas with a current diagnosis that found no fault or suspect.", "ok", PLAIN),
            stat(
                "Silent",
                "Replicas whose kvdiag answered within the time range and no longer does: scaled down or crashed. No "
                "other panel counts them.\n\nMetric: `kvdiag_build_info`",
                f"count({silent()}) or 0 * count({own('build_info')})",
                unit="none",
                steps=ANY,
                width=4,
                no_value="Unknown",
            ),
            stat(
                "Free KV tokens",
                "Tokens that still fit into the KV pools.\n\nMetric: `kvdiag_kv_headroom_tokens`",
                f"sum({own('kv_headroom_tokens')})",
                unit="short",
                steps=PLAIN,
                width=4,
                no_value="Unknown",
            ),
        ),
    )


def _replicas() -> Row:
    in_flight = f"{own('requests_running')} + {own('requests_waiting')}"
    beside = f'label_replace({own("build_info")}, "kvdiag", "$1", "instance", "(.+)")'
    engine = f'label_replace({served("running")}, "server", "$1", "instance", "(.+)")'
    link = (
        "/d/kvdiag?${datasource:queryparam}&var-instance=${__data.fields.Server}&var-kvdiag=${__data.fields.kvdiag}"
        "&${__url_time_range}"
    )
    words: dict[str, Any] = {"color": {"mode": "thresholds"}, "custom_cellOptions": {"type": "color-text"}}
    return Row(
        title="Which replicas are unhealthy?",
        panels=(
            table(
                "Replicas now",
                "One line per replica: a pod, or a host where there are no pods. Click it to open its own "
                "board. *Problems* are verdicts that are suspect or fault. *In flight* is running and waiting requests "
                "relative to the pool's capacity.\n\n"
                "Metrics: `kvdiag_diagnosis_status`, `kvdiag_finding`, `kvdiag_source_up`, `kvdiag_server_state`, "
                "`kvdiag_sample_timestamp_seconds`, `kvdiag_diagnosis_timestamp_seconds`, "
                "`kvdiag_memory_pressure_ratio`, `kvdiag_kv_usage_ratio`, "
                "`kvdiag_requests_running`, `kvdiag_requests_waiting`, `kvdiag_requests_concurrency_limit`, "
                "`kvdiag_requests_max_concurrency`, "
                "`kvdiag_time_to_exhaustion_seconds`; of the engine " + named("running"),
                keys={"replica": "Replica", "kvdiag": "kvdiag", "server": "Server"},
                columns={
                    "Verdict": _BY_REPLICA,
                    "Problems": each("sum", "", own("finding", WRONG)),
                    "Unknown": each("sum", "", own("finding", UNKNOWN)),
                    "Pressure": each("max", "", own("memory_pressure_ratio")),
                    "Pool in use": each("max", "", own("kv_usage_ratio")),
                    "Waiting": each("sum", "", own("requests_waiting")),
                    "In flight": ratio(each("sum", "", in_flight), each("sum", "", CONCURRENCY)),
                    "Exhausted in": each("min", "", own("time_to_exhaustion_seconds")),
                    "Targets": each("count", "kvdiag", beside),
                    "Engines": each("count", "server", engine),
                },
                width=24,
                height=12,
                sort_by="Verdict",
                hidden=("Targets", "Engines"),
                overrides=(
                    by_name("Replica", links=[{"title": "Open this replica", "url": link}]),
                    by_name("Verdict", mappings=MAPPINGS, thresholds=STEPS, **words),
                    by_name("Pressure", unit="percentunit", thresholds=FULL, **words),
                    by_name("Pool in use", unit="percentunit"),
                    by_name("In flight", unit="percentunit", thresholds=FULL, **words),
                    by_name("Exhausted in", unit="s", thresholds=TIME_LEFT, **words),
                ),
            ),
            timeline(
                "Verdict of each replica over time",
                "The worst verdict of each replica. A gap: its kvdiag did not answer.\n\n"
                "Metrics: `kvdiag_diagnosis_status`, `kvdiag_source_up`, `kvdiag_server_state`, "
                "`kvdiag_sample_timestamp_seconds`, `kvdiag_diagnosis_timestamp_seconds`",
                Target(expr=_BY_REPLICA, legend="{{replica}}"),
                mappings=MAPPINGS,
                steps=STEPS,
                width=24,
                height=10,
            ),
            graph(
                "Memory pressure",
                "The fullest device of each replica.\n\nMetric: `kvdiag_memory_pressure_ratio`",
                Target(expr=each("max", "", own("memory_pressure_ratio")), legend="{{replica}}"),
                unit="percentunit",
                most=1,
                steps=FULL,
            ),
            graph(
                "Waiting requests",
                "Waiting requests of each replica.\n\nMetric: `kvdiag_requests_waiting`",
                Target(expr=each("sum", "", own("requests_waiting")), legend="{{replica}}"),
                unit="short",
            ),
        ),
    )


def _number(title: str, description: str, name: str, expr: str, **settings: Any) -> Panel:
    return stat(
        title,
        f"{description}\n\nMetric: `kvdiag_{name}`",
        expr,
        **{"unit": "none", "width": 4, "no_value": "Unknown", **settings},
    )


def _status(status: str) -> str:
    return f'status="{status}"'


def _history() -> Row:
    """What the daemon of a fleet says, which needs no kvdiag next to the servers."""
    words: dict[str, Any] = {"color": {"mode": "thresholds"}, "custom_cellOptions": {"type": "color-text"}}
    keys = "namespace, pod, model_name, version, id"
    found = {status: own("replica_finding", _status(status)) for status in ("suspect", "fault")}
    codes = " or ".join(f"{CODES[status]} * {series}" for status, series in found.items())
    counts = {"fault": ANY_IS_BAD, "suspect": ANY, "unknown": ANY_UNKNOWN, "ok": PLAIN}
    return Row(
        title="What does the history in Prometheus show? (the fleet's daemon)",
        panels=(
            *(
                _number(
                    f"By history: {TEXTS[status][0].lower()}",
                    f"Replicas whose verdict by their history is {status}.",
                    "fleet_replicas",
                    f"sum({own('fleet_replicas', _status(status))})",
                    steps=steps,
                )
                for status, steps in counts.items()
            ),
            _number(
                "Unread",
                "Replicas that the last round could not read completely: they are not reported as ok.",
                "fleet_unread_replicas",
                f"sum({own('fleet_unread_replicas')})",
                steps=ANY_UNKNOWN,
            ),
            _number(
                "Newest round",
                "How long ago the last round ended that could list the replicas.",
                "fleet_round_timestamp_seconds",
                f"max(time() - {own('fleet_round_timestamp_seconds')})",
                unit="s",
                steps=ROUND_AGE,
            ),
            table(
                "Problems of replicas by history",
                "One line for each replica and verdict that is suspect or fault.\n\nMetrics: `kvdiag_replica_finding`, "
                "`kvdiag_replica_growth_bytes_per_second`, `kvdiag_replica_time_to_exhaustion_seconds`",
                keys={
                    "namespace": "Namespace",
                    "pod": "Replica",
                    "model_name": "Model",
                    "version": "Version",
                    "id": "Verdict on",
                },
                columns={
                    "Status": f"max by ({keys}) ({codes})",
                    "Growth per hour": f"3600 * max by ({keys}) ({own('replica_growth_bytes_per_second')})",
                    "Exhausted in": f"min by ({keys}) ({own('replica_time_to_exhaustion_seconds')})",
                },
                width=24,
                height=10,
                sort_by="Status",
                overrides=(
                    by_name("Status", mappings=MAPPINGS, thresholds=STEPS, **words),
                    by_name("Growth per hour", unit="bytes"),
                    by_name("Exhausted in", unit="s", thresholds=TIME_LEFT, **words),
                ),
            ),
            graph(
                "Growth by version",
                "Growth per hour of the version's median replica at equal load, by memory component.\n\n"
                "Metric: `kvdiag_fleet_growth_bytes_per_hour`",
                Target(
                    expr=f"max by (engine, model_name, version, component) ({own('fleet_growth_bytes_per_hour')})",
                    legend="{{engine}} {{model_name}} {{version}} {{component}}",
                ),
                unit="bytes",
                least=None,
            ),
            graph(
                "Replicas by version",
                "Replicas of each version, with those that ended within the window.\n\n"
                "Metric: `kvdiag_fleet_version_replicas`",
                Target(
                    expr=f"max by (engine, model_name, version) ({own('fleet_version_replicas')})",
                    legend="{{engine}} {{model_name}} {{version}}",
                ),
                unit="short",
            ),
        ),
    )


BOARD = Board(
    uid="kvdiag-fleet",
    title="LLM servers / GPU memory of the fleet (kvdiag)",
    description="Every replica that kvdiag monitors: which are healthy, which are not, which are unknown.",
    variables=VARIABLES,
    annotations=ANNOTATIONS,
    rows=(_counts(), _replicas(), _history()),
)
