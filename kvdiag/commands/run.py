"""`kvdiag run`: the four test steps against a server, and the verdict."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from kvdiag.commands.connect import Connection, agent_reader, connect
from kvdiag.commands.duration import Duration
from kvdiag.commands.options import agent_option, output_option, server_options
from kvdiag.commands.progress import show_progress
from kvdiag.commands.show import exit_code, print_diagnosis
from kvdiag.commands.simulated import simulated
from kvdiag.commands.thresholds import limit_options, limits_of
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.steps import SOAK, STEPS
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active import ActiveFeed, Progress
from kvdiag.feeds.live import AllocatorReading, Clock, Pace, Recorder, Sampler
from kvdiag.feeds.plan import plan
from kvdiag.feeds.requests import Requests, Speed
from kvdiag.feeds.soak import LEAST_SECONDS, MOST_SECONDS, SoakPlan, plan_soak
from kvdiag.feeds.trace import TraceWriter
from kvdiag.feeds.vocabulary import token_ids
from kvdiag.model import Facts, Timeline
from kvdiag.sim import STORIES
from kvdiag.sources.patience import Patient

T = TypeVar("T")


@click.command()
@click.option("--url", help="The server, such as http://127.0.0.1:8000.")
@click.option("--simulate", metavar="STORY", help=f"Diagnose a simulated server instead: {', '.join(STORIES)}.")
@server_options
@agent_option
@click.option("--force", is_flag=True, help="Run although the server has other traffic; says what it then cannot tell.")
@click.option("--record", type=click.Path(path_type=Path), help="Keep the trace in this file (.gz packs it).")
@click.option(
    "--soak",
    type=Duration(LEAST_SECONDS, MOST_SECONDS),
    is_flag=False,
    flag_value="12m",
    metavar="[DURATION]",
    help="After the steps look for slow leaks: load and idle cycles in turns, for 12m or so long (5m to 2h).",
)
@click.option("--soak-cycle", type=click.FloatRange(0.1, 60.0), hidden=True, help="Seconds of each of its cycles.")
@click.option("--dry-run", is_flag=True, help="Print what would be offered, and offer nothing.")
@limit_options
@output_option
def command(
    url: str | None,
    simulate: str | None,
    api_key: str | None,
    ca_file: Path | None,
    insecure: bool,
    agent_dir: Path | None,
    force: bool,
    record: Path | None,
    soak: float | None,
    soak_cycle: float | None,
    dry_run: bool,
    reserved_gap_bytes: int,
    output: str,
) -> int:
    """Run four test steps against a vLLM server and say what is wrong with its memory.

    \b
    1 baseline         no requests: the pool must be empty, the device hold the server alone
    2 single request   one at a time, several times: every block must come back
    3 concurrent       ten of 2K tokens: growth must match their tokens
    4 long context     one of 16K tokens: growth must be linear

    Takes about a minute. The server should have no other traffic. With --soak a fifth follows: load and idle cycles in
    turns, for leaks that a minute cannot show.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    if (url is None) == (simulate is None):
        raise click.UsageError("give either --url URL or --simulate STORY")
    # What a supervisor sends is a Ctrl-C: requests are taken back, the trace is closed, a simulated server ended.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))  # noqa: ARG005 - its form
    with ExitStack() as stack:
        if simulate is not None:
            url = stack.enter_context(simulated(simulate))
        work = _run(
            url or "",
            api_key=api_key,
            ca_file=ca_file,
            insecure=insecure,
            agent_dir=agent_dir,
            force=force,
            record=record,
            soak=None if soak is None else partial(plan_soak, soak, cycle_seconds=soak_cycle),
            dry_run=dry_run,
        )
        result = _interruptible(work, record)
    if result is None:
        return 0
    diagnosis = diagnose(*result, limits_of(reserved_gap_bytes))
    print_diagnosis(diagnosis, output)
    return exit_code(diagnosis.worst)


def _interruptible(work: Coroutine[Any, Any, T], record: Path | None) -> T:
    """Run to the end, or until Ctrl-C: asyncio cancels the work, which gives up its requests and closes its trace."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt as error:
        kept = "" if record is None else f"; what was seen is in {record}"
        raise KvdiagError(f"interrupted: its own requests are cancelled, there is no verdict{kept}") from error


async def _run(
    url: str,
    *,
    api_key: str | None,
    ca_file: Path | None,
    insecure: bool,
    agent_dir: Path | None,
    force: bool,
    record: Path | None,
    soak: Callable[[Facts, Speed | None], SoakPlan] | None,
    dry_run: bool,
) -> tuple[Timeline, Facts] | None:
    async with connect(url, api_key=api_key, ca_file=ca_file, insecure=insecure, forced=force) as connection:
        if dry_run:
            _print_plan(connection.facts)
            if soak is not None:
                _print_soak(soak(connection.facts, None))
            return None
        with ExitStack() as stack:
            trace = None if record is None else stack.enter_context(TraceWriter(record, connection.facts))
            tell = stack.enter_context(show_progress())
            agents = agent_reader(agent_dir)
            if agents is not None:
                stack.callback(agents.close)
            return await _active(connection, agents, Recorder(trace), tell, soak), connection.facts


async def _active(
    connection: Connection,
    agents: Patient[AllocatorReading] | None,
    recorder: Recorder,
    tell: Callable[[Progress], None],
    soak: Callable[[Facts, Speed | None], SoakPlan] | None,
) -> Timeline:
    model = connection.facts.model
    if model is None:
        raise KvdiagError("the server does not name its model, so nothing can be asked of it")
    clock = Clock()
    requests = Requests(connection.client, model, await token_ids(connection.client, model))
    sampler = Sampler(
        vllm=connection.vllm,
        nvml=connection.nvml,
        agents=agents,
        facts=connection.facts,
        recorder=recorder,
        pace=Pace(),
        clock=clock,
        load=requests.load,
    )
    feed = ActiveFeed(
        steps=STEPS,
        facts=connection.facts,
        sampler=sampler,
        requests=requests,
        recorder=recorder,
        clock=clock,
        progress=tell,
        soak=None if soak is None else partial(soak, connection.facts),
    )
    return await feed.run()


def _print_plan(facts: Facts) -> None:
    for number, planned in enumerate(plan(STEPS, facts), start=1):
        load = planned.workload
        what = (
            f"{planned.cycles} x {load.requests} requests of {load.prompt_tokens:,} tokens, {load.max_tokens} generated"
            if load.requests
            else f"no requests for {load.hold_seconds:g} s"
        )
        click.echo(f"{number} {planned.step.id}: {what}")
        for note in planned.notes:
            click.echo(f"  {note}")


def _print_soak(soak: SoakPlan) -> None:
    loads = [one for one in soak.cycles if one.requests]
    new, repeated = [one for one in loads if not one.repeated], [one for one in loads if one.repeated]
    *doses, largest = sorted({one.requests for one in new})
    click.echo(
        f"{len(STEPS) + 1} {SOAK.id}: {len(new)} x {', '.join(map(str, doses))} or {largest} requests of "
        f"{new[0].prompt_tokens:,} tokens, {new[0].max_tokens} generated, "
        f"{len(repeated)} x {repeated[0].requests} that repeat their contents"
    )
    click.echo(
        f"  {len(soak.cycles) - len(loads)} idle cycles between them, {soak.cycle_seconds:.3g} s each, "
        f"{soak.seconds / 60:.3g} min; in all {soak.requests:,} requests, {soak.tokens:,} tokens"
    )
    for note in soak.notes:
        click.echo(f"  {note}")
