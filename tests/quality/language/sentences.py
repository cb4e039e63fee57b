"""Print every sentence that a test expects, word for word, outside the golden files; exit 1 where there is one.

A sentence is a string literal of six words or more that stands in an assertion, in `containing`, `match=`, `named=`,
in a variable, or among the values of a parameter whose name `EXPECTATION` matches. Tests compare status, ids and
figures instead; wording is kept in tests/golden. Literals elsewhere are inputs: arguments of parsers, documents,
docstrings.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[2]
INPUTS = (TESTS / "golden", TESTS / "fixtures")
"""Wording as data."""

SENTENCE = re.compile(r"^(?=.*\w+ \w+ \w+)(?:.*?[A-Za-z][A-Za-z'-]*\b){6}", re.DOTALL)
EXPECTATION = re.compile(
    "expected|message|reason|summary|sentence|said|told|fix|detail|words|missing|complaint|problems?|error|notes?|kinds"
)


def main() -> int:
    """Look through every module of tests/."""
    found = 0
    for path in sorted(TESTS.rglob("*.py")):
        if not any(path.is_relative_to(one) for one in INPUTS):
            for line, text in sentences(path.read_text(encoding="utf-8")):
                found += 1
                sys.stdout.write(f"{path.relative_to(TESTS.parent)}:{line}: {text[:100]!r}\n")
    sys.stdout.write(f"{found} sentences: keep wording in tests/golden, assert ids and figures\n" if found else "")
    return 1 if found else 0


def sentences(source: str) -> list[tuple[int, str]]:
    """The expected sentences of a module, with their lines."""
    literals = [
        literal
        for expected in _expectations(ast.parse(source))
        for literal in ast.walk(expected)
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
    ]
    return sorted({(one.lineno, str(one.value)) for one in literals if SENTENCE.match(str(one.value))})


def _expectations(tree: ast.Module) -> Iterator[ast.expr]:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    tables = {ast.unparse(node).split(":")[0].split(" =")[0]: node.value for node in assigned if node.value}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.keyword) and node.arg in ("match", "named"):
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "containing":
            yield from node.args
        elif isinstance(node, ast.Assign):
            yield from [node.value] if EXPECTATION.fullmatch(ast.unparse(node.targets[0])) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize"):
            yield from _expected_values(node, tables)


def _expected_values(parametrize: ast.Call, tables: Mapping[str, ast.expr]) -> Iterator[ast.expr]:
    """Of a parametrisation, the values of the parameters that hold expectations."""
    names, given = parametrize.args[:2] if len(parametrize.args) > 1 else (ast.Tuple([]), ast.List([]))
    called = [one.value for one in ast.walk(names) if isinstance(one, ast.Constant)]
    rows = tables.get(ast.unparse(given), given)
    for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
        values = row.args if isinstance(row, ast.Call) else row.elts if isinstance(row, ast.Tuple) else [row]
        yield from (value for name, value in zip(called, values, strict=False) if EXPECTATION.fullmatch(str(name)))


if __name__ == "__main__":
    sys.exit(main())
