"""Several servers that answer at one address, and one server that restarts."""

import asyncio
from itertools import cycle

import pytest

from kvdiag.commands.connect import Finder
from kvdiag.commands.options.common import ServerAccess
from kvdiag.engines.engine import EngineReading
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.alternation import IN_TURN, WINDOW_SECONDS, Alternation, UncountedLoads, answer_in_turn
from kvdiag.model import Capabilities, Engine, Gap, Load, Sample
from tests.fixtures.hostile import Hostile, Peer, reply

ANOTHER_ENGINE: EngineReading = (None, (Gap("engine", "absent", "no such metrics"),))
DOWN: EngineReading = (None, (Gap("engine", "failed", "cannot connect"),))


def tokens(count: int | None, engine: str = "0") -> EngineReading:
    """An engine with this counter."""
    return (Engine(engine=engine, prompt_tokens_total=count),), ()


def refused(readings: list[EngineReading], every_seconds: float = 1.0) -> list[bool]:
    """Whether each of them is refused, in turn."""
    alternation = Alternation()
    checked = [alternation.check(one, number * every_seconds) for number, one in enumerate(readings)]
    return [any(gap.kind == "refused" for gap in gaps) for _, gaps in checked]


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param([tokens(1000), tokens(10)] * 4, id="two servers in turn"),
        pytest.param([tokens(1000 + n if at == "A" else n) for n, at in enumerate("AABABBBABABBA")], id="at random"),
        pytest.param([tokens(1000), ANOTHER_ENGINE] * 4, id="two engines"),
        pytest.param([tokens(None), ANOTHER_ENGINE] * 4, id="two engines without counters"),
        pytest.param([tokens(9, "a"), tokens(7, "a"), tokens(9, "a")] * 4, id="a difference of two tokens"),
    ],
)
def test_several_servers_are_refused_after_two_changes(readings: list[EngineReading]) -> None:
    """The third return of a server within a minute is none that a restart makes."""
    found = refused(readings)
    assert not any(found[:5])
    assert found[-1]


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param([tokens(n) for n in range(99)], id="no restart"),
        pytest.param([tokens(1000), DOWN, tokens(0), tokens(500), tokens(1500)], id="a restart"),
        pytest.param([tokens(1000), DOWN, ANOTHER_ENGINE, tokens(0), tokens(2000)], id="a restart without metrics"),
        pytest.param([tokens(n % 5) for n in range(99)], id="restarts that count up to the same"),
        pytest.param([tokens(900), *([DOWN, tokens(0)] * 9)], id="a server that dies again and again"),
        pytest.param([tokens(5), DOWN] * 20, id="a network that fails"),
        pytest.param([ANOTHER_ENGINE] * 20, id="another engine alone"),
        pytest.param([tokens(None)] * 20, id="no counter"),
        pytest.param([tokens(3, "0"), tokens(1, "1")] * 9, id="ranks that are missing by turns"),
    ],
)
def test_one_server_is_not_refused(readings: list[EngineReading]) -> None:
    """Counters that fall once belong to a restart."""
    assert not any(refused(readings))


def test_changes_are_forgotten_after_a_minute() -> None:
    """Restarts far apart are restarts."""
    assert not any(refused([tokens(1000), tokens(10)] * 9, every_seconds=WINDOW_SECONDS / 2))


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        pytest.param(((900, 64), (900, 64)), False, id="one server"),
        pytest.param(((900, 64), (990, 64)), True, id="counters that fall"),
        pytest.param(((900, 64), (900, 32)), True, id="another pool"),
    ],
)
def test_reads_that_contradict_each_other_show_several_servers(
    pages: tuple[tuple[int, int], ...], *, found: bool
) -> None:
    """A single frame is too short for what changes within a minute."""
    answers = cycle(
        reply(
            f'vllm:prompt_tokens_total{{engine="0"}} {count}\n'
            f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{blocks}"}} 1\n'
        )
        for count, blocks in pages
    )

    def metrics(peer: Peer) -> None:
        next(answers)(peer)

    async def look() -> bool:
        finder = Finder(server.url, ServerAccess(), own_port=0)
        try:
            return await answer_in_turn((await finder.find()).engine)
        except KvdiagError as error:
            return IN_TURN in str(error)
        finally:
            await finder.close()

    models = reply('{"data": [{"id": "m", "owned_by": "vllm"}]}', content_type="application/json")
    with Hostile({"/metrics/": metrics, "/v1/models": models}) as server:
        assert found is asyncio.run(look())


def under_load(counts: str, capabilities: Capabilities, *, tokens_each: int = 100, running: int = 1) -> bool:
    """Whether samples are refused in the end: `1` counts the requests of a load, `0` none, a space lies between two.

    `-` counts them before any has a token, `2` counts one of two, `=` one of two before any has a token.

    A sample is taken every 0.1 s, and each request has generated so many tokens more by then.
    """
    loads, tokens, refused = UncountedLoads(), 0, False
    for number, count in enumerate(counts):
        tokens = 0 if count == " " else tokens + tokens_each
        requests = 2 if count in "2=" else running
        resident = (tokens,) * requests if count in "012" else ()
        load = Load(requests=0 if count == " " else requests, resident_tokens=resident)
        engine = Engine(engine="0", requests_running=running if count in "1-2=" else 0, requests_waiting=0)
        sample = Sample(at_seconds=number / 10, engines=(engine,), load=load, load_before=load)
        refused = loads.check(sample, capabilities).engines is None
    return refused


PROMPT = Capabilities()


@pytest.mark.parametrize(
    ("counts", "capabilities", "found"),
    [
        pytest.param("1111 1111 1111 1111 ", PROMPT, False, id="one server"),
        pytest.param("1110 1110 1110 1110 ", PROMPT, False, id="the end of each load is read late"),
        pytest.param("0111 0011 0111 0011 ", PROMPT, False, id="a gauge that begins late"),
        pytest.param("0 0 0 0 0 0 ", PROMPT, False, id="a single sample of each load"),
        pytest.param("0000 " * 9, PROMPT, False, id="loads that a fast server ends before their tokens are read"),
        pytest.param("--000000 " * 9, PROMPT, False, id="such loads that are sampled before their first token"),
        pytest.param("1111 000000 1111 1111 ", PROMPT, False, id="an uncounted load"),
        pytest.param("112121 " * 4, PROMPT, False, id="ends of several streams that are read late"),
        pytest.param("1010 1110 ", PROMPT, False, id="counted again once"),
        pytest.param("1010 1011 1010 ", PROMPT, True, id="counted now and then"),
        pytest.param("0011 " * 4, PROMPT, True, id="counted long after its first tokens"),
        pytest.param("=222222 " * 2, PROMPT, True, id="half of each load"),
        pytest.param(("1" * 12 + "01") * 20, PROMPT, False, id="ends of streams that are read late for hours"),
        pytest.param("000000 1111 000000 1111 ", PROMPT, True, id="every other load uncounted"),
        pytest.param("1010101010 ", Capabilities(late_seconds=30.0), False, id="gauges that may be old"),
        pytest.param("0000 " * 9, Capabilities(late_seconds=30.0), False, id="loads shorter than a gauge's delay"),
        pytest.param(("0" * 320 + " ") * 2, Capabilities(late_seconds=30.0), True, id="loads longer than its delay"),
        pytest.param("0000 " * 9, Capabilities(late_tokens=400), False, id="fewer tokens than a gauge lags behind"),
        pytest.param(("0" * 9 + " ") * 2, Capabilities(late_tokens=400), True, id="as many tokens"),
        pytest.param("0000 " * 9, Capabilities(on_completion=True), False, id="gauges that move at the end"),
    ],
)
def test_loads_that_a_server_does_not_count_are_of_several(
    counts: str, capabilities: Capabilities, *, found: bool
) -> None:
    """Requests generate tokens while the server whose metrics are read runs none, in more than one load."""
    assert found is under_load(counts, capabilities)
