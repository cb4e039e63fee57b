"""PromQL of the boards: whose series are asked for, and what makes one replica of two scrape targets.

The engine's page and kvdiag's are two targets. What they share is the pod, where Prometheus labels it, else the
instance without its port; that is a `replica` here. The engine's series follow the variables of vLLM's own boards,
kvdiag's follow the variable `kvdiag`, which holds the kvdiag targets that stand beside the chosen engines.
"""

from dashboards.grafana import Annotation, Variable
from kvdiag.outputs.current_verdict import SILENT_SECONDS, STALE_SECONDS

CODES = {"ok": 0, "unknown": 1, "suspect": 2, "fault": 3}
"""Of a status, so that the largest is what must be seen first."""

UNKNOWN = 'status="unknown"'
WRONG = 'status=~"suspect|fault"'

SCRAPED_SILENT_SECONDS = SILENT_SECONDS + 60
"""Age above which sampling has stopped, seen through Prometheus: a scrape may be a minute old."""


def replica(expr: str) -> str:
    """The same series with a label `replica`: the pod where there is one, else the instance without its port."""
    by_host = f'label_replace({expr}, "replica", "$1", "instance", "(.+?)(:[0-9]+)?")'
    return f'label_replace({by_host}, "replica", "$1", "pod", "(.+)")'


def own(name: str, *matchers: str) -> str:
    """A series of kvdiag's."""
    chosen = ", ".join(('instance=~"$kvdiag"', *matchers))
    return f"kvdiag_{name}{{{chosen}}}"


def gpu(name: str, *matchers: str) -> str:
    """A series of kvdiag's that has a GPU."""
    return own(name, 'gpu=~"$gpu"', *matchers)


_TARGETS = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'

SERIES = {
    "running": (
        "vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running",
        "lmdeploy:num_requests_running", "tgi_batch_current_size", "llamacpp:requests_processing",
    ),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "prompt_tokens": (
        "vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "trtllm_prompt_tokens_total",
        "lmdeploy:prompt_tokens_total", "tgi_request_input_length_sum", "llamacpp:prompt_tokens_total",
    ),
    "generation_tokens": (
        "vllm:generation_tokens_total", "sglang:generation_tokens_total", "trtllm_generation_tokens_total",
        "lmdeploy:generation_tokens_total", "tgi_request_generated_tokens_sum", "llamacpp:tokens_predicted_total",
    ),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total", "trtllm_prompt_tokens_total",
        "lmdeploy:prompt_tokens_total", "tgi_request_input_length_sum",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total", "trtllm_prompt_cached_tokens_total",
        "lmdeploy:cached_tokens_total", "tgi_request_skipped_tokens_sum",
    ),
    "inter_token_latency": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "prompt_length": (
        "vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram", "lmdeploy:request_prompt_tokens",
        "tgi_request_input_length",
    ),
    "waiting_by_reason": ("vllm:num_requests_waiting_by_reason",),
}  # fmt: skip
"""What each engine calls a figure: alerts/recording-rules.yaml says what they have in common. A server has one."""


def served(figure: str, suffix: str = "") -> str:
    """A figure of the engine's own page, whichever engine that is."""
    return " or ".join(_selected(f"{name}{suffix}") for name in SERIES[figure])


def served_rate(figure: str, suffix: str = "") -> str:
    """A counter of the engine's own page, per second."""
    return " or ".join(rate(_selected(f"{name}{suffix}")) for name in SERIES[figure])


def named(*figures: str) -> str:
    """The names of these, for a panel's description."""
    names = dict.fromkeys(name.removesuffix("_sum") for figure in figures for name in SERIES[figure])
    return f"Metric{'s' if len(names) > 1 else ''}: " + ", ".join(f"`{name}`" for name in names)


def _selected(name: str) -> str:
    return f"{name}{{{_TARGETS}}}"


def each(function: str, labels: str, expr: str) -> str:
    """One value for each replica, and for each of further labels."""
    kept = f"replica, {labels}" if labels else "replica"
    return f"{function} by ({kept}) ({replica(expr)})"


def rate(expr: str) -> str:
    """Per second."""
    return f"rate({expr}[$__rate_interval])"


def ratio(part: str, whole: str) -> str:
    """A share; none of nothing."""
    return f"{part} / ({whole} > 0)"


def finding_codes(labels: str) -> str:
    """The worst status of each verdict as its code, by these labels."""
    series_of = {code: own("finding", f'status="{status}"') for status, code in CODES.items()}
    worst = " or ".join(f"{code} * {series}" for code, series in series_of.items())
    return f"max by ({labels}) ({replica(worst)})"


def verdict_codes() -> str:
    """The verdict on each replica as its code.

    Unknown is also what it has not diagnosed yet, or does not sample or diagnose any more, and a server whose page it
    does not read now.
    """
    statuses = {code: own("diagnosis_status", f'status="{status}"') for status, code in CODES.items()}
    newest = " or ".join(f"{code} * {series}" for code, series in statuses.items())
    worst = f"max by (replica, instance) ({replica(newest)})"
    state, reading = own("server_state", 'state="lost"'), own("source_up", 'source=~"engine|vllm"')
    away = f"({state} == 1 or {reading} == 0)"
    limits = (("sample", SCRAPED_SILENT_SECONDS), ("diagnosis", STALE_SECONDS))
    fresh = " and ".join(f"time() - {own(f'{name}_timestamp_seconds')} <= {age}" for name, age in limits)
    # The daemon of a fleet has a build, and diagnoses no server next to it.
    alone = f"{own('build_info')} unless on (instance) {own('fleet_replicas')}"
    every = f"max by (replica, instance) ({replica(alone)})"
    lost = f"{away} unless on (instance) ({worst} >= {CODES['suspect']})"
    return f"({worst} unless on (instance) ({lost})) and on (instance) ({fresh}) or {every} * 0 + {CODES['unknown']}"


def silent() -> str:
    """Replicas whose kvdiag answered within the time range and does not now."""
    seen = f"last_over_time({own('build_info')}[$__range])"
    return f"{seen} unless on (instance) {own('build_info')}"


CONCURRENCY = f"({own('requests_concurrency_limit')} or {own('requests_max_concurrency')})"
"""Of requests as long as those that run now where kvdiag knows that, else of the longest that are admitted."""

_RUNNING = f'__name__=~"{"|".join(SERIES["running"])}"'
_KVDIAG = replica("last_over_time(kvdiag_build_info[$__range])")
_CHOSEN = replica(f"last_over_time({{{_RUNNING}, {_TARGETS}}}[$__range])")
_ANY = replica(f"last_over_time({{{_RUNNING}}}[$__range])")

KVDIAG = (
    f"query_result(count by (instance) ({_KVDIAG} and on (replica) {_CHOSEN} or {_KVDIAG} unless on (replica) {_ANY}))"
)
"""kvdiag beside the chosen engines' targets, and beside those that are not scraped: they may never have started."""

VARIABLES = (
    Variable(name="job", label="Job", query=f"label_values({{{_RUNNING}}}, job)"),
    # TGI's and llama.cpp's series name no model: All takes them in.
    Variable(
        name="model_name",
        label="Model",
        query=f'label_values({{{_RUNNING}, job=~"$job"}}, model_name)',
        all_value=".*",
    ),
    Variable(
        name="instance",
        label="Instance",
        query=f'label_values({{{_RUNNING}, job=~"$job", model_name=~"$model_name"}}, instance)',
    ),
    Variable(name="kvdiag", label="kvdiag", query=KVDIAG, all_value=None, regex='/instance="([^"]+)"/'),
)

GPU = Variable(name="gpu", label="GPU", query=f"label_values({own('gpu_memory_total_bytes')}, gpu)", all_value=".*")
"""All takes in what has no GPU: the ledger of an engine whose devices cannot be seen."""

_ALERTS = 'ALERTS{alertname=~"Kvdiag.+", alertstate="firing", instance=~"$kvdiag|$instance|"'

ANNOTATIONS = (
    Annotation(
        name="Out of memory",
        expr=f"{own('oom_timestamp_seconds')} * 1000",
        title="Out of memory",
        text="{{pod}} {{instance}} GPU {{gpu}} {{process}}",
        color="dark-red",
        value_is_time=True,
    ),
    Annotation(
        name="Critical alerts",
        expr=f'{_ALERTS}, severity="critical"}}',
        title="{{alertname}}",
        text="{{severity}} {{pod}} {{instance}} {{gpu}}",
        color="red",
    ),
    Annotation(
        name="Other alerts",
        expr=f'{_ALERTS}, severity!="critical"}}',
        title="{{alertname}}",
        text="{{severity}} {{pod}} {{instance}} {{gpu}}",
        color="orange",
    ),
    Annotation(
        name="Server restarts",
        expr='changes(process_start_time_seconds{job=~"$job", instance=~"$instance"}[$__rate_interval]) > 0',
        title="Server restarted",
        text="{{pod}} {{instance}}",
        color="blue",
    ),
)
