"""What the documents show can be typed: commands parse, results are as printed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvdiag.commands import COMMANDS, cli, main

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("alerts/*.md"),
        *ROOT.glob("dashboards/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
    )
)
FIT = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def shown(document: Path) -> Iterator[str]:
    """The command lines of kvdiag in a document: in blocks of shell, and between backticks."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for line in re.findall(r"`([^`\n]*\bkvdiag [^`\n]*)`", text) if " " in line]
    for line in lines:
        for part in re.split(r"\s\|\s|&&|;", line.split(" #")[0]):
            found = re.search(r"(?:^|[/\s])(kvdiag\s+[a-z-].*)$", part.strip())
            if found and not found[1].endswith("..."):
                yield found[1]


COMMAND_LINES = sorted({(str(document), line) for document in DOCUMENTS for line in shown(document)})


def test_there_are_commands_to_look_at() -> None:
    """A pattern that finds nothing would find no mistake either."""
    assert len([line for document, line in COMMAND_LINES if document == "README.md"]) > 8
    assert len([line for document, line in COMMAND_LINES if document.startswith("docs/")]) > 30


@pytest.mark.parametrize(("document", "line"), COMMAND_LINES)
def test_a_command_line_can_be_typed(document: str, line: str) -> None:
    """Every command, option and value of it exists. Upper-case words stand for what a reader puts there."""
    words = shlex.split(re.sub(r"\[[A-Z]+\]", "", line))[1:]
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        return  # prose: "what `kvdiag top` shows" begins with a command, "next to kvdiag itself" does not
    values = {
        "DURATION": "12m",
        "GPU": "h100",
        "SCENARIO": "healthy",
        "DIR": "folder",
        "URL": "http://127.0.0.1:8000",
        "FILE": "file",
        "ID": "leak.host",
    }
    problem: click.UsageError | None = None
    try:
        _parse(cli, [values.get(word, word) for word in words])
    except click.UsageError as error:
        problem = error
    # Prose names a command or an option without what it takes.
    told = None if isinstance(problem, click.MissingParameter | click.BadOptionUsage) else problem
    assert told is None, f"{document}: {line}: {told.format_message()}"


def _parse(command: click.Command, words: list[str]) -> None:
    context = command.make_context("kvdiag", list(words), resilient_parsing=False, help_option_names=["-h", "--help"])
    if isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):  # noqa: SLF001 - where click keeps them
        _, inner, words = command.resolve_command(context, rest)
        if inner is not None:
            _parse(inner, words)


def test_the_plan_is_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer below `kvdiag fit` in docs/fit.md is what it prints."""
    command, told = re.findall(r"```sh\n(kvdiag fit llama_70b[^\n]*)\n```\n\n```\n(.*?)```", FIT, flags=re.DOTALL)[0]
    main(shlex.split(command)[1:])
    # What stands between its dots is there, in this order.
    printed, at = capsys.readouterr().out, 0
    for piece in re.split(r"^\s*\.\.\.\n", told, flags=re.MULTILINE):
        assert piece in printed[at:]
        at = printed.index(piece, at) + len(piece)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_targets_of_make_exist(document: Path) -> None:
    """Each that a document names is in the Makefile."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)`", text)) | set(re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE))
    assert set() == named - TARGETS


@pytest.mark.parametrize("document", ["README.md", *(str(path) for path in DOCUMENTS if path.parts[0] == "docs")])
def test_a_page_can_be_read_in_one_sitting(document: str) -> None:
    """At most 200 lines a page."""
    assert len((ROOT / document).read_text(encoding="utf-8").splitlines()) <= 200
