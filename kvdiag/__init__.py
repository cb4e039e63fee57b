"""kvdiag: where an LLM server's GPU memory is, whether it comes back, and what to change."""

from __future__ import annotations

from kvdiag.agent.report import log_memory, memory_report

__all__ = ["__version__", "log_memory", "memory_report"]

__version__ = "0.1.0"
