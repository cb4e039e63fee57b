"""What tests of the sources share: NVIDIA's library as a compiled stand-in, and a process that reads it."""

from collections.abc import Iterator

import pytest

from tests.fixtures.require import require
from tests.stand_ins.nvml.nvml_client import Client
from tests.stand_ins.nvml.stand_in import StandIn, State, build, compiler


@pytest.fixture(scope="session")
def nvml_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StandIn, Client]]:
    """The stand-in, and a process with a source that sees it; started once, since that is what takes the time."""
    require(compiler() is not None, "a C compiler (cc)")
    folder = tmp_path_factory.mktemp("nvml")
    stand_in = StandIn(build(folder), folder / "state")
    with Client(stand_in.environment()) as client:
        yield stand_in, client


@pytest.fixture
def stand_in(nvml_session: tuple[StandIn, Client]) -> StandIn:
    """The stand-in, in the state that the test sets."""
    return nvml_session[0]


@pytest.fixture
def client(nvml_session: tuple[StandIn, Client]) -> Client:
    """A new source that sees the stand-in."""
    stand_in, client = nvml_session
    stand_in.show(State())
    client.renew()
    return client
