"""The agents in the server's processes: whether they publish, lately, where kvdiag can read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdiag.checks.check import Check
from kvdiag.formatting import plural
from kvdiag.model import Allocator, Gap

OLD_SECONDS = 10.0
"""They publish once a second."""


def publications(folder: Path | None, allocators: Sequence[Allocator] | None, gaps: Sequence[Gap]) -> Check:
    """What the agents' folder holds."""
    if folder is None:
        found = "no --agent-dir: torch's own figures are not seen"
        return Check(id="agent.publications", outcome="skip", found=found)
    install = f"see `kvdiag agent install --help`, and start the server with its KVDIAG_AGENT_DIR={folder}"
    problem = "; ".join(gap.reason for gap in gaps)
    if allocators is not None and not allocators:
        fix = "look again once the model is loaded; an engine on the CPU holds nothing there"
        return Check(id="agent.publications", outcome="warn", found=f"agents publish; {problem}", fix=fix)
    if not allocators:
        return Check(id="agent.publications", outcome="fail", found=problem or "nothing is published", fix=install)
    oldest = max((one.age_seconds or 0.0 for one in allocators), default=0.0)
    found = f"{plural(len(allocators), 'allocator', 'allocators')}, the oldest figure {oldest:,.0f} s old"
    if problem:
        return Check(id="agent.publications", outcome="warn", found=f"{found}; {problem}", fix=install)
    if oldest > OLD_SECONDS:
        fix = "look whether that process hangs (py-spy dump): its agent publishes no more"
        return Check(id="agent.publications", outcome="warn", found=found, fix=fix)
    return Check(id="agent.publications", outcome="pass", found=found)


def permission(folder: Path | None, *, readable: bool, writable: bool) -> Check:
    """Whether kvdiag can read what the agents publish, and ask them to look at their blocks at once."""
    if folder is None:
        return Check(id="agent.permission", outcome="skip", found="no --agent-dir")
    if not readable:
        fix = "run kvdiag as the server's user or in the group of its files (fsGroup in a pod), and look at the path"
        return Check(id="agent.permission", outcome="fail", found=f"{folder} cannot be read here", fix=fix)
    if not writable:
        found = f"{folder} is read-only here: blocks are looked at once a minute, not when asked"
        fix = "mount it writable for kvdiag's user, if the split of reserved memory should be fresh"
        return Check(id="agent.permission", outcome="warn", found=found, fix=fix)
    return Check(id="agent.permission", outcome="pass", found=f"{folder} can be read and written")
