"""Check the server: whether it answers, in a tested version, with the series that verdicts need, on the same clock."""

from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime

from kvdiag.checks.check import Check, clock_check
from kvdiag.engines.engine import EngineAdapter, Identity
from kvdiag.formatting import format_bytes, format_duration, plural
from kvdiag.sources.http import KEY_STATUSES, Unreadable
from kvdiag.sources.prometheus_text import Page


def answers(url: str | None, identity: Identity | None, problem: Unreadable | str | None) -> Check:
    """Check whether a server answers and identifies itself."""
    if identity is None:
        found = str(problem or "no server found")
        status = problem.status if isinstance(problem, Unreadable) else None
        fix = "start the server, or pass its address as --url"
        if status is not None:
            fix = "pass the address of an LLM server as --url"
        if status in KEY_STATUSES:
            fix = "set KVDIAG_API_KEY to the server's key, and pass its address as --url"
        return Check("engine.answers", "fail", found if url is None else f"{url}: {found}", fix)
    return Check("engine.answers", "pass", f"{url} serves {identity.model or 'an unnamed model'}")


def in_turn(url: str, names: str) -> Check:
    """Fail where several engines answer at one address in turn, as behind a load balancer."""
    found = f"{url}: {names} answer at this address in turn"
    return Check("engine.answers", "fail", found, "pass the address of one of them as --url")


AFTER_ANSWERS = tuple(f"engine.{name}" for name in ("version", "series", "name_filter", "processes", "clock"))
"""The checks that need a server which answers."""


def version(engine: EngineAdapter, identity: Identity) -> Check:
    """Check whether kvdiag is tested with the server's version."""
    known = engine.parse_version(identity.version)
    role = "" if identity.role is None else f", {identity.role}"
    oldest, newest = (".".join(map(str, tested)) for tested in engine.tested_versions)
    if known is None and not engine.reports_version:
        found = f"{engine.name}{role}: no version is reported; kvdiag is tested with {oldest} to {newest}"
        return Check("engine.version", "skip", found)
    if known is None:
        if identity.version is not None:
            found = f"{engine.name} {identity.version}{role}: a build without a release's number"
            return Check("engine.version", "warn", found, "compare its metrics with those of a release")
        place = engine.flags.get("version", "GET /version")
        fix = f"let {place} through to the server; without it some metrics are interpreted by their names alone"
        return Check("engine.version", "warn", f"{engine.name}{role}: the server does not report its version", fix)
    found = f"{engine.name} {identity.version}{role}"
    if known[:2] < engine.tested_versions[0]:
        fix = f"kvdiag is tested with {oldest} to {newest}: older metrics may differ in meaning"
        return Check("engine.version", "warn", found, fix)
    if known[:2] > engine.tested_versions[1]:
        fix = f"kvdiag is tested with {oldest} to {newest}: check for a newer kvdiag"
        return Check("engine.version", "warn", found, fix)
    return Check("engine.version", "pass", found)


def series(engine: EngineAdapter, page: Page | None, problem: str) -> Check:
    """Check whether the metrics endpoint has what verdicts about the KV pool need."""
    path = engine.metrics_path.rstrip("/")
    if page is None:
        fix = f"let GET {path} through to the server; start it {engine.metrics_flag}"
        return Check("engine.series", "fail", problem, fix)
    missing = [what for what, names in engine.needed_metrics.items() if not any(name in page for name in names)]
    ours = sum(name.startswith(engine.metric_prefix) for name in page)
    if not ours:
        fix = f"give the address of a {engine.title} server, started {engine.metrics_flag}"
        return Check("engine.series", "fail", f"{path} has no {engine.metric_prefix}* series", fix)
    found = plural(ours, f"{engine.title} metric")
    # What no server of this engine can report, however it is started: not known while series are missing.
    can = engine.capabilities(page)
    able = {"KV usage": can.usage, f"{can.unit}s in use": can.blocks}
    if lacking := [what for what, has in able.items() if not has and not missing]:
        found += f"; {engine.title} does not report {' or '.join(lacking)}: verdicts that need it are unknown"
        found += f"; {engine.usage_at}" if engine.usage_at and not can.usage else ""
    if missing:
        appear = "send the server a request (some series appear with the first one), or start it"
        how = "start the server" if engine.metrics_at_start else appear
        fix = f"{how} {engine.metrics_flag}; until then their verdicts are unknown"
        return Check("engine.series", "warn", f"{found}; missing: {', '.join(missing)}", fix)
    return Check("engine.series", "pass", found)


def name_filter(
    engine: EngineAdapter, *, whole_bytes: int | None, some_bytes: int | None, took_seconds: float
) -> Check:
    """Check whether the server sends only the series that `name[]` selects, if its engine can."""
    if not engine.polled_metrics:
        return Check("engine.name_filter", "skip", f"{engine.title} has no filter: all metrics are read")
    if whole_bytes is None or some_bytes is None:
        return Check("engine.name_filter", "skip", "no server reachable")
    read = f"read in {format_duration(took_seconds)}"
    found = f"metrics filtered by name are {format_bytes(some_bytes)} instead of {format_bytes(whole_bytes)}, {read}"
    if some_bytes >= whole_bytes:
        found = f"the filter by name has no effect: {format_bytes(some_bytes)} with and without it, {read}"
        fix = "let the query `name[]` through (a proxy or old version drops it); until then all metrics are read"
        return Check("engine.name_filter", "warn", found, fix)
    return Check("engine.name_filter", "pass", found)


def processes(pids: Sequence[int] | None, readable: int, problem: str | None) -> Check:
    """Check whether the server's processes are visible, and the memory of how many is readable."""
    if pids is None:
        fix = "run kvdiag on the server's host, in its PID namespace (shareProcessNamespace: true), as its user"
        return Check("engine.processes", "warn", problem or "not visible", fix)
    found = f"{plural(len(pids), 'process', 'processes')}, memory readable for {readable}"
    if readable < len(pids):
        fix = "run kvdiag as the server's user to read the host memory of the others"
        return Check("engine.processes", "warn", found, fix)
    return Check("engine.processes", "pass", found)


def others(servers: Mapping[str, tuple[str, Check]]) -> Check:
    """Name the other servers on this host by their addresses, each with what it is and the check of its series."""
    listed = [
        f"{url} ({server})" if check.outcome == "pass" else f"{url} ({server}: {check.found})"
        for url, (server, check) in servers.items()
    ]
    found = f"{', '.join(listed)}; kvdiag watches one server: name it by --url"
    fixes = [f"{url}: {check.fix}" for url, (_, check) in servers.items() if check.fix]
    return Check("engine.others", "warn" if fixes else "pass", found, "; ".join(fixes) or None)


def clock(date: str | None, now_seconds: float) -> Check:
    """Check the server's clock by the Date of its response (RFC 9110, whole seconds), requested at `now_seconds`."""
    try:
        apart_seconds = now_seconds - parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError):
        return Check("engine.clock", "skip", "the server sends no valid Date header")
    return clock_check("engine.clock", "the server's", apart_seconds)
