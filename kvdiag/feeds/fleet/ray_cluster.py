"""Spreads pure work over the nodes of a Ray cluster, behind the same few methods as worker processes.

Ray runs in a driver process of its own, for these reasons: Ray ends its process if the cluster's head is lost, which a
daemon must survive; it takes signals and prints on its own; and it is not in memory between two uses. This process and
the driver exchange tasks and results through a pipe, and Ray alone decides what runs where.

In this order: the address is checked, and that something listens there, because Ray would try forever; the driver
connects, where Ray compares the versions of Ray and Python; one task asks a node for its version of kvdiag, because
nodes import kvdiag themselves; then tasks are passed on. What was in work on a node that is lost Ray does again on
another, some times. A driver that ends takes its tasks with it; a new one begins them again, once.
"""

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

import kvdiag
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.workers import begin_worker

R = TypeVar("R")

RETRIES = 3
"""How often Ray does a task again whose node or process was lost."""

ANSWER_SECONDS = 10.0
"""For the cluster's address to accept a connection."""

CONNECT_SECONDS = 60.0
"""For the driver to connect to the cluster and to hear from a node, which starts a process for it."""

COUNT_SECONDS = 5.0
"""Between two counts of the cluster's processors: nodes come and go."""

END_SECONDS = 10.0
"""For the driver to end its tasks."""

AUTO = "auto"
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}):([0-9]{1,5})", re.ASCII)


def check_ray(address: str) -> None:
    """Check that the address has a form that Ray accepts, and that Ray is installed, without importing it.

    Raises:
        KvdiagError: either is not so.
    """
    if address != AUTO and _ADDRESS.fullmatch(address) is None:
        # Without a cluster, other forms would start one, or need more of Ray on both sides.
        raise KvdiagError(f"--ray {address[:60]!r} is not a Ray cluster: give auto, or HOST:PORT such as ray-head:6379")
    if importlib.util.find_spec("ray") is None:
        raise KvdiagError("--ray needs an optional dependency: pip install 'kvdiag[ray]'")


class RayCluster:
    """A driver process that passes work to a Ray cluster; connected when it is made.

    Raises:
        KvdiagError: Ray is not installed, the cluster does not answer, or its nodes have other versions.
    """

    lost = (
        f"the Ray cluster lost the same work {RETRIES} times, twice: have its nodes too little memory? see `ray status`"
    )
    has_files = False

    def __init__(self, address: str) -> None:
        """Connect to `auto`, the cluster of this machine, or to HOST:PORT."""
        check_ray(address)
        self._address = address
        self._numbers = itertools.count()
        self._receiver: threading.Thread | None = None
        self._connect()

    @property
    def count(self) -> int:
        """The cluster's processors, counted a moment ago; while it has none, one waits for the first."""
        return max(self._processors, 1)

    def _connect(self) -> None:
        _require_listener(self._address)
        context = multiprocessing.get_context("spawn")
        self._pipe, drivers = context.Pipe()
        self._driver = context.Process(target=_drive, args=(self._address, drivers), daemon=True)
        self._driver.start()
        drivers.close()
        refusal: str | None = f"Ray at {self._address} did not answer within {CONNECT_SECONDS:g} s: check --ray"
        self._processors: int = 0
        try:
            if self._pipe.poll(CONNECT_SECONDS):
                self._processors, refusal = self._pipe.recv()
        except (EOFError, OSError):
            refusal = f"Ray's driver for {self._address} ended while it connected: see /tmp/ray/session_latest/logs"
        if refusal is not None:
            self._end()
            raise KvdiagError(refusal)
        self._waiting: dict[int, Future[Any]] = {}
        self._receiver = threading.Thread(target=self._receive, args=(self._pipe, self._waiting), daemon=True)
        self._receiver.start()

    def _receive(self, pipe: Connection, waiting: dict[int, Future[Any]]) -> None:
        """Give each result to the future that waits for it, until the driver ends."""
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    number, content = pipe.recv()
                    if number is None:
                        self._processors = content
                    else:
                        _resolve(waiting.pop(number), content)
        finally:
            while waiting:
                waiting.popitem()[1].set_exception(BrokenExecutor("Ray's driver ended"))

    def submit(self, work: Callable[..., R], /, *arguments: object) -> Future[R]:
        """Pass the work on; BrokenExecutor if the driver has ended."""
        future: Future[R] = Future()
        number = next(self._numbers)
        self._waiting[number] = future
        try:
            self._pipe.send((number, work, arguments))
        except OSError as error:
            self._waiting.pop(number, None)
            raise BrokenExecutor("Ray's driver ended") from error
        if self._receiver is not None and not self._receiver.is_alive() and self._waiting.pop(number, None) is not None:
            raise BrokenExecutor("Ray's driver ended")
        return future

    def restart(self) -> None:
        """Connect again."""
        self._end()
        self._connect()

    def kill(self) -> None:
        """Kill the driver; Ray ends its tasks."""
        self._driver.kill()

    def _end(self) -> None:
        # Closing the pipe would not do while it is read; a driver that does not read it is killed.
        with contextlib.suppress(OSError):
            if select.select([], [self._pipe], [], 0.0)[1]:
                self._pipe.send(None)
        self._driver.join(END_SECONDS)
        self._driver.kill()
        self._driver.join()
        if self._receiver is not None:
            self._receiver.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the driver; Ray ends its tasks."""
        self._end()


def _resolve(future: Future[Any], content: bytes) -> None:
    """Set a future's result or error, as the driver sent it; one that cannot be read is an error of its own."""
    try:
        result, error = pickle.loads(content)  # noqa: S301 - made by this process's driver
    except Exception as problem:  # noqa: BLE001 - the class of a result may raise any error when it is read
        result, error = None, problem
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _require_listener(address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        raise KvdiagError(f"cannot connect to Ray at {address} ({reason}): is the cluster up? check --ray") from error


def _drive(address: str, pipe: Connection) -> None:
    """Connect to Ray, say so, and pass on tasks until the other side sends the end, or has exited."""
    begin_worker()
    # Ray prints what its nodes do, and its logs have it too; what matters is passed back.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    import ray  # noqa: PLC0415 - only where a cluster is asked for

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        theirs = ray.get(ray.remote(num_cpus=0)(_version).remote())
        count = _processors(ray)
    except Exception as error:  # noqa: BLE001 - any error is an answer
        pipe.send((0, _refusal(address, error)))
        return
    if theirs != kvdiag.__version__:
        pipe.send(
            (0, f"the Ray cluster at {address} has kvdiag {theirs}, this is {kvdiag.__version__}: install the same")
        )
        return
    pipe.send((count, None))
    sending = threading.Lock()
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_work)
    counted = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if pipe.poll(COUNT_SECONDS):
                if (message := pipe.recv()) is None:
                    break
                number, work, arguments = message
                task.remote(work, *arguments).future().add_done_callback(partial(_pass_back, pipe, sending, number))
            if time.monotonic() - counted >= COUNT_SECONDS:
                counted = time.monotonic()
                _send(pipe, sending, (None, _processors(ray)))


def _processors(ray: Any) -> int:
    return int(ray.cluster_resources().get("CPU", 0))


def _version() -> str:
    """The version of kvdiag that a node has."""
    return kvdiag.__version__


def _work(work: Callable[..., R], *arguments: object) -> R:
    return work(*arguments)


def _refusal(address: str, error: Exception) -> str:
    """Why Ray cannot be used, and what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    versions = re.findall(r"Ray: (\S+) Python: (\S+)", text)
    if len(versions) == 2:  # noqa: PLR2004 - the cluster's, and this process's
        other, own = (f"Ray {ray} and Python {python}" for ray, python in versions)
        return f"the Ray cluster at {address} has {other}, this process {own}: run kvdiag with the cluster's image"
    if type(error).__name__.startswith("RayTaskError"):
        return (
            f"the nodes of the Ray cluster at {address} cannot import kvdiag {kvdiag.__version__} ({lines[-1][:200]}): "
            "install the same version on every node"
        )
    return f"cannot connect to Ray at {address} ({text[:300]}): is the cluster up? check --ray"


def _pass_back(pipe: Connection, sending: threading.Lock, number: int, done: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        _send(pipe, sending, (number, pickle.dumps((done.result(), None))))
        return
    cause = getattr(error, "cause", None)
    if cause is None:
        # Of Ray's own: the process or the node was lost too often, or had no memory.
        passed: BaseException = BrokenExecutor(f"{type(error).__name__}: {str(error)[:500]}")
    else:
        passed = cause
        if not isinstance(cause, KvdiagError):
            passed.add_note(str(error))
    try:
        pickle.loads(content := pickle.dumps((None, passed)))  # noqa: S301 - made in the line itself
    except Exception:  # noqa: BLE001 - an error that cannot be sent
        content = pickle.dumps((None, RuntimeError(str(error))))
    _send(pipe, sending, (number, content))


def _send(pipe: Connection, sending: threading.Lock, message: object) -> None:
    # The other side may have closed the pipe: it wants no more results.
    with sending, contextlib.suppress(OSError):
        pipe.send(message)
