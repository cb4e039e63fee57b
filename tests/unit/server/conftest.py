"""What tests of the server share."""

from collections.abc import Iterator

import pytest

from tests.unit.outputs.test_metrics import snapshot
from tests.unit.server.shell import Shell, shell


@pytest.fixture
def serving() -> Iterator[Shell]:
    """A server that shows a leaking server."""
    with shell(snapshot()) as serving:
        yield serving
