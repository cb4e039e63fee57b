"""What can happen to the agents of a server: done for the length of a `with` block, which leaves no trace."""

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.integration.vllm.meddling import Meddling

Harm = Callable[[Meddling, Path], AbstractContextManager[None]]


@contextmanager
def gone(meddling: Meddling, folder: Path) -> Iterator[None]:
    """The folder and its files are removed, and removed again at the end in case it was recreated."""
    _remove(folder)
    try:
        yield
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    # Moved first: what is published while a folder is emptied would keep it from being removed.
    removed = folder.with_name("removed")
    try:
        folder.rename(removed)
    except FileNotFoundError:
        return
    shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def read_only(meddling: Meddling, folder: Path) -> Iterator[None]:
    """The folder is on a file system that takes no file from anybody, root included."""
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("/sys")
    try:
        yield
    finally:
        folder.unlink()
        folder.with_name("moved").rename(folder)


@contextmanager
def full(meddling: Meddling, folder: Path) -> Iterator[None]:
    """No vLLM process can extend a file: as on a full disk, writes are short."""
    limited = [*meddling.server.pids("VLLM::Worker"), *meddling.server.pids("VLLM::EngineCore")]
    usual = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY)) for pid in limited]
    try:
        yield
    finally:
        for pid, limits in zip(limited, usual, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def torch_broken(meddling: Meddling, folder: Path) -> Iterator[None]:
    """What the agent calls of torch is taken out of it."""
    meddling.tell("break_torch")
    try:
        yield
    finally:
        meddling.tell("mend_torch")


@contextmanager
def stuck(meddling: Meddling, folder: Path) -> Iterator[None]:
    """The agents' threads block, as in a driver call that hangs."""
    meddling.tell("hold_agent")
    try:
        yield
    finally:
        meddling.tell("free_agent")


HARMS: tuple[Harm, ...] = (gone, read_only, full, torch_broken, stuck)
