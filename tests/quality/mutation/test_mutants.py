"""What the mutation benchmark changes, and how sure its share is."""

import ast

import pytest

from tests.quality.mutation.mutants import mutants, mutated
from tests.quality.mutation.mutation import interval

MODULE = '''"""Words that stay: 1 + 1."""
LIMIT: int = 3


def judged(value: float, *, most: int = LIMIT) -> str:
    """Words that stay."""
    if value < most and not value == 2:
        return f"{value + 1} of the words"
    return "fault"
'''


def test_each_mutant_is_one_change() -> None:
    """All differ from the module and from one another; words and annotations stay."""
    found = mutants("a.py", MODULE)
    texts = [ast.unparse(mutated(MODULE, mutant.place)) for mutant in found]
    assert len({ast.unparse(ast.parse(MODULE)), *texts}) == len(found) + 1
    assert all("Words that stay: 1 + 1." in text and "-> str" in text for text in texts)
    told = {mutant.says for mutant in found}
    assert {"Lt to LtE", "And to Or", "Eq to NotEq", "not dropped", "3 to 4", "'fault' to 'Xfault'"} <= told
    assert {range(0), range(6, 10)} == {mutant.lines for mutant in found}


def test_what_no_test_can_notice_is_not_changed() -> None:
    """Names that a type checker or an import reads, and the assertion that two lists are equally long."""
    module = """__all__ = ["judged"]
Status = Literal["ok", "fault"]
if TYPE_CHECKING:
    from a import b
both = zip(a, b, strict=True)
"""
    assert mutants("a.py", module) == ()


@pytest.mark.parametrize(("killed", "of", "expected"), [(0, 10, (0.0, 0.278)), (81, 263, (0.255, 0.366))])
def test_a_share_has_wilsons_interval(killed: int, of: int, expected: tuple[float, float]) -> None:
    """Worked examples of Newcombe 1998 (Statistics in Medicine 17: 857), method 3."""
    assert expected == pytest.approx(interval(killed, of), abs=0.0006)
