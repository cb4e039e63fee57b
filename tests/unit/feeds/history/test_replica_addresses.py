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


def series(address: str, values: list[float], *, first: float = 0.0, metric: str = COUNTER) -> Candidate:
    """One series of a pod that is scraped at this address."""
    return 0, metric, {"__name__": metric, "pod": "a", "instance": f"{address}:8000"}, points(values, first=first)


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
            series("10.0.0.1", [1, 2, 1], metric=GAUGE),
            series("10.0.0.2", [1, 2, 1], first=15.0, metric=GAUGE),
            BOTH,
            id="gauges at other times show nothing",
        ),
        pytest.param(
            series("10.0.0.1", [0, 20, 40]), series("10.0.0.2", [0, 20, 40], first=900.0), [], id="one after the other"
        ),
    ],
)
def test_counters_show_whether_two_addresses_are_one_server(
    one: Candidate, other: Candidate, several: list[str]
) -> None:
    """Those of one server continue from one address to the other."""
    addresses = Addresses()
    addresses.add([one, other])
    assert several == addresses.of_several_servers([])


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


def test_no_server_has_very_many_addresses() -> None:
    """They are not compared with each other: hundreds would take minutes."""
    addresses = Addresses()
    addresses.add([series(f"10.0.0.{number}", [0, 20, 40]) for number in range(99)])
    assert 99 == len(addresses.of_several_servers([]))
