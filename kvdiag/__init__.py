"""kvdiag shows where an LLM server's GPU memory goes, whether it is returned after load, and what to change.

What `__all__` names is public; everything else may change with any version. Each is imported on first use: no command
needs them, and a server that imports the agent's two functions must not import the rest.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdiag.agent.report import log_memory, memory_report
    from kvdiag.api.fitting import Fit, fit
    from kvdiag.api.history import History, Picture, load, plot, read_prometheus
    from kvdiag.api.verdict import Diagnosis, diagnose
    from kvdiag.errors import KvdiagError

__all__ = [
    "Diagnosis",
    "Fit",
    "History",
    "KvdiagError",
    "Picture",
    "__version__",
    "diagnose",
    "fit",
    "load",
    "log_memory",
    "memory_report",
    "plot",
    "read_prometheus",
]

__version__ = "0.1.0"

_MODULES: Mapping[str, str] = {
    "Diagnosis": "api.verdict",
    "Fit": "api.fitting",
    "History": "api.history",
    "KvdiagError": "errors",
    "Picture": "api.history",
    "diagnose": "api.verdict",
    "fit": "api.fitting",
    "load": "api.history",
    "log_memory": "agent.report",
    "memory_report": "agent.report",
    "plot": "api.history",
    "read_prometheus": "api.history",
}


def __getattr__(name: str) -> Any:
    """Return a public name from its module, imported on first use."""
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module 'kvdiag' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvdiag.{module}"), name)


def __dir__() -> list[str]:
    """Return the public names, which completion in a notebook offers before their first use."""
    return [*__all__]
