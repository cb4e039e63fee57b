"""`kvdiag doctor`: whether kvdiag can read what it needs from where it runs, and what to change if not.

This module collects; the pure functions of kvdiag/checks decide. The server is asked first, because its answer shows
whether it is a drill, whose simulated driver is then checked instead of this host's; the list begins with the GPUs.
The driver, the agents' folder and every HTTP answer have a time limit, and one that exceeds it fails its own checks
alone. Checks of a part that is missing are skipped with the reason: a skipped check never counts as passed.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click
import psutil

from kvdiag.checks import agent_check, engine_check, gpu_check, prometheus_check
from kvdiag.checks.check import Check, Outcome, clock_check, skipped, worst
from kvdiag.commands import connect
from kvdiag.commands.options.common import ServerAccess, agent_option, collected, given_by, output_option, server_access
from kvdiag.commands.options.prometheus_options import PrometheusAccess, PrometheusOptions
from kvdiag.commands.options.serve_options import LISTEN
from kvdiag.commands.printing import is_ascii_only, print_json, print_text
from kvdiag.engines import DEFAULT, ENGINES, engines_in_turn, recognise
from kvdiag.feeds.live.sampling import read_agents
from kvdiag.feeds.live.server_facts import front_page
from kvdiag.formatting import format_duration
from kvdiag.model import Gap
from kvdiag.outputs.terminal import doctor_text
from kvdiag.sources import host
from kvdiag.sources.host import USUAL_PORTS, candidates
from kvdiag.sources.http import Answer, HttpReader, Unreadable
from kvdiag.sources.prometheus_api import PrometheusSource
from kvdiag.sources.prometheus_names import GPU, KVDIAG
from kvdiag.sources.prometheus_text import Page
from kvdiag.sources.promql import named, selector
from kvdiag.sources.worker_thread import ReadTimeout

DRIVER_SECONDS = 10.0
"""The first answer takes longer: the driver is initialised, one second for each GPU that is not in use."""

AGENT_SECONDS = 5.0
PROMETHEUS_SECONDS = 15.0

EXIT_CODES: Mapping[Outcome, int] = {"pass": 0, "warn": 1, "fail": 2, "skip": 3}

OWN_GPU = tuple(name for name, meaning in KVDIAG.items() if meaning.part == "device")
"""kvdiag's own metrics of devices."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What to check."""

    url: str | None = given_by("Server to check; default: search this host's usual ports.")
    access: ServerAccess = given_by(server_access)
    agent_dir: Path | None = given_by(agent_option)
    prometheus_url: str | None = given_by("Prometheus API to check as well.", "--prometheus", metavar="URL")
    user: str | None = given_by("User name for basic authentication.")
    password_file: Path | None = given_by("File with the password.")
    token_file: Path | None = given_by("File with a bearer token.")
    output: str = given_by(output_option)


@click.command()
@collected(DoctorOptions, "options")
def command(options: DoctorOptions) -> int:
    """Check access to GPUs, server, agents and Prometheus; each problem comes with its fix.

    Exit codes: 0 all pass, 1 warnings, 2 failures, 3 nothing could be checked. It only reads and sends no load.
    """
    history = None
    if options.prometheus_url is not None:
        history = PrometheusOptions(
            prometheus=options.prometheus_url,
            user=options.user,
            password_file=options.password_file,
            token_file=options.token_file,
            ca_file=options.access.ca_file,
            insecure=options.access.insecure,
            timeout=PROMETHEUS_SECONDS,
        ).access()
    checks = asyncio.run(look(options.url, options.access, options.agent_dir, history))
    if options.output == "json":
        print_json(doctor_text.document(checks))
    else:
        print_text(doctor_text.render(checks, ascii_only=is_ascii_only()))
    return EXIT_CODES[worst(checks)]


async def look(
    url: str | None, access: ServerAccess, agent_dir: Path | None, history: PrometheusAccess | None
) -> list[Check]:
    """Every check of this host, of the server at `url` or the first one here, of its agents and of a Prometheus."""
    own_port = int(LISTEN.rpartition(":")[2])
    front = None if access.metrics_url is None else url
    url = url if access.metrics_url is None else access.metrics_url
    here = {} if url is not None else await connect.servers_here(own_port)
    address = connect.base_url(url) if url is not None else next(iter((*here, *candidates(own_port))), None)
    drill = False
    if address is None:
        server = _no_server(None, f"nothing listens on ports {USUAL_PORTS} of this host")
    else:
        # Any process can listen on a usual port: a key goes only to an address that the user named.
        known = access if url is not None else replace(access, api_key=None)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(connect.open_client(connect.base_url(one), known))
                for one in (address, front)
                if one is not None
            ]
            server, drill = await _engine(connect.without_credentials(address), *map(HttpReader, clients))
    gpus = await _gpus(address, drill=drill)
    beside = [url for url in here if url != address]
    if len(here) > 1:
        found = await asyncio.gather(*map(_series, beside))
        server.append(engine_check.others({url: (here[url], check) for url, check in zip(beside, found, strict=True)}))
    return [*gpus, *server, *await _agents(agent_dir), *await _prometheus(history)]


async def _gpus(url: str | None, *, drill: bool) -> list[Check]:
    reader = connect.device_reader(url, drill=drill)
    try:
        devices, gaps = await reader.ask(DRIVER_SECONDS, processes=True)
        # The first read starts the driver's library, which is no measure of the others.
        begun_seconds = time.perf_counter()
        devices, gaps = await reader.ask(DRIVER_SECONDS, processes=True)
    except ReadTimeout as busy:
        devices, begun_seconds = None, time.perf_counter()
        reason = f"the driver has not responded for {format_duration(busy.since_seconds)}; check `dmesg` for Xid errors"
        gaps = (Gap(source="nvml", kind="failed", reason=reason),)
    finally:
        reader.close()
    took_seconds = time.perf_counter() - begun_seconds
    container = [] if drill else [gpu_check.container(os.environ, _device_nodes())]
    here = set(psutil.pids()) if not drill else {one.pid for each in devices or () for one in each.processes or ()}
    return [
        *container,
        gpu_check.driver(devices, gaps, None if drill else took_seconds),
        gpu_check.memory(devices, gaps),
        gpu_check.processes(devices, here),
    ]


def _device_nodes() -> list[str]:
    return [path.name for path in Path("/dev").glob("nvidia*")]


def _no_server(url: str | None, problem: Unreadable | str) -> list[Check]:
    return [engine_check.answers(url, None, problem), *skipped("no server reachable", *engine_check.AFTER_ANSWERS)]


async def _engine(url: str, http: HttpReader, front: HttpReader | None = None) -> tuple[list[Check], bool]:
    """The checks of the server at an address, and whether it is a drill; `front` is what is in front of it."""
    if (names := await engines_in_turn(http)) is not None:
        return [
            engine_check.in_turn(url, names),
            *skipped("not one server", *engine_check.AFTER_ANSWERS),
        ], False
    source = await recognise(http)
    engine = source.engine
    try:
        identity = await source.identify()
    except Unreadable as error:
        return _no_server(url, error), False
    page: Page | None = None
    problem = ""
    try:
        page = await source.page()
        if front is not None:
            page = {**await front_page(engine, await recognise(front)), **page}
    except Unreadable as error:
        problem = str(error)
    whole, _ = await _answer(http, engine.metrics_path, ())
    now_seconds = time.time()
    some, took_seconds = await _answer(http, engine.metrics_path, engine.polled_metrics)
    pids, gaps = await asyncio.to_thread(host.find_server, url, engine.program)
    readable, _ = host.read(pids or ())
    checks = [
        engine_check.answers(url, identity, None),
        engine_check.version(engine, identity),
        engine_check.series(engine, page, problem),
        engine_check.name_filter(
            engine,
            whole_bytes=None if whole is None else len(whole.text),
            some_bytes=None if some is None else len(some.text),
            took_seconds=took_seconds,
        ),
        engine_check.processes(pids, len(readable or ()), gaps[0].reason if gaps else None),
        engine_check.clock(None if whole is None else whole.date, now_seconds),
    ]
    return checks, identity.server_header == connect.DRILL_HEADER


async def _series(url: str) -> Check:
    """What another server on this host reports."""
    async with connect.open_client(url, ServerAccess()) as client:
        source = await recognise(HttpReader(client))
        try:
            return engine_check.series(source.engine, await source.page(), "")
        except Unreadable as error:
            return engine_check.series(source.engine, None, str(error))


async def _answer(http: HttpReader, path: str, names: tuple[str, ...]) -> tuple[Answer | None, float]:
    begun_seconds = time.perf_counter()
    try:
        answer = await http.get(path, params=[("name[]", name) for name in names])
    except Unreadable:
        return None, 0.0
    return answer, time.perf_counter() - begun_seconds


async def _agents(folder: Path | None) -> list[Check]:
    reader = connect.agent_reader(folder)
    if folder is None or reader is None:
        found = "no --agent-dir: torch's memory statistics are not read"
        return [*skipped(found, "agent.publications"), *skipped("no --agent-dir", "agent.permission")]
    allocators, gaps, _ = await read_agents(reader, AGENT_SECONDS)
    return [
        agent_check.publications(folder, allocators, gaps),
        agent_check.permission(
            folder,
            readable=os.access(folder, os.R_OK | os.X_OK),
            writable=os.access(folder, os.W_OK | os.X_OK),
        ),
    ]


async def _prometheus(history: PrometheusAccess | None) -> list[Check]:
    engines = {engine.name: engine.metrics for engine in ENGINES if engine.metrics}
    sources = {**engines, "gpu": {*GPU, *OWN_GPU}, "kvdiag": KVDIAG}
    if history is None:
        return skipped("no --prometheus", "prometheus.answers")
    url = history.url.rstrip("/")
    try:
        async with history.source() as source:
            now_seconds = await source.number("time()")
            apart_seconds = None if now_seconds is None else time.time() - now_seconds
            found = [(title, *await _scraped(source, names)) for title, names in sources.items()]
    except Unreadable as error:
        return [
            prometheus_check.answers(url, str(error)),
            *skipped(
                "no Prometheus reachable", *(f"prometheus.{name}" for name in ("clock", DEFAULT.name, "gpu", "kvdiag"))
            ),
        ]
    # Of the engines those that are scraped; the default where none is.
    scraped = {title for title, now, lately in found if now or lately}
    absent = set(engines) - (scraped if scraped & set(engines) else {DEFAULT.name})
    found = [one for one in found if one[0] not in absent]
    return [
        prometheus_check.answers(url, None),
        clock_check("prometheus.clock", "its", apart_seconds),
        *(prometheus_check.scraped(title, now, lately) for title, now, lately in found),
    ]


async def _scraped(source: PrometheusSource, names: Iterable[str]) -> tuple[int, int]:
    """How many series have any of the names now, by Prometheus' own look-back, and had in the last hour."""
    wanted = selector(named(names))
    now = await source.number(f"count({wanted})")
    lately = await source.number(f"count(last_over_time({wanted}[1h]))")
    return round(now or 0.0), round(lately or 0.0)
