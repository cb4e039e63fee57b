"""kvdiag: where an LLM server's GPU memory is, whether it comes back, and what to change."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
