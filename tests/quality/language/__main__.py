"""Print every retired word in what users read, with what to write instead; exit 1 where there is one.

Read are the string literals of `kvdiag/` that are prose (three words and more, docstrings left out unless click shows
them as help), the texts of alerts and boards, and every document. The words stand in retired.txt.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
RETIRED = Path(__file__).with_name("retired.txt")
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "alerts/**/*.md",
    "alerts/*.yaml",
    "dashboards/*.md",
    "deploy/**/*.md",
    "kvdiag/**/knowledge.json",
)
PROSE = re.compile(r"[A-Za-z]+(?:\W+[A-Za-z]+){2}")
OWN_GLOSSARY = "CONTRIBUTING.md"
"""It has to name the words that it retires."""


def main() -> int:
    """Look through everything; say where each retired word stands."""
    rules = [
        line.split(" -> ") for line in RETIRED.read_text(encoding="utf-8").splitlines() if line[:1] not in ("", "#")
    ]
    words = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in rules]
    found = 0
    for where, text in (*literals(), *documents()):
        for pattern, better in words:
            if match := pattern.search(text):
                found += 1
                sys.stdout.write(f"{where}: {match.group(0)!r}: {better}\n    {' '.join(text.split())[:160]}\n")
    sys.stdout.write(f"{found} retired words\n" if found else "")
    return 1 if found else 0


def literals() -> Iterator[tuple[str, str]]:
    """The prose among the string literals of the package, with file and line."""
    for path in sorted((ROOT / "kvdiag").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)} - set(_helps(tree))
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in inside else None
            if text and id(node) not in silent and PROSE.search(text) and "\\" not in text:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text  # type: ignore[attr-defined]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "N" for part in node.values)
    return None


def _helps(tree: ast.AST) -> Iterator[int]:
    """The docstrings that click prints as the help of a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list):
            first = node.body[0]
            if isinstance(first, ast.Expr):
                yield id(first.value)


def documents() -> Iterator[tuple[str, str]]:
    """Every line of prose in the documents and alerts, without code blocks, links' targets and inline code."""
    for path in sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}):
        if path.name == OWN_GLOSSARY:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            text = re.sub(
                r"^```.*?^```", lambda block: "\n" * block.group(0).count("\n"), text, flags=re.MULTILINE | re.DOTALL
            )
            text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", text)
        for number, line in enumerate(text.splitlines(), 1):
            if path.suffix in (".md", ".json") or re.match(r"\s*(summary|description):|\s+[A-Z{]", line):
                yield f"{path.relative_to(ROOT)}:{number}", line


if __name__ == "__main__":
    sys.exit(main())
