"""One server that is scraped at two addresses, and two servers under one name."""

from array import array

import pytest

from kvdiag.feeds.history.replica_addresses import Addresses, Candidate
from kvdiag.feeds.history.series_labels import LabelMap
from kvdiag.sources.prometheus_answers import Points

COUNTER, GAUGE = "vllm:prompt_tokens_total", "vllm:num_requests_running"
START = "process_start_time_seconds"


def points(values: list[float], *, first: float = 0.0) -> Points:
    """A sample every 30 seconds."""
    return Points(times=array("d", [first + 30.0 * at for at in range(len(values))]), values=array("d", values))


def series(
    address: str, values: list[float], *, first: float = 0.0, metric: str = COUNTER, port: int = 8000
) -> Candidate:
    """One series of a pod that is scraped at this address."""
    return 0, metric, {"__name__": metric, "pod": "a", "instance": f"{address}:{port}"}, points(values, first=first)


def started(address: str, seconds: float) -> tuple[LabelMap, Points]:
    """When the process at an address began."""
    return {"__name__": START, "instance": f"{address}:8000"}, points([seconds])


BOTH = ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("one", "other", "several"),
    [
        pytest.param(series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [0, 20, 40]), [], id="same times"),
        pytest.param(series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [0, 21, 40]), BOTH, id="another value"),
        pytest.param(series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [10, 30, 50], first=15.0), [], id="in turn"),
        pytest.param(
            series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [5, 15, 25], first=15.0), BOTH, id="two counters"
        ),
        pytest.param(
            series("10.0.0.1", [20, 40, 0, 20]), series("10.0.0.2", [30, 50, 10, 30], first=15.0), [], id="a restart"
        ),
        pytest.param(
            series("10.0.0.1", [0, 20, 40]),
            series("10.0.0.1", [5, 15, 25], first=15.0, port=8001),
            ["10.0.0.1:8000", "10.0.0.1:8001"],
            id="two ports",
        ),
        pytest.param(
            series("10.0.0.1", [0, 20, 40]),
            series("10.0.0.1", [10, 30, 50], first=15.0, port=8001),
            [],
            id="two ports of one server",
        ),
        pytest.param(
            series("10.0.0.1", [1, 2, 1], metric=GAUGE),
            series("10.0.0.1", [1, 3, 1], metric=GAUGE, port=8001),
            ["10.0.0.1:8000", "10.0.0.1:8001"],
            id="gauges of two ports",
        ),
        pytest.param(
            series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [0, 20, 40], first=900.0), [], id="one after the other"
        ),
    ],
)
def test_figures_show_whether_two_addresses_are_one_server(
    one: Candidate, other: Candidate, several: list[str]
) -> None:
    """Those of one server continue from one address to the other."""
    addresses = Addresses()
    addresses.add([one, other])
    assert several == addresses.of_several_servers([])


PORTS = ["10.0.0.1:8000", "10.0.0.1:8001"]


@pytest.mark.parametrize(
    ("hosts", "ports", "later", "unclear"),
    [
        pytest.param(BOTH, (8000, 8000), 15.0, BOTH, id="hosts"),
        pytest.param(BOTH[:1] * 2, (8000, 8001), 15.0, PORTS, id="ports"),
        pytest.param(BOTH[:1] * 2, (8000, 8000), 15.0, [], id="two jobs"),
        pytest.param(BOTH[:1] * 2, (8000, 8001), 900.0, [], id="ports one after the other"),
    ],
)
def test_gauges_at_other_times_show_nothing(
    hosts: list[str], ports: tuple[int, int], later: float, unclear: list[str]
) -> None:
    """Neither that the addresses are of one server, nor of two: an autoscaler's job keeps no counters."""
    addresses = Addresses()
    addresses.add(
        [
            series(host, [1, 2, 1], first=first, metric=GAUGE, port=port)
            for host, port, first in zip(hosts, ports, (0.0, later), strict=True)
        ]
    )
    assert ([], unclear) == (addresses.of_several_servers([]), addresses.unclear)


@pytest.mark.parametrize(("apart", "several"), [(1.0, []), (60.0, BOTH)])
def test_processes_that_started_apart_are_of_two_servers(apart: float, several: list[str]) -> None:
    """Two servers that have never worked have the same figures."""
    addresses = Addresses()
    addresses.add([series(address, [0, 0, 0], first=600.0) for address in BOTH])
    assert several == addresses.of_several_servers([started("10.0.0.1", 500.0), started("10.0.0.2", 500.0 + apart)])


def test_an_address_that_is_no_longer_scraped_shows_no_start_of_another_server() -> None:
    """Its job was removed, and the server has restarted since."""
    addresses = Addresses()
    addresses.add([series("10.0.0.1", [0, 20, 40, 60, 0, 20]), series("10.0.0.2", [0, 20, 40])])
    assert [] == addresses.of_several_servers([started("10.0.0.1", 110.0), started("10.0.0.2", -500.0)])


def test_each_address_is_compared_with_each() -> None:
    """One in between, of which nothing is known at the same times, does not hide two servers."""
    first, second, third = (f"10.0.0.{number}" for number in (1, 2, 3))
    addresses = Addresses()
    addresses.add(
        [
            series(first, [0, 20, 40, 60]),
            series(second, [10, 30], first=15.0),
            series(third, [5, 15, 25], first=40.0),
        ]
    )
    assert {first, third} <= set(addresses.of_several_servers([]))


MANY = [f"10.0.0.{number}" for number in range(10, 50)]


def rising(number: int) -> float:
    """The counter of a server at each second; it restarts twice."""
    return float(number * 7 % 6000)


def in_turn(seconds: int = 1800) -> list[Candidate]:
    """One server that many jobs scrape, each at another time, and of which the last began later and ended sooner."""
    found: list[Candidate] = []
    for place, address in enumerate(MANY):
        times = range(place % 29, seconds, 30)[place // 4 : len(MANY) + 20 - place // 4]
        made = Points(times=array("d", map(float, times)), values=array("d", map(rising, times)))
        found.append((0, COUNTER, {"__name__": COUNTER, "pod": "a", "instance": f"{address}:8000"}, made))
    return found


def test_a_server_with_very_many_addresses_is_one() -> None:
    """However many jobs find it, each at times of its own."""
    addresses = Addresses()
    addresses.add(in_turn())
    assert [] == addresses.of_several_servers([(labels, points([50.0])) for _, _, labels, _ in in_turn()])
    assert MANY == addresses.names


@pytest.mark.parametrize("value", [3.0, 9e6])
def test_another_server_among_very_many_addresses_is_found(value: float) -> None:
    """Its counter is far below that of the others, or above."""
    addresses = Addresses()
    addresses.add([*in_turn(), series("10.0.0.99", [value] * 20, first=11.5)])
    assert "10.0.0.99" in addresses.of_several_servers([])


def test_another_start_among_very_many_addresses_is_another_server() -> None:
    """All are idle."""
    addresses = Addresses()
    addresses.add([series(address, [0.0] * 20, first=600.0) for address in MANY])
    starts = [started(address, 500.0) for address in MANY[1:]]
    assert [] == addresses.of_several_servers(starts)
    assert MANY[0] in addresses.of_several_servers([*starts, started(MANY[0], 400.0)])


def test_a_thousand_addresses_of_different_servers_are_compared_at_once() -> None:
    """As where a rule gives all servers one name: there would be half a million pairs."""
    addresses = Addresses()
    many = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    for _ in range(8):
        addresses.add([series(address, [10.0 * place] * 5) for place, address in enumerate(many)])
    assert many == sorted(addresses.of_several_servers([]), key=many.index)
    assert len(many) == len(addresses.names)
