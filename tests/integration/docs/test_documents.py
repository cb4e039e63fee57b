"""What the documents say is there: linked files and headings, the tests behind each promise, the map of the code."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "alerts", "dashboards", "deploy", "kvdiag", "tests")
PROMISES = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`", PROMISES)
MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]


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
    """The map lists exactly the packages and modules of `kvdiag/`, and every other path on it exists."""
    package = ROOT / "kvdiag"
    parts = {path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    parts |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert parts == set(re.findall(r"^\| `kvdiag/([a-z_]+(?:\.py)?)/?` \|", MAP, flags=re.MULTILINE))
    for path in re.findall(r"`((?:kvdiag|tests|alerts|dashboards|deploy)/[A-Za-z0-9_./-]*)`", MAP):
        # A capital stands for what a reader puts there: the folder around it has to be there.
        known = re.split(r"[A-Z]", path)[0].rpartition("/")[0] if re.search(r"[A-Z]", path) else path
        assert (ROOT / known).exists(), path


def test_both_tables_of_engines_agree() -> None:
    """README's marks are the words of docs/engines.md, engine by capability; every word but `works` has a note."""
    marks = {"works": "✓", "partly": "◐", "impossible": "✗"}
    text = (ROOT / "docs" / "engines.md").read_text().partition("## How far each is supported")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    words = [[re.match(r"\w+", cell)[0] for cell in row[1:]] for row in rows]  # type: ignore[index]
    shown = (ROOT / "README.md").read_text().partition("## Engines")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ")[1:] for line in shown.splitlines() if line.startswith("| ")][1:]
    assert lines == [[marks[word] for word in column] for column in zip(*words, strict=True)]
    notes = set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))
    cells = [cell for row in rows for cell in row[1:]]
    assert {note for cell in cells for note in re.findall(r"\d+", cell)} == notes
    assert all(re.search(r"\d", cell) for cell in cells if not cell.startswith("works"))


@pytest.mark.parametrize("page", ["README.md", "docs/verdicts.md"])
def test_every_verdict_has_a_row(page: str) -> None:
    """The tables name all verdicts, and none that does not exist."""
    rows = re.findall(r"^\| (`[a-z]+\.[^|]*)\|", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(KNOWLEDGE) == {verdict for row in rows for verdict in re.findall(r"`([a-z_.]+)`", row)}


@pytest.mark.parametrize("package", ["kvdiag", "tests"])
def test_every_module_has_a_name_of_its_own(package: str) -> None:
    """A name alone says which file is meant, but for the names that Python and pytest give; every engine's files have
    the names of their parts.
    """
    found = {(path.name, path.parent.parent.name == "engines" or path) for path in (ROOT / package).rglob("*.py")}
    names = Counter(name for name, _ in found)
    for given in ("__init__.py", "__main__.py", "conftest.py"):
        names.pop(given, None)
    assert [] == [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    """A heading's anchor is as GitHub makes it."""
    for file, anchor in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)#?([^)\s]*)\)", document.read_text(encoding="utf-8")):
        target = document.parent / file if file else document
        assert target.exists(), file
        if anchor:
            text = re.sub(r"^```.*?^```", "", target.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
            headings = re.findall(r"^#+ (.+)$", text.lower(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
