"""`kvdiag audit`: where every byte of GPU memory is, once."""

import asyncio
from pathlib import Path

import click

from kvdiag.commands.connect import agent_reader, connect, device_reader
from kvdiag.commands.options.common import ServerAccess, agent_option, output_option, request_ids_option, server_access
from kvdiag.commands.printing import print_json, print_text
from kvdiag.engines.engine import SOURCE as ENGINE
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live import sampling
from kvdiag.ledger import ledger
from kvdiag.model import Facts, Gap, Sample
from kvdiag.outputs.documents import diagnosis_document
from kvdiag.outputs.terminal import text
from kvdiag.sources.agents.agent_publication import devices_inside
from kvdiag.sources.agents.allocator_files import SOURCE as AGENTS
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

SPLIT_SECONDS = 2.0
"""An agent sees the request within a second, and publishes."""

SPLIT_POLL_SECONDS = 0.25


@click.command()
@click.option("--url", help="Server to read; without it only the GPUs are shown.")
@server_access
@agent_option
@request_ids_option
@output_option
def command(url: str | None, access: ServerAccess, agent_dir: Path | None, show_request_ids: bool, output: str) -> int:
    """Show where the memory is: driver, server, KV pool, weights, other processes, and unaccounted memory.

    The lines of a GPU add up to its used bytes. Each is marked as measured (NVML), reported (by the engine) or
    computed. Without a GPU only what the engine reports is shown.
    """
    facts, sample = asyncio.run(_look(url, access, agent_reader(agent_dir, show_request_ids=show_request_ids)))
    lines = ledger(sample, facts)
    if not lines:
        # The first gap is the reason; so is why the server has no pool, and what is wrong with an agents' directory.
        further = (gap for gap in (*facts.gaps, *sample.gaps[1:]) if gap.source in (ENGINE, AGENTS))
        reported = dict.fromkeys((*sample.gaps[:1], *further))
        reasons = "; ".join(gap.reason for gap in reported) or "neither a GPU nor a KV pool is visible"
        named = "" if url else "; name a server by --url to see its KV pool"
        raise KvdiagError(f"nothing to audit: {reasons}{named}")
    if output == "json":
        print_json(diagnosis_document.audit_document(facts, sample, lines, sample.gaps))
    else:
        print_text(
            text.render_audit(
                facts, sample.devices or (), lines, (*facts.gaps, *sample.gaps), sample.block_owners or ()
            )
        )
    return 0


async def _look(
    url: str | None, access: ServerAccess, agents: ThreadedReader[AgentReading] | None
) -> tuple[Facts, Sample]:
    allocators, agent_gaps, owners = AgentReading(None, ()) if agents is None else await _allocators(agents)
    facts, engines = Facts(), None
    engine_gaps: tuple[Gap, ...] = ()
    if url is None:
        devices, device_gaps = await _devices(device_reader(None, drill=False))
    else:
        async with connect(url, access) as (_, server):
            facts = server.facts
            engines, engine_gaps = await server.engine.read()
            devices, device_gaps = await _devices(server.nvml)
    if sampling.driver_absent(devices, device_gaps):
        devices = devices_inside(allocators)
    return facts, Sample(
        at_seconds=sampling.Clock().now_seconds(),
        engines=engines,
        devices=devices,
        allocators=allocators,
        block_owners=owners,
        gaps=(*engine_gaps, *device_gaps, *agent_gaps),
    )


async def _devices(nvml: ThreadedReader[DeviceReading]) -> DeviceReading:
    try:
        return await nvml.ask(sampling.DRIVER_SECONDS * 5, processes=True)
    except ReadTimeout as busy:
        return None, (Gap(source="nvml", kind="failed", reason=str(busy)),)


async def _allocators(agents: ThreadedReader[AgentReading]) -> AgentReading:
    """Return what the agents report, once they have broken down reserved memory or the time for that is over.

    The first read requests the breakdown; a request within ten seconds of another gets the previous one.
    """
    reading = await sampling.read_agents(agents, sampling.AGENT_SECONDS * 5)
    for _ in range(round(SPLIT_SECONDS / SPLIT_POLL_SECONDS)):
        if all(each.split and each.split.reserved_bytes == each.reserved_bytes for each in reading.allocators or ()):
            break
        await asyncio.sleep(SPLIT_POLL_SECONDS)
        reading = await sampling.read_agents(agents, sampling.AGENT_SECONDS * 5)
    return reading
