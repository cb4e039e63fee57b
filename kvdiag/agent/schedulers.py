"""Finds the engine's scheduler in this process: its constructor is wrapped once, and nothing that runs later.

The class is wrapped as soon as its module has been imported, which only an engine core does for its own use. A
scheduler that is made is kept as a weak reference. Walking all objects of the interpreter instead takes a second of a
server that works. Schedulers of other classes that do not derive from the engine's stay unknown.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import threading
import weakref
from typing import Any

_MARK = "_kvdiag_notes"


class Schedulers:
    """The newest object of class `Scheduler` in one module that this process makes, from `watch` on."""

    def __init__(self, module: str) -> None:
        """Watch nothing yet."""
        self.module = module
        self.thread = 0
        """Identifier of the thread that made the newest one, which runs SGLang's event loop."""
        self._made: list[Any] = []

    def watch(self) -> None:
        """Note every scheduler that this process makes from now on. Never raises."""
        with contextlib.suppress(Exception):
            waits = any(isinstance(one, _Finder) and one.schedulers is self for one in sys.meta_path)
            if not self.wrap(sys.modules.get(self.module)) and not waits:
                sys.meta_path.insert(0, _Finder(self))

    def newest(self) -> Any | None:
        """The newest scheduler of this process that still exists."""
        return self._made[0]() if self._made else None

    def forget(self) -> None:
        """Forget the scheduler: a forked process has a copy that never works."""
        self._made.clear()

    def wrap(self, module: Any) -> bool:
        """Wrap the constructor of the class in the engine's module, unless it is; returns whether it is."""
        scheduler = getattr(module, "Scheduler", None)
        if scheduler is None:
            return False
        construct = scheduler.__init__
        if not hasattr(construct, _MARK):

            @functools.wraps(construct)
            def noted(made: Any, *args: Any, **kwargs: Any) -> None:
                construct(made, *args, **kwargs)
                with contextlib.suppress(Exception):
                    self._made[:] = [weakref.ref(made)]
                    self.thread = threading.get_ident()

            setattr(noted, _MARK, True)
            scheduler.__init__ = noted
        return True


class _Finder:
    """Waits for the import of one module, and wraps what it defines.

    It stays in the list of finders: an import that walks the list, in any thread, would skip the one after it.
    """

    def __init__(self, schedulers: Schedulers) -> None:
        """Wait."""
        self.schedulers = schedulers
        self._done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Python's own spec of the module, whose execution ends in `wrap`; `None` for every other module."""
        if name != self.schedulers.module or self._done:
            return None
        self._done = True
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    self.schedulers.wrap(module)

            with contextlib.suppress(Exception):
                loader.exec_module = executed  # type: ignore[method-assign]
        return spec


VLLM = Schedulers("vllm.v1.core.sched.scheduler")
SGLANG = Schedulers("sglang.srt.managers.scheduler")
