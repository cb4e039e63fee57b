"""What `/api/v1/profile` of a daemon does: the profile of `kvdiag agent profile`, as its document.

Imported only where profiles are allowed: a daemon that takes none does not pay for it.
"""

from pathlib import Path
from typing import Any

from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.feeds.live.profiling import chosen_processes, profile_processes
from kvdiag.outputs.documents.profile_document import profile_document
from kvdiag.sources.agents.agent_profiles import ProfileFolder


async def take(agent_dir: Path, kind: str, seconds: float, role: str | None) -> dict[str, Any]:
    """The profile's document.

    Raises:
        KvdiagError: no process can be profiled.
    """
    folder = ProfileFolder(agent_dir)
    try:
        processes = chosen_processes(folder, agent_dir, role)
        found = await profile_processes(folder, processes, "host" if kind == "host" else "device", seconds)
    finally:
        folder.close()
    profiles = [conclude(one.profile) for one in found if one.profile is not None]
    return profile_document(profiles, [one.problem for one in found if one.problem is not None])
