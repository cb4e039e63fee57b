"""Every source of the daemon broken in every way, side by side on one daemon; `make soak` plays them for a day."""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.hostile import eventually
from tests.fixtures.require import require
from tests.quality.faults.cells import CELLS, COLUMNS, NO_SUCH_THING, SHOWN, Cell, is_well, play
from tests.quality.faults.daemon_stage import Stage
from tests.quality.faults.mishaps import jump, kill
from tests.stand_ins.nvml.stand_in import compiler

JUMPS = (3600, -7200)

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
        drawn = random.Random(1)  # noqa: S311  a draw, no secret
        for seconds in JUMPS:
            found["jump", str(seconds)] = jump(stage, (), drawn, Counter(), seconds)
            found["kill", str(seconds)] = kill(stage, (), drawn, Counter(), damages=seconds > 0, seconds=seconds)
        yield found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.source} {cell.condition}")
def test_what_is_lost_is_named_and_heals(outcomes: dict[tuple[str, str], str], cell: Cell) -> None:
    """A failed source is a gap and down, hides its figures, delays no other source, and recovers by itself."""
    assert "" == outcomes[cell.source, cell.condition]


@pytest.mark.parametrize("mishap", ["jump", "kill"])
@pytest.mark.parametrize("seconds", JUMPS)
def test_a_jump_of_the_clock_and_a_kill_lose_nothing(
    outcomes: dict[tuple[str, str], str], mishap: str, seconds: int
) -> None:
    """The clock is set while it runs, or while it is down and a segment was damaged, too."""
    assert "" == outcomes[mishap, str(seconds)]


def test_the_matrix_is_whole() -> None:
    """Every source in every condition is played, or cannot be, for a reason."""
    conditions = ("absent", "slow", "hanging", "garbage", "flapping")
    played = {(cell.source, cell.condition) for cell in CELLS}
    whole = {(source, condition) for source in SHOWN for condition in conditions}
    assert whole <= played | NO_SUCH_THING.keys()
    assert set() == played & NO_SUCH_THING.keys()
