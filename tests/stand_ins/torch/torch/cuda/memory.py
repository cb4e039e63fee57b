"""The part of torch.cuda.memory that records who allocated what."""

from __future__ import annotations

from ..world import WORLD  # noqa: TID252 - as in the package


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = 2**31,
) -> None:
    """Record the stack of each block that is allocated from now on; with `None`, no longer."""
    WORLD.history = enabled is not None
