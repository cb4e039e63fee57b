"""What `kvdiag run --soak --profile` does after the cycles: it profiles the process that grew, under the same load."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import click

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.soak_plan import PAIR_SECONDS
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.live.profiling import MAX_PROFILED, Profiled, profile_processes
from kvdiag.model import Finding, MemoryProfile, ProfileKind, Timeline
from kvdiag.sources.agents.agent_profiles import ProfileFolder

PROFILED: Mapping[str, ProfileKind] = {"leak.host": "host", "leak.device_torch": "device"}
"""The leaks whose lines of code can be traced, and by what."""

PROFILE_CYCLES = 5.0
"""Length of a profile in cycles of the soak: a minute by default, which holds several of its largest load."""


def profiling(
    server: FoundServer, agent_dir: Path, cycle_seconds: float | None, limits: Limits
) -> Callable[[Timeline], Awaitable[tuple[MemoryProfile, ...]] | None]:
    """Return what profiles the process whose memory a soak saw grow; all of the server's where it is not known."""

    def begin(timeline: Timeline) -> Awaitable[tuple[MemoryProfile, ...]] | None:
        findings = diagnose(timeline, server.facts, limits).findings
        # Growth that a short soak leaves undecided is what its lines of code decide.
        leaks = [one for one in findings if one.status in ("fault", "suspect") or one.is_unexplained]
        grown = [one for one in leaks if one.id in PROFILED]
        return profiles(grown[0]) if grown else None

    async def profiles(finding: Finding) -> tuple[MemoryProfile, ...]:
        folder = None
        try:
            folder = ProfileFolder(agent_dir)
            processes = folder.processes()
            pid = (finding.holder or "").rpartition(" ")[2]
            own = [one for one in processes if str(one.pid) == pid] or processes
            seconds = PROFILE_CYCLES * (cycle_seconds or PAIR_SECONDS / 2)
            made = await profile_processes(
                folder, own[:MAX_PROFILED], PROFILED[finding.id], seconds, client=server.engine
            )
            if len(own) > MAX_PROFILED:
                click.echo(f"only {MAX_PROFILED} of {len(own)} processes were profiled", err=True)
        except KvdiagError as error:
            made = (Profiled(process="", problem=str(error)),)
        finally:
            if folder is not None:
                folder.close()
        for one in made:
            if one.problem is not None:
                click.echo(one.problem, err=True)
        return tuple(one.profile for one in made if one.profile is not None)

    return begin
