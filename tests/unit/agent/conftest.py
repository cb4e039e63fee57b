"""What the tests of the agent share."""

from pathlib import Path

import pytest

from tests.unit.agent.subject import installed


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent as it is installed."""
    return installed(tmp_path_factory.mktemp("agent"))
