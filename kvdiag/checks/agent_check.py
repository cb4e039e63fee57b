"""Check the agents in the server's processes: whether they publish, recently, where kvdiag can read."""

from collections.abc import Sequence
from pathlib import Path

from kvdiag.checks.check import Check
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Allocator, Gap

OLD_SECONDS = 10.0
"""They publish once a second."""


def publications(folder: Path, allocators: Sequence[Allocator] | None, gaps: Sequence[Gap]) -> Check:
    """Check the publications in the agents' directory."""
    install = f"run `kvdiag agent install` and start the server with KVDIAG_AGENT_DIR={folder}"
    problem = "; ".join(gap.reason for gap in gaps)
    if allocators is not None and not allocators:
        fix = "check again once the model is loaded; a CPU engine has no GPU allocator"
        return Check("agent.publications", "warn", f"agents publish, but none reports an allocator; {problem}", fix)
    if not allocators:
        return Check("agent.publications", "fail", problem or "no agent publishes", install)
    oldest = max((one.age_seconds or 0.0 for one in allocators), default=0.0)
    found = f"{plural(len(allocators), 'allocator', 'allocators')}, oldest publication {format_duration(oldest)} ago"
    if problem:
        return Check("agent.publications", "warn", f"{found}; {problem}", install)
    if oldest > OLD_SECONDS:
        fix = "check whether that process hangs (py-spy dump): its agent has stopped publishing"
        return Check("agent.publications", "warn", found, fix)
    return Check("agent.publications", "pass", found)


def permission(folder: Path, *, readable: bool, writable: bool) -> Check:
    """Check whether kvdiag can read what the agents publish, and request a breakdown from them."""
    if not readable:
        fix = "run kvdiag as the server's user or group (fsGroup in a pod), and check the path"
        return Check("agent.permission", "fail", f"{folder} is not readable", fix)
    if not writable:
        found = f"{folder} is read-only: agents break down reserved memory once a minute, not on request"
        fix = "mount it writable for kvdiag's user to get that breakdown on request"
        return Check("agent.permission", "warn", found, fix)
    return Check("agent.permission", "pass", f"{folder} is readable and writable")
