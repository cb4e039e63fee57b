"""kvdiag shows where an LLM server's GPU memory goes, whether it is returned after load, and what to change."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdiag.agent.report import log_memory, memory_report

__all__ = ["__version__", "log_memory", "memory_report"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return one of the two functions for a server's own code, imported on first use: no command needs them."""
    if name in ("log_memory", "memory_report"):
        return getattr(importlib.import_module("kvdiag.agent.report"), name)
    raise AttributeError(f"module 'kvdiag' has no attribute {name!r}")
