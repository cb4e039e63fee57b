import contextlib
import gzip
import os
import threading
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.oom.message import ANCHORS, WARNINGS
from kvdiag.sources.log_file import LITERALS, read_long_log

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LINE = b"INFO Engine 000: Avg prompt throughput: 612.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs\n"
QUOTED = b"INFO Received request cmpl-1: prompt: 'CUDA out of memory. Tried to allocate 9.00 GiB'\n"


def filler(mebibytes: int) -> bytes:
    """Lines of statistics."""
    return LINE * (mebibytes * 2**20 // len(LINE))


def forms(pattern: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """What a parsed pattern can match, in lower case: blanks as one, other variable parts as a zero byte."""
    parts: list[list[str]] = []
    for operation, argument in pattern:
        if operation.name == "LITERAL":
            parts.append([chr(argument).lower()])
        elif operation.name == "BRANCH":
            parts.append([form for branch in argument[1] for form in forms(branch)])
        elif operation.name == "SUBPATTERN":
            parts.append(list(forms(argument[3])))
        elif operation.name == "IN":
            parts.append(sorted({chr(value).lower() if kind.name == "LITERAL" else "\0" for kind, value in argument}))
        elif operation.name.endswith("_REPEAT") and argument[0]:
            space = "CATEGORY_SPACE" in str(argument[2])
            parts.append([" "] if space else list(forms(argument[2])))
        elif not operation.name.startswith(("AT", "ASSERT")):
            parts.append(["\0"])
    return map("".join, product(*parts))


@pytest.mark.parametrize("pattern", [pattern.pattern for kind, pattern in ANCHORS if kind not in WARNINGS | {"host"}])
def test_every_failure_of_device_memory_is_looked_for_in_a_long_log(pattern: str) -> None:
    """Each form of a failure's pattern contains one of the words by which the middle of a log is searched."""
    parsed = import_module("re._parser").parse(pattern)
    missed = [form for form in forms(parsed) if not any(literal in form for literal in LITERALS)]
    assert not missed


@pytest.mark.parametrize("packed", [False, True])
def test_failure_in_the_middle_of_a_long_log_is_kept(tmp_path: Path, packed: bool) -> None:
    """The start, the failure wherever it is, and the end are kept; what is between them is not."""
    content = b"the start\n" + QUOTED + filler(12) + OOM + filler(12) + b"the end\n"
    path = tmp_path / "server.log"
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    kept, whole = read_long_log(path)
    assert not whole
    assert len(kept) < 12 * 2**20
    assert [True, True, True] == [part in kept for part in (b"the start\n", OOM, b"the end\n")]


def test_short_log_is_kept_whole(tmp_path: Path) -> None:
    """Nothing is added to it or taken from it."""
    content = filler(5) + OOM
    (tmp_path / "log").write_bytes(content)
    assert (content, True) == read_long_log(tmp_path / "log")


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """What another command writes is waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)

    def write() -> None:
        os.write(writer, OOM)
        os.close(writer)

    thread = threading.Timer(0.2, write)
    thread.start()

    actual = read_long_log(pipe)

    thread.join()
    os.close(reader)
    assert (OOM, True) == actual


def test_silent_pipe_is_given_up(tmp_path: Path) -> None:
    """A pipe whose writer stays silent times out with an error."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    with pytest.raises(KvdiagError, match="has sent nothing"):
        read_long_log(pipe, silent_seconds=0.1)
    os.close(held)


def test_pipe_that_drips_is_given_up(tmp_path: Path) -> None:
    """Its writer always has a little more, and never ends."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
            while not over.wait(0.01):
                file.write(b"INFO\n")

    writer = threading.Thread(target=drip, daemon=True)
    writer.start()
    try:
        with pytest.raises(KvdiagError, match="has not ended"):
            read_long_log(pipe, whole_seconds=0.2)
    finally:
        over.set()
        writer.join(10.0)
