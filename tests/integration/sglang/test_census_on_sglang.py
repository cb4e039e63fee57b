"""Who holds SGLang 0.5.23's KV pages, counted by the agent inside its scheduler while requests run."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import BlockOwners, Capabilities, Facts, KvPool, LastHolder, Sample, Status, Timeline
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.fixtures.hostile import eventually
from tests.integration.sglang.servers import Nursery, Server
from tests.integration.vllm.cli import kvdiag

pytestmark = pytest.mark.long

POOL_TOKENS = 8192
FORGOTTEN_TOKENS = 48
ABORTS = 3


class Counts:
    """The counts of one server; every one has owners that add up to the pool, or the reader refuses it."""

    def __init__(self, server: Server, published: Path) -> None:
        """Of this server's scheduler."""
        self.server = server
        self._source = TorchAllocatorSource(published, show_request_ids=True)
        self.all: list[BlockOwners] = []
        self.gaps: tuple[str, ...] = ()

    def until(self, enough: Callable[[BlockOwners], bool]) -> BlockOwners:
        """The first count that is enough."""

        def reached() -> bool:
            found = self._source.read()
            self.gaps = tuple(gap.reason for gap in found.gaps)
            self.all += [one for one in found.block_owners or () if one.pid in self.server.pids()]
            return bool(self.all) and enough(self.all[-1])

        assert eventually(reached), (self.all[-1:], self.gaps)
        return self.all[-1]

    def later(self, counts: int) -> BlockOwners:
        """The count after so many more."""
        start = self.until(lambda one: one.counts > 0)
        return self.until(lambda one: one.counts >= start.counts + counts)


@contextmanager
def load(server: Server, clients: int = 4) -> Iterator[None]:
    """Clients that send one request after another: prefixes that are hit, and prompts of several chunks.

    Not too short ones: of many that end at once not all are listed.
    """
    over = threading.Event()

    def send(client: int) -> None:
        number = 0
        while not over.is_set():
            server.complete((150, 40, 600, 333)[number % 4], 40, first=30 * client + 200 * (number % 3))
            number += 1

    threads = [threading.Thread(target=send, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def started(
    nursery: Nursery, agent: Mapping[str, str], name: str, page: int, *args: str, env: Mapping[str, str]
) -> Iterator[Counts]:
    """A server of a small pool."""
    pool = ("--max-total-tokens", str(POOL_TOKENS), "--page-size", str(page))
    with nursery.start(name, *pool, "--chunked-prefill-size", "256", *args, env=env) as server:
        yield Counts(server, Path(agent["KVDIAG_AGENT_DIR"]))


def aborted(count: BlockOwners) -> list[LastHolder]:
    """The last holders that were aborted."""
    return [one for one in count.last_holders if one.end == "aborted"]


def verdict(count: BlockOwners, page: int) -> Status:
    """The verdict of leak.kv_blocks by this count alone."""
    pages = POOL_TOKENS // page
    pool = KvPool(engine="0", block_tokens=page, total_blocks=pages, usable_blocks=pages, usage_blocks=pages)
    facts = Facts(pools=(pool,), capabilities=Capabilities(unit="page"))
    findings = diagnose(Timeline(samples=(Sample(at_seconds=1.0, block_owners=(count,)),)), facts).findings
    (found,) = [one for one in findings if one.id == "leak.kv_blocks"]
    return found.status


@pytest.mark.parametrize("page", [1, 16])
def test_pages_lost_at_aborts_are_orphans_under_load(nursery: Nursery, agent: dict[str, str], page: int) -> None:
    """To the page, while requests run that never pause, with each aborted request among those that ended with it."""
    env = {
        "KVDIAG_TEST_PLUGIN": "forget_aborted",
        "KVDIAG_TEST_FORGOTTEN_TOKENS": str(FORGOTTEN_TOKENS),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    }
    with started(nursery, agent, f"census-{page}", page, env=env) as counts, load(counts.server):
        closed = counts.until(lambda one: one.running_blocks > 0 and one.closed_counts >= DEFAULT_LIMITS.census_counts)
        for number in range(ABORTS):
            # Long enough to be noted while it runs.
            counts.server.leave(100 + number, first=7 * number, after_events=120)
        lost = ABORTS * FORGOTTEN_TOKENS // page
        counts.until(lambda one: one.orphaned_blocks >= lost)
        # Holders are known once their pages are the same in as many counts, which others that end do not delay.
        leaks = counts.until(lambda one: len(aborted(one)) == ABORTS)
    assert (0, lost) == (closed.orphaned_blocks, leaks.orphaned_blocks)
    assert ("ok", "fault") == (verdict(closed, page), verdict(leaks, page))
    assert {100, 101, 102} == {one.prompt_tokens for one in aborted(leaks)}
    assert POOL_TOKENS // page == leaks.usable_blocks


def test_odd_but_healthy_load_has_no_orphan(nursery: Nursery, agent: dict[str, str]) -> None:
    """Hits, chunks of prompts, aborts, a session, retraction and an idle pause: every page has an owner."""
    with started(nursery, agent, "census-odd", 16, "--enable-streaming-session", env={}) as counts:
        with load(counts.server):
            for number in range(6):
                counts.server.leave(200 + number, first=11 * number)
                counts.later(2)
        # Their tokens do not fit, which the scheduler does not foresee.
        with ThreadPoolExecutor(16) as clients:
            ended = [clients.submit(counts.server.complete, 100, 700, first=40 * number) for number in range(16)]
            counts.later(5)
            assert all(one.result() for one in ended)
        session = counts.server.post("/open_session", capacity_of_str_len=1000, streaming=True)
        generate = {"input_ids": [*range(300, 400)], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        counts.server.post("/generate", **generate, session_params={"id": session})
        counts.until(lambda one: one.session_blocks > 0)
        with load(counts.server):
            counts.later(5)
        counts.server.post("/close_session", session_id=session)
        counts.until(lambda one: one.session_blocks == 0)
        counts.server.post("/flush_cache")
        last = counts.until(lambda one: one.free_blocks == one.usable_blocks)
    assert "Retract requests" in counts.server.log.read_text(errors="replace")
    assert {0} == {one.orphaned_blocks for one in counts.all}
    assert any(one.cached_protected_blocks for one in counts.all)
    assert "ok" == verdict(last, 16)


def test_server_that_its_own_check_ends_names_the_request(nursery: Nursery, agent: dict[str, str]) -> None:
    """The black box of the dying scheduler has the lost pages and the request that lost them, with its id if asked."""
    env = {"KVDIAG_TEST_PLUGIN": "forget_aborted", "KVDIAG_TEST_FORGOTTEN_TOKENS": "7"}
    with started(nursery, agent, "census-dies", 1, "--log-requests", env=env) as counts:
        counts.later(3)
        counts.server.complete(50, 10)
        counts.server.leave(120, after_events=20)
        assert eventually(lambda: not counts.server.pids("scheduler"))
        log, folder = counts.server.log, agent["KVDIAG_AGENT_DIR"]
        (pid,) = {one.pid for one in counts.all}
        (box,) = Path(folder).glob(f"oom-{pid}-*.json")
        both = kvdiag("diagnose", "--postmortem", "--log", str(log), "--black-box", str(box), "--output", "json")
        alone = kvdiag("diagnose", "--postmortem", str(box), "--show-request-ids", "--output", "json")
        without = kvdiag("diagnose", "--postmortem", str(log), "--output", "json")
    holders = []
    for read in (both, alone):
        finding = read.finding("leak.kv_blocks")
        assert (read.code, finding["status"]) == (2, "fault")
        values = [one["value"] for one in finding["evidence"] if one["name"] == "last_holder"]
        holders += [one for one in values if ", aborted" in one]
        (lost,) = [one["value"] for one in finding["evidence"] if one["name"] == "orphaned_block_ids"]
        assert 7 == len(set(lost.split(", "))), lost
    assert 2 == len(holders), holders
    hashed, holder = holders
    assert hashed.partition(": ")[2] == holder.partition(": ")[2]
    assert ": 7 blocks, 120 + " in holder
    assert holder.partition(":")[0] in log.read_text(errors="replace")
    assert (2, "fault") == (without.code, without.finding("leak.kv_blocks")["status"])
    values = [one["value"] for one in without.finding("leak.kv_blocks")["evidence"] if one["name"] == "last_request"]
    assert f"{hashed.partition(':')[0]}: no end in the log" in values
