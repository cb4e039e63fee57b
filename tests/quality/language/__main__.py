"""Print every retired word in what users read, with what to write instead; exit 1 where there is one.

Read are the docstrings and comments of `kvdiag/` and `tests/`, the string literals of `kvdiag/` that are prose or a
title, its data files, the alerts, the boards, the manifests, and every document. The words stand in retired.txt.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
RETIRED = Path(__file__).with_name("retired.txt")
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "kvdiag/**/*.css",
    "kvdiag/**/*.json",
    *(f"{folder}/**/*.{kind}" for folder in ("alerts", "dashboards", "deploy") for kind in ("md", "json", "yaml")),
    "deploy/**/*.service",
    "deploy/Dockerfile",
    "Makefile",
    "mkdocs.yml",
)
PROSE = re.compile(r"[A-Za-z]+\W*\s+\W*[A-Za-z]+|^[A-Z][a-z]+$")
"""Two words, or a title of one."""

CODE = r"`[^`\n]*`|\]\([^)]*\)"
NOT_OURS = ("CONTRIBUTING.md", "wordings.json", "vllm_metrics.json")
"""The glossary has to name the words that it retires; the others repeat what engines and torch write."""


def main() -> int:
    """Look through everything; say where each retired word stands."""
    rules = [
        line.split(" -> ") for line in RETIRED.read_text(encoding="utf-8").splitlines() if line[:1] not in ("", "#")
    ]
    words = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in rules]
    found = 0
    for where, text, own in (*literals(), *documents()):
        for pattern, better in words:
            for match in (one for one in pattern.finditer(text) if one.start() < own):
                found += 1
                around = text[max(0, match.start() - 80) : match.end() + 80]
                sys.stdout.write(f"{where}: {match.group(0)!r}: {better}\n    {' '.join(around.split())}\n")
    sys.stdout.write(f"{found} retired words\n" if found else "")
    return 1 if found else 0


def literals() -> Iterator[tuple[str, str, int]]:
    """Prose in literals of the package, docstrings and comments: file and line, text, and how much is that place's."""
    for path in sorted((*(ROOT / "kvdiag").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))):
        ours = path.is_relative_to(ROOT / "kvdiag")
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in inside else None
            if text and (id(node) in docs or (ours and PROSE.search(text) and "\\" not in text)):
                text = re.sub(CODE, " ", text) if id(node) in docs else text
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text, len(text)  # type: ignore[attr-defined]
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield f"{path.relative_to(ROOT)}:{token.start[0]}", re.sub(CODE, " ", token.string), len(token.string)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "N" for part in node.values)
    return None


def documents() -> Iterator[tuple[str, str, int]]:
    """Every line of the documents and data files with the line after it, since phrases wrap; without code and links."""
    for path in sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}):
        if path.name in NOT_OURS:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            text = re.sub(
                r"^```.*?^```", lambda block: "\n" * block.group(0).count("\n"), text, flags=re.MULTILINE | re.DOTALL
            )
            text = re.sub(CODE, " ", text)
        lines = text.splitlines()
        for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1):
            yield f"{path.relative_to(ROOT)}:{number}", f"{line} {following.strip()}", len(line)


if __name__ == "__main__":
    sys.exit(main())
