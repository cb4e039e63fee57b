"""The facts gathered of a server at the start, and hosts that do not report them."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import closing

import httpx2
import pytest

from kvdiag.engines.vllm import ENGINE
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.server_facts import gather_facts, limited_caches, read_facts
from kvdiag.model import Facts
from kvdiag.sources.host import NO_ENVIRONMENT
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.values import GIB
from tests.fixtures.hostile import LONG_SECONDS, Answer, Hostile, Peer, reply
from tests.unit.commands.bad_input.refusals import SERVER


def gathered(
    read: Callable[[], ThreadedReader[Facts]] = lambda: ThreadedReader(read_facts, "host"),
    *,
    host_seconds: float = LONG_SECONDS,
    answers: Mapping[str, Answer] = SERVER,
) -> Facts:
    """The facts of a server that answers so, whose host is read so."""

    async def work(url: str) -> Facts:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            with closing(read()) as reader:
                facts, _ = await gather_facts(ENGINE.open(HttpReader(client)), url, reader, host_seconds=host_seconds)
                return facts

    with Hostile(answers) as server:
        return asyncio.run(work(server.url))


def test_the_server_and_its_host_are_told_together() -> None:
    """Version and model come from the server, its processes from the host: here the one that listens."""
    facts = gathered()
    assert ("0.32.0", "tiny", 20_000) == (facts.engine_version, facts.model, facts.max_model_len_tokens)
    assert facts.server_pids


@pytest.mark.parametrize(
    ("commands", "limits"),
    [
        (None, None),
        ([""], None),
        ([f"{NO_ENVIRONMENT} llama-server -m x"], None),
        (["llama-server -m x", ""], None),
        (["llama-server -m x"], []),
        (["llama-server -m x --cache-ram 4096", ""], [4 * GIB]),
    ],
)
def test_caches_without_a_limit_are_known_by_whole_command_lines(
    commands: list[str] | None, limits: list[int] | None
) -> None:
    """A command line or an environment that another user's process hides may limit the cache: no default is taken."""
    found = limited_caches((), commands)
    assert limits == (None if found is None else [one.limit_bytes for one in found])


def test_a_host_that_hangs_is_an_error_and_no_wait() -> None:
    """A process or a volume that does not answer is reported as an error, and its thread is abandoned."""
    release = threading.Event()

    def hang(**_: object) -> Facts:
        release.wait(LONG_SECONDS)
        return Facts()

    try:
        with pytest.raises(KvdiagError, match="timed out after"):
            gathered(lambda: ThreadedReader(hang, "host"), host_seconds=0.05)
    finally:
        release.set()


def test_a_server_that_stops_meanwhile_is_no_server() -> None:
    """Its processes exit while they are read: half of what a host shows is not taken for all of it."""
    stopped = threading.Event()

    def exit_meanwhile(**_: object) -> Facts:
        stopped.set()
        return Facts()

    def metrics(peer: Peer) -> None:
        (reply("", status=503) if stopped.is_set() else SERVER["/metrics/"])(peer)

    with pytest.raises(KvdiagError, match="stopped answering"):
        gathered(lambda: ThreadedReader(exit_meanwhile, "host"), answers={**SERVER, "/metrics/": metrics})
