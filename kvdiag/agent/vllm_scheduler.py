"""Finds vLLM's scheduler in this process: its constructor is wrapped once, and nothing that runs later.

The class is wrapped as soon as its module has been imported, which only an engine core does for its own use. A
scheduler that is made is kept as a weak reference. Walking all objects of the interpreter instead takes a second of a
server that works. Schedulers of other classes that do not derive from vLLM's stay unknown.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import weakref
from typing import Any

MODULE = "vllm.v1.core.sched.scheduler"
_MARK = "_kvdiag_notes"
_made: list[Any] = []
"""A weak reference to the newest scheduler; empty before one is made."""


def watch() -> None:
    """Note every scheduler that this process makes from now on. Never raises."""
    with contextlib.suppress(Exception):
        if not wrap(sys.modules.get(MODULE)) and not any(isinstance(one, _Finder) for one in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def newest() -> Any | None:
    """The newest scheduler of this process that still exists."""
    return _made[0]() if _made else None


def forget() -> None:
    """Forget the scheduler: a forked process has a copy that never works."""
    _made.clear()


def wrap(module: Any) -> bool:
    """Wrap the constructor of the class in vLLM's module, unless it is; returns whether it is."""
    scheduler = getattr(module, "Scheduler", None)
    if scheduler is None:
        return False
    construct = scheduler.__init__
    if not hasattr(construct, _MARK):

        @functools.wraps(construct)
        def noted(self: Any, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            with contextlib.suppress(Exception):
                _made[:] = [weakref.ref(self)]

        setattr(noted, _MARK, True)
        scheduler.__init__ = noted
    return True


class _Finder:
    """Waits for the import of one module, and wraps what it defines.

    It stays in the list of finders: an import that walks the list, in any thread, would skip the one after it.
    """

    def __init__(self) -> None:
        """Wait."""
        self._done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Python's own spec of the module, whose execution ends in `wrap`; `None` for every other module."""
        if name != MODULE or self._done:
            return None
        self._done = True
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    wrap(module)

            with contextlib.suppress(Exception):
                loader.exec_module = executed  # type: ignore[method-assign]
        return spec
