"""`kvdiag run`: runs the test steps against a server, and prints the verdict on them.

In this order: options that exclude one another and files that cannot be written are refused; the server is found, or a
simulated one is started; a dry run prints the plan and ends; else the active feed runs the steps and the soak, or the
isolation probe, while a sampler reads the server; the timeline of both is then diagnosed. The trace's file is replaced
only when the load begins, so that a refused run leaves an earlier trace as it was. SIGTERM and SIGHUP act as Ctrl-C:
requests are cancelled, the trace is closed, and there is no verdict on half a test.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from kvdiag import files
from kvdiag.commands.after_run.fix_check import checked, first_fix, given_flags
from kvdiag.commands.after_run.soak_profile import profiling
from kvdiag.commands.connect import agent_reader, bearer, connect, servers_here
from kvdiag.commands.drill import simulated
from kvdiag.commands.interruption import end_on_signals, interruptible
from kvdiag.commands.options.common import (
    Duration,
    ServerAccess,
    Within,
    agent_option,
    collected,
    either,
    given_by,
    output_option,
    request_ids_option,
    server_access,
)
from kvdiag.commands.options.report_file import ReportFile, report_option, show_diagnosis
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.commands.printing import show_progress
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.steps import ISOLATION, SOAK, STEPS
from kvdiag.engines.engine import Identity
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.isolation_probe import IsolationFeed, plan_isolation
from kvdiag.feeds.active.load_generator import REFRESH_PROMPT_TOKENS, Requests, token_ids
from kvdiag.feeds.active.soak_plan import MAX_SECONDS, MIN_SECONDS, SoakPlan, plan_soak
from kvdiag.feeds.active.step_plan import expected_seconds, plan
from kvdiag.feeds.active.step_runner import ActiveFeed
from kvdiag.feeds.live.sampling import Clock, Pace, Sampler, TimelineBuilder, ticks
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.formatting import format_count, format_duration, plural
from kvdiag.model import Diagnosis, Facts, Timeline
from kvdiag.sources.http import Unreadable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one run."""

    url: str | None = given_by("Server to diagnose, such as http://127.0.0.1:8000.")
    simulate: str | None = given_by("Diagnose a simulated server instead of --url.", metavar="SCENARIO")
    check_fix: str | None = given_by("Also run --simulate with FLAGS; `first`: the first fix.", metavar="FLAGS")
    access: ServerAccess = given_by(server_access)
    agent_dir: Path | None = given_by(agent_option)
    show_request_ids: bool = given_by(request_ids_option, default=False)
    force: bool = given_by("Run despite other traffic; affected checks become unknown.")
    record: Path | None = given_by("Record the trace to this file; .gz compresses it.")
    soak: float | None = given_by(
        "Also look for slow leaks, for 5m to 2h [default: 12m].",
        type=Duration(MIN_SECONDS, MAX_SECONDS),
        is_flag=False,
        flag_value="12m",
        metavar="[DURATION]",
    )
    soak_cycle: float | None = given_by("Seconds per cycle.", type=Within(0.1, 60.0), hidden=True)
    profile: bool = given_by("After a soak with a leak, name its lines of code.")
    report: Path | None = given_by(report_option)
    isolation: bool = given_by("Test prefix-cache isolation instead of the steps.")
    other_api_key: str | None = given_by("Second tenant's API key, with --isolation.", metavar="KEY")
    dry_run: bool = given_by("Print the planned load without sending it.")
    reserved_gap_bytes: int = given_by(reserved_gap_option)
    output: str = given_by(output_option)


@click.command()
@collected(RunOptions, "options")
def command(options: RunOptions) -> int:
    """Run load tests against a server and diagnose its memory.

    \b
    1 baseline         no requests: the KV pool must be empty, the GPU used by the server alone
    2 single request   one at a time, repeatedly: its KV cache must be released
    3 concurrent       ten requests of 2K tokens: growth must match their tokens
    4 long context     one request of 16K tokens: growth must be linear

    Takes about a minute; the server should have no other traffic. --soak adds a step that alternates load and
    idle cycles, for leaks too slow to show in a minute. Where an engine reports its figures late, the steps take up
    to five minutes and a soak half an hour or longer, as --dry-run prints. --isolation replaces the steps: two
    tenants send the same prompts, with and without cache_salt. --check-fix runs a simulated server twice, then
    started with FLAGS, and reports which verdicts end.

    Scenarios of --simulate: healthy, kv-leak, device-leak, fragmentation, foreign-memory, duplicate-model,
    concurrency-thrash, long-context-oom, warmup, salt-ignored, trtllm-healthy, trtllm-kv-leak, tgi-healthy,
    tgi-kv-leak, lmdeploy-healthy, lmdeploy-kv-leak, llamacpp-healthy, llamacpp-kv-leak; `kvdiag drill --help`
    describes them.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    url, simulate = either(("url", options.url), ("simulate", options.simulate))
    report, record, isolation = options.report, options.record, options.isolation
    if (url is None) == (simulate is None):
        here = asyncio.run(servers_here(0)) if url is None else {}
        found = "".join(f"; found {address} ({server})" for address, server in here.items())
        raise click.UsageError(f"give either --url URL or --simulate SCENARIO{found}")
    if report is not None and record is not None and report.resolve() == record.resolve():
        raise click.UsageError("--record and --report need different files")
    page = ReportFile(report)
    if options.check_fix is not None and (simulate is None or options.dry_run):
        how = "start a real server with the flag and use `kvdiag baseline compare`"
        raise click.UsageError(f"--check-fix needs --simulate, without --dry-run; {how}")
    if isolation and options.soak is not None:
        raise click.UsageError("--isolation and --soak cannot be combined: run them separately")
    if options.other_api_key is not None and not isolation:
        raise click.UsageError("--other-api-key needs --isolation")
    if options.profile and (options.soak is None or options.agent_dir is None):
        raise click.UsageError("--profile needs --soak, and the agents' directory by --agent-dir")
    other_headers = bearer(options.other_api_key) or None
    # SIGTERM and SIGHUP act as Ctrl-C: requests are cancelled, the trace closed, a simulated server stopped.
    end_on_signals()
    recording = _Recording(record)
    if simulate is not None and options.check_fix is not None:
        return _fix_checked(simulate, options.check_fix, options, recording, other_headers, page)
    result = _diagnosed(url, options, recording, other_headers)
    if result is None:
        return 0
    return show_diagnosis(*result, page, options.output)


def _fix_checked(
    scenario: str,
    fix: str,
    options: RunOptions,
    recording: "_Recording",
    other_headers: dict[str, str] | None,
    page: ReportFile,
) -> int:
    """Run the simulated server as it is and with the flags of a fix; without one the first run's verdict is shown."""
    flags = given_flags(fix, scenario)
    before = _diagnosed(None, options, _Recording(None), other_headers)
    if before is None:
        return 0
    if flags is None:
        try:
            flags = first_fix(before[0], scenario)
        except KvdiagError:
            show_diagnosis(*before, page, options.output)
            raise
    after = _diagnosed(None, options, recording, other_headers, flags)
    if after is None:
        return 0
    code = show_diagnosis(*after, page, options.output)
    click.echo(checked(before[0], after[0], flags), err=options.output != "text")
    return code


def _diagnosed(
    url: str | None,
    options: RunOptions,
    recording: "_Recording",
    other_headers: dict[str, str] | None,
    flags: Sequence[str] = (),
) -> tuple[Diagnosis, Timeline] | None:
    """The verdict on the server, or on a simulated one that is started with `flags`; `None` after a dry run."""
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(simulated(options.simulate or "", flags))
            options = replace(options, access=replace(options.access, api_key=None))
        result = _interruptible(_run(url, options, recording, other_headers), recording)
    if result is None:
        return None
    timeline, facts = result
    return diagnose(timeline, facts, limits_of(options.reserved_gap_bytes)), timeline


class _Recording:
    """The trace of --record, begun with the first load: a refused run leaves an earlier file as it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begun = False
        if path is not None:
            try:
                files.refuse(path)
            except OSError as error:
                raise KvdiagError(f"cannot record to {path}: {error.strerror}") from error

    def begin(self, recorder: TimelineBuilder, facts: Facts, stack: ExitStack) -> None:
        if self._path is not None:
            recorder.keep_in(stack.enter_context(TraceWriter(self._path, facts)))
            self._begun = True

    @property
    def location(self) -> str:
        """Where the trace is, as the end of a sentence."""
        return f"; the trace so far is in {self._path}" if self._begun else ""


def _interruptible(work: Coroutine[Any, Any, T], recording: _Recording) -> T:
    """Run to the end or until Ctrl-C: asyncio then cancels the work, which drops its requests and closes its trace."""
    try:
        return interruptible(work)
    except KeyboardInterrupt as error:
        raise KvdiagError(f"interrupted: requests cancelled, no verdict{recording.location}") from error


async def _run(
    url: str, options: RunOptions, recording: _Recording, other_headers: dict[str, str] | None
) -> tuple[Timeline, Facts] | None:
    if not options.dry_run:
        await _show_pool(url, options)
    async with connect(url, options.access, forced=options.force) as (client, server):
        facts, engine = server.facts, server.engine.engine
        soak = (
            None if options.soak is None else partial(plan_soak, options.soak, facts, cycle_seconds=options.soak_cycle)
        )
        if options.dry_run:
            if options.isolation:
                _print_isolation(facts, other_key=other_headers is not None)
                return None
            _print_plan(facts)
            if soak is not None:
                _print_soak(soak(None))
            return None
        _refuse(server.identity)
        if facts.model is None:
            raise KvdiagError("the server does not report its model name, so no request can be sent; check /v1/models")
        with ExitStack() as stack:
            soak_seconds = 0.0 if soak is None else soak(None).seconds
            progress = stack.enter_context(show_progress(expected_seconds(facts.capabilities) + soak_seconds))
            agents = agent_reader(options.agent_dir, show_request_ids=options.show_request_ids)
            if agents is not None:
                stack.callback(agents.close)
            tokens = await token_ids(client, facts.model)
            requests = Requests(client, facts.model, tokens, engine=engine, capabilities=facts.capabilities)
            recorder = TimelineBuilder()
            sampler = Sampler(
                engine=server.engine,
                nvml=server.nvml,
                agents=agents,
                facts=facts,
                record=recorder.add,
                pace=Pace(),
                clock=Clock(),
                load=requests.load,
            )
            probe = None
            if options.isolation:
                if not facts.capabilities.salt:
                    title = engine.title
                    raise KvdiagError(f"{title} accepts no cache salt, so tenants' prefixes cannot be kept apart")
                probe = IsolationFeed(
                    sampler=sampler,
                    requests=requests,
                    recorder=recorder,
                    other_headers=other_headers,
                ).run
            feed = ActiveFeed(
                steps=STEPS,
                sampler=sampler,
                requests=requests,
                recorder=recorder,
                progress=progress,
                begin=partial(recording.begin, recorder, facts, stack),
                soak=soak,
                profile=None
                if options.agent_dir is None or not options.profile
                else profiling(server, options.agent_dir, options.soak_cycle, limits_of(options.reserved_gap_bytes)),
                instead=probe,
            )
            timeline = await feed.run()
            if (left := await server.engine.clean_up()) is not None:
                stack.callback(click.echo, left, err=True)
            return timeline, facts


GAUGES_SECONDS, LATE_GAUGES_SECONDS = 1.0, 15.0
"""After its first request, until an engine shows its gauges at the latest; the second of one that moves them by it."""


async def _show_pool(url: str, options: RunOptions) -> None:
    """Send one small request to a server that shows no pool: the gauges of some engines appear with their first one."""
    async with connect(url, options.access) as (client, server):
        facts, engine = server.facts, server.engine.engine
        _refuse(server.identity)
        if not facts.pools and facts.model is not None:
            requests = Requests(client, facts.model, engine=engine, capabilities=facts.capabilities)
            await requests.measure(REFRESH_PROMPT_TOKENS, 1)
            late = facts.capabilities.on_completion
            with suppress(TimeoutError, Unreadable):
                async with asyncio.timeout(LATE_GAUGES_SECONDS if late else GAUGES_SECONDS):
                    async for _ in ticks(GAUGES_SECONDS / 5):
                        if engine.parse_pools(await server.engine.page(), facts.engine_version, ())[0]:
                            break


def _refuse(identity: Identity | None) -> None:
    if identity is not None and identity.requests_refused is not None:
        raise KvdiagError(identity.requests_refused)


def _print_plan(facts: Facts) -> None:
    for number, planned in enumerate(plan(STEPS, facts), start=1):
        load = planned.workload
        cycles, requests = plural(planned.cycles, "cycle"), plural(load.requests, "request")
        what = (
            f"{cycles} of {requests} of {format_count(load.prompt_tokens)} tokens, {load.max_tokens} generated"
            if load.requests
            else f"no requests for {format_duration(load.hold_seconds)}"
        )
        click.echo(f"{number} {planned.step.id}: {what}")
        for note in planned.notes:
            click.echo(f"  {note}")


def _print_isolation(facts: Facts, *, other_key: bool) -> None:
    probe = plan_isolation(facts, other_key=other_key)
    shape = probe.requests[0]
    click.echo(
        f"1 {ISOLATION.id}: {len(probe.requests)} requests of {shape.prompt_tokens:,} tokens, {shape.max_tokens} "
        f"generated, one at a time; {format_count(probe.tokens)} tokens in total"
    )
    click.echo(f"  each prompt from two tenants, with and without salts, with {'two keys' if other_key else 'one key'}")
    for note in probe.notes:
        click.echo(f"  {note}")


def _print_soak(soak: SoakPlan) -> None:
    loads = [one for one in soak.cycles if one.requests]
    new, repeated = [one for one in loads if not one.repeated], [one for one in loads if one.repeated]
    *doses, largest = sorted({one.requests for one in new})
    click.echo(
        f"{len(STEPS) + 1} {SOAK.id}: {len(new)} cycles of {', '.join(map(str, doses))} or {largest} requests of "
        f"{format_count(new[0].prompt_tokens)} tokens, {new[0].max_tokens} generated, "
        f"then {len(repeated)} cycles of {repeated[0].requests} with repeated prompts"
    )
    click.echo(
        f"  {len(soak.cycles) - len(loads)} idle cycles between them, {format_duration(soak.cycle_seconds)} per cycle; "
        f"the step takes {format_duration(soak.seconds)} and sends {soak.requests:,} requests, {soak.tokens:,} tokens"
    )
    for note in soak.notes:
        click.echo(f"  {note}")
