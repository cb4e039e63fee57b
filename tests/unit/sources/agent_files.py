"""Files in an agents' folder, as an agent leaves them, and one reading of such a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvdiag.model import Allocator
from kvdiag.sources import agents
from kvdiag.sources.agents import TorchAllocatorSource
from tests.unit.sources.publications import PUBLICATION, SELF

NAME = f"agent-{SELF['pid']}-{SELF['start_ticks']}.json"


def write(folder: Path, told: object = PUBLICATION, name: str = NAME) -> Path:
    """A file as the agent leaves it."""
    path = folder / name
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    path.chmod(0o640)
    return path


def read(folder: Path) -> tuple[tuple[Allocator, ...] | None, list[str]]:
    """One reading: the allocators with no age, and what each gap says."""
    found, gaps = TorchAllocatorSource(folder).read()
    assert all(each.age_seconds < agents.LEAST_STALE_SECONDS for each in found or ())
    young = None if found is None else tuple(replace(each, age_seconds=0.0) for each in found)
    return young, [f"{gap.kind}: {gap.reason}" for gap in gaps]
