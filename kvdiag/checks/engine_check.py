"""The server: whether it answers, in a version that is known, with the series that verdicts need, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from email.utils import parsedate_to_datetime

from kvdiag.checks.check import Check
from kvdiag.engines.engine import Identity
from kvdiag.engines.vllm.metrics import CONFIG, COUNTS, USAGE_NAMES, parse_version
from kvdiag.formatting import plural
from kvdiag.sources.prometheus_text import Page

OLDEST = (0, 6, 0)
NEWEST = (0, 32, 0)
"""Versions of vLLM whose pages stand in the tests."""

APART_SECONDS = 5.0
"""Clocks that differ by more join readings of different moments: a load lasts as long."""

_NEEDED: dict[str, tuple[str, ...]] = {
    "KV usage": USAGE_NAMES,
    "running requests": COUNTS["requests_running"],
    "waiting requests": COUNTS["requests_waiting"],
    "preemptions": COUNTS["preemptions_total"],
    "the pool's size": (CONFIG,),
}


def answers(url: str | None, identity: Identity | None, problem: str | None) -> Check:
    """Check whether a server answers and identifies itself."""
    if identity is None:
        found = problem or "no server found"
        fix = "start the server, or pass its address as --url, with KVDIAG_API_KEY if it requires a key"
        return Check(id="engine.answers", outcome="fail", found=found if url is None else f"{url}: {found}", fix=fix)
    return Check(id="engine.answers", outcome="pass", found=f"{url} serves {identity.model or 'an unnamed model'}")


def version(identity: Identity | None) -> Check:
    """Check whether kvdiag is tested with the server's version."""
    if identity is None:
        return Check(id="engine.version", outcome="skip", found="no server reachable")
    known = parse_version(identity.version)
    if known is None:
        fix = "let GET /version through to the server; without it some metrics are interpreted by their names alone"
        return Check(id="engine.version", outcome="warn", found="the server does not report its version", fix=fix)
    found = f"vllm {identity.version}"
    if known[:2] < OLDEST[:2]:
        fix = f"kvdiag is tested with {_text(OLDEST)} to {_text(NEWEST)}: older metrics may differ in meaning"
        return Check(id="engine.version", outcome="warn", found=found, fix=fix)
    if known[:2] > NEWEST[:2]:
        fix = f"kvdiag is tested with {_text(OLDEST)} to {_text(NEWEST)}: check for a newer kvdiag"
        return Check(id="engine.version", outcome="warn", found=found, fix=fix)
    return Check(id="engine.version", outcome="pass", found=found)


def _text(version: tuple[int, int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def series(page: Page | None, problem: str | None) -> Check:
    """Check whether /metrics has what verdicts about the KV pool need."""
    if page is None:
        if problem is None:
            return Check(id="engine.series", outcome="skip", found="no server reachable")
        fix = "let GET /metrics through to the server; start it without --disable-log-stats"
        return Check(id="engine.series", outcome="fail", found=problem, fix=fix)
    missing = [what for what, names in _NEEDED.items() if not any(name in page for name in names)]
    if len(missing) == len(_NEEDED):
        fix = "give the address of a vLLM server, started without --disable-log-stats"
        return Check(id="engine.series", outcome="fail", found="/metrics has no vllm:* series", fix=fix)
    found = f"{sum(name.startswith('vllm:') for name in page)} vLLM metrics"
    if missing:
        fix = "send the server a request (some series appear with the first one); until then their verdicts are unknown"
        return Check(id="engine.series", outcome="warn", found=f"{found}; missing: {', '.join(missing)}", fix=fix)
    return Check(id="engine.series", outcome="pass", found=found)


def name_filter(*, whole_bytes: int | None, some_bytes: int | None, took_seconds: float) -> Check:
    """Check whether the server sends only the series that `name[]` selects."""
    if whole_bytes is None or some_bytes is None:
        return Check(id="engine.name_filter", outcome="skip", found="no server reachable")
    found = f"{some_bytes:,} bytes of {whole_bytes:,} in {took_seconds * 1e3:.1f} ms"
    if some_bytes >= whole_bytes:
        fix = "let the query `name[]` through (a proxy or old version drops it); until then all metrics are read"
        return Check(id="engine.name_filter", outcome="warn", found=found, fix=fix)
    return Check(id="engine.name_filter", outcome="pass", found=found)


def processes(pids: Sequence[int] | None, readable: int, problem: str | None) -> Check:
    """Check whether the server's processes are visible, and the memory of how many is readable."""
    if problem is None and pids is None:
        return Check(id="engine.processes", outcome="skip", found="no server reachable")
    if pids is None:
        fix = "run kvdiag on the server's host, in its PID namespace (shareProcessNamespace: true), as its user"
        return Check(id="engine.processes", outcome="warn", found=problem or "not visible", fix=fix)
    found = f"{plural(len(pids), 'process', 'processes')}, memory readable for {readable}"
    if readable < len(pids):
        fix = "run kvdiag as the server's user to read the host memory of the others"
        return Check(id="engine.processes", outcome="warn", found=found, fix=fix)
    return Check(id="engine.processes", outcome="pass", found=found)


def clock(date: str | None, now_seconds: float | None) -> Check:
    """Check the server's clock by the Date of its response (RFC 9110, whole seconds).

    `now_seconds` is this host's time at the request, `None` if nobody answered.
    """
    if now_seconds is None:
        return Check(id="engine.clock", outcome="skip", found="no server reachable")
    if not date:
        return Check(id="engine.clock", outcome="skip", found="the server sends no Date header")
    try:
        apart_seconds = now_seconds - parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return Check(id="engine.clock", outcome="skip", found="the server's Date header is invalid")
    found = f"the server's clock is {abs(apart_seconds):,.0f} s {'behind' if apart_seconds > 0 else 'ahead'}"
    if abs(apart_seconds) > APART_SECONDS:
        return Check(id="engine.clock", outcome="warn", found=found, fix="synchronise both clocks with NTP (chrony)")
    return Check(id="engine.clock", outcome="pass", found="the server's clock matches this host's")
