"""A drill for each test that asks for one, and its client."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvdiag.sim import SCENARIOS, Drill, RemoteNvml
from tests.unit.sim.client import Client

OF_VLLM = {name: scenario for name, scenario in SCENARIOS.items() if scenario.engine == "vllm"}

Serve = Callable[[str], tuple[Client, RemoteNvml]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a scenario; its client and its NVML."""
    with ExitStack() as drills:

        def start(scenario: str) -> tuple[Client, RemoteNvml]:
            url = drills.enter_context(Drill(SCENARIOS[scenario])).url
            return Client(url), RemoteNvml(url)

        yield start


@pytest.fixture(scope="session")
def shared() -> Iterator[str]:
    """Address of one healthy server for all tests that leave nothing behind."""
    with Drill(SCENARIOS["healthy"]) as drill:
        yield drill.url


@pytest.fixture
def visitor(shared: str) -> Client:
    """A client of the server that others look at too."""
    return Client(shared)


@pytest.fixture
def client(serve: Serve) -> Client:
    """A client of the healthy scenario."""
    return serve("healthy")[0]
