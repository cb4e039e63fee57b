"""What the documents at the top level say is there: the tests behind each promise, and the map of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROMISES = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`", PROMISES)
MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_test_behind_a_promise_exists(file: str, test: str) -> None:
    """A promise without its test would be words."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert test in functions


def test_every_promise_has_a_test() -> None:
    """Each row of the table names at least one."""
    table = PROMISES.split("| promise | tests |")[1].splitlines()[2:]
    rows = [line for line in table if line.startswith("|")]
    assert len(rows) >= 10
    assert [] == [row for row in rows if "::test_" not in row]


def test_the_map_has_every_part_of_the_code() -> None:
    """Packages and modules of `kvdiag/`, and the folders beside it: all on the map, and nothing that is not there."""
    package = ROOT / "kvdiag"
    parts = {path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    parts |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert parts == set(re.findall(r"^\| `kvdiag/([a-z_]+(?:\.py)?)/?` \|", MAP, flags=re.MULTILINE))
    for path in re.findall(r"`((?:kvdiag|tests|alerts|dashboards|deploy)/[A-Za-z0-9_./-]*)`", MAP):
        # A capital stands for what a reader puts there: the folder around it has to be there.
        known = re.split(r"[A-Z]", path)[0].rpartition("/")[0] if re.search(r"[A-Z]", path) else path
        assert (ROOT / known).exists(), path
