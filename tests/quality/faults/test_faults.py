"""Every source of the daemon broken in every way, side by side on one daemon; `make soak` plays them for a day."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.hostile import eventually
from tests.fixtures.require import require
from tests.quality.faults.cells import CELLS, COLUMNS, NO_SUCH_THING, SHOWN, Cell, is_well, play
from tests.quality.faults.stage import Stage
from tests.stand_ins.nvml.stand_in import compiler

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.nvml_stand_in]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], str]]:
    """What went otherwise than promised in each cell."""
    require(compiler() is not None, "a C compiler (cc)")
    found: dict[tuple[str, str], str] = {}
    with Stage(tmp_path_factory.mktemp("faults")) as stage, ThreadPoolExecutor(len(COLUMNS)) as pool:
        assert eventually(lambda: all(is_well(stage, source) for source in SHOWN))

        def column(sources: tuple[str, ...]) -> None:
            for cell in CELLS:
                if cell.source in sources:
                    found[cell.source, cell.condition] = play(stage, cell)

        list(pool.map(column, COLUMNS))
        yield found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.source} {cell.condition}")
def test_what_is_lost_is_named_and_heals(outcomes: dict[tuple[str, str], str], cell: Cell) -> None:
    """Named as a gap, down, not shown, not healthy; nobody else is held up; back by itself."""
    assert "" == outcomes[cell.source, cell.condition]


def test_the_matrix_is_whole() -> None:
    """Every source in every condition is played, or cannot be, for a reason."""
    conditions = ("absent", "slow", "hanging", "garbage", "flapping")
    played = {(cell.source, cell.condition) for cell in CELLS}
    whole = {(source, condition) for source in SHOWN for condition in conditions}
    assert whole <= played | NO_SUCH_THING.keys()
    assert set() == played & NO_SUCH_THING.keys()
