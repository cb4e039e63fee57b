"""The boards as they are drawn for README: every panel of them has something to show."""

from html import escape

import pytest

from dashboards.generate import BOARDS
from tests.integration.dashboards.boards import Prometheus, board, drawn, panels

pytestmark = pytest.mark.xdist_group("boards")


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_is_drawn_with_data(ask: Prometheus, name: str) -> None:
    """With all replicas chosen, and collapsed rows open, no panel says that it has no data."""
    every = list(panels(board(name)))
    text = drawn(name, ask, rows_open=True)
    assert [] == [one["title"] for one in every if f">{escape(one['title'])}<" not in text]
    assert len(every) == text.count('class="panel"')
    assert 0 == text.count('class="none')
