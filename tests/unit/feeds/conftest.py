"""What tests of the feeds share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdiag.sim import SCENARIOS, Drill


@pytest.fixture(scope="module")
def drill() -> Iterator[str]:
    """The address of a healthy drill, for tests that leave nothing behind."""
    with Drill(SCENARIOS["healthy"]) as serving:
        yield serving.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files of many examples."""
    return tmp_path_factory.mktemp("traces")
