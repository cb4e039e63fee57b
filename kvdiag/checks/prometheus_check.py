"""Check Prometheus: whether it answers, and has the series that `kvdiag diagnose --prometheus` joins."""

from kvdiag.checks.check import Check


def answers(url: str, problem: str | None) -> Check:
    """Whether the address has a Prometheus API."""
    if problem is not None:
        fix = "check the address, with its path prefix, and --user or --token-file"
        return Check("prometheus.answers", "fail", f"{url}: {problem}", fix)
    return Check("prometheus.answers", "pass", url)


MISSING = {
    "gpu": "scrape dcgm-exporter, nvidia_gpu_exporter or kvdiag: GPU memory is unknown without it",
    "kvdiag": "scrape `kvdiag serve` to have its verdicts and alerts there",
}
"""Fix for a source without series; every other source is an engine's."""

MISSING_ENGINE = "scrape the server's /metrics: KV pool and load are unknown without it"


def scraped(title: str, series_now: int, series_lately: int) -> Check:
    """Whether it holds series of a source now, or held some in the last hour."""
    id_ = f"prometheus.{title}"
    if series_now:
        return Check(id_, "pass", f"{series_now:,} series")
    if not series_lately:
        return Check(id_, "warn", "no series in the last hour", MISSING.get(title, MISSING_ENGINE))
    fix = "check the target's state on Prometheus' /targets page: it is no longer scraped"
    return Check(id_, "warn", f"{series_lately:,} series in the last hour, none now", fix)
