"""Starts the agent in torch servers without vLLM's plugins: Python imports the first `sitecustomize` on its path.

Installed in a separate folder from `kvdiag_agent`, so that it is used only by those who put it on the path.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys


def _begin() -> None:
    if os.environ.get("KVDIAG_AGENT_DIR"):
        importlib.import_module("kvdiag_agent").register()


def _run_the_next() -> None:
    """Run the `sitecustomize` that this one hides: distributions and coverage tools have theirs."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs every Python its import
    others = [path for path in sys.path if os.path.abspath(path) != here]  # noqa: PTH100 - as above
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _begin()
except Exception as error:  # noqa: BLE001 - the server matters more than its diagnosis
    with contextlib.suppress(Exception):
        sys.stderr.write(f"kvdiag agent does not start: {type(error).__name__}: {str(error)[:200]}\n")
_run_the_next()
