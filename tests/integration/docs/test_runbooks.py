"""The runbooks say what the tool can be asked and what it answers."""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import click
import pytest

from kvdiag.commands import cli
from kvdiag.diagnosis.fleet import fleet_verdicts
from kvdiag.diagnosis.growth import soak_memory
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.postmortem import RULES as POSTMORTEM_RULES
from kvdiag.diagnosis.postmortem import case
from kvdiag.diagnosis.rules import RULES
from tests.integration.alerts.rules import alerts

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "alerts" / "runbooks"
SECTIONS = ("What it means", "What kvdiag reports", "Confirm", "Stop the bleeding", "Fix", "Lookalikes")
OTHERS = "Other engines"
LONGEST_LINES, LONGEST_OF_OTHERS = 55, 12


ALERTS = (
    "alert.device_memory",
    "alert.fleet_stale",
    "alert.kvdiag_down",
    "alert.memory_pressure",
    "alert.oom",
    "alert.prefill_chunk",
    "alert.prefix_cache",
    "alert.server_down",
    "alert.source_down",
    "alert.speculative_decoding",
)
"""Runbooks of alerts that stand on no verdict."""

ALL = (*KNOWLEDGE, *ALERTS)


def runbook(title: str) -> str:
    """The text of a verdict's runbook, or of an alert's that has no verdict."""
    return (FOLDER / f"{title}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under one heading."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def parse(arguments: Sequence[str]) -> None:
    """Parse a command line of kvdiag without running it; an error where the command or an option does not exist."""
    name, *rest = arguments
    with click.Context(cli, **cli.context_settings) as context:
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            command = command.get_command(context, rest.pop(0))
    assert command is not None, name
    with command.make_context(name, rest, parent=context) as parsed:
        assert not parsed.args


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every quoted kvdiag command line, in a block or in a sentence; where a shell would end it."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", text)
    spans = re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))
    for line in (*"\n".join(blocks).replace("\\\n", " ").splitlines(), *spans):
        if re.search(r"(^|\s)kvdiag\s", line) and "kvdiag" in (words := shlex.split(line, comments=True)):
            arguments = words[words.index("kvdiag") + 1 :]
            end = next((at for at, word in enumerate(arguments) if word in {"|", "&", "&&", ";", ">"}), None)
            yield arguments[:end]


def evidence_names() -> dict[str, set[str]]:
    """Every name a rule gives its evidence, by the verdicts of its module (names made at run time are left out)."""
    names: dict[str, set[str]] = {}
    for rule in (*POSTMORTEM_RULES, *RULES):
        module = sys.modules[rule.__module__]
        for verdict in vars(module).values():
            if isinstance(verdict, str) and verdict in KNOWLEDGE:
                names[verdict] = names_given(module)
    return names


def names_given(module: ModuleType) -> set[str]:
    """Every name that a module gives its evidence."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Evidence"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def test_folder_holds_one_runbook_for_each_verdict_and_alert_and_no_other() -> None:
    """Every verdict has a runbook and every alert without one, and there is none for what does not exist."""
    asked = {rule["annotations"]["runbook_url"] for rule in alerts()}
    assert {f"{title}.md" for title in ALERTS} == {url.rpartition("/")[2] for url in asked if "/alert." in url}
    assert {path.name for path in FOLDER.iterdir()} == {f"{title}.md" for title in ALL} | {"README.md"}
    assert all((ROOT / entry.runbook).parent == FOLDER for entry in KNOWLEDGE.values())


def test_index_links_every_runbook() -> None:
    """The index has a link to each runbook, and no link that leads nowhere."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([^)]+)\)", index)) == {f"{title}.md" for title in ALL}


@pytest.mark.parametrize("verdict", ALL)
def test_runbook_can_be_read_at_night(verdict: str) -> None:
    """It begins with its verdict, its sections are all there in order, a command confirms it, and it is short."""
    text = runbook(verdict)
    assert text.startswith(f"# {verdict}: ")
    sections = (*SECTIONS, OTHERS) if verdict in KNOWLEDGE else SECTIONS
    assert tuple(re.findall(r"(?m)^## (.+)$", text)) == sections
    assert all(section(text, title).strip() for title in sections)
    assert any(commands(section(text, "Confirm")))
    assert len(text.partition(f"\n## {OTHERS}")[0].splitlines()) <= LONGEST_LINES
    assert len(section(text, OTHERS).splitlines()) <= LONGEST_OF_OTHERS


@pytest.mark.parametrize("verdict", ALL)
def test_quoted_kvdiag_commands_are_understood(verdict: str) -> None:
    """Every kvdiag command line in a runbook names a command that exists and options that it has."""
    for arguments in commands(runbook(verdict)):
        parse(arguments)


@pytest.mark.parametrize("verdict", KNOWLEDGE)
def test_every_evidence_name_is_explained(verdict: str) -> None:
    """What a verdict can show as evidence is explained where its runbook says how to read it."""
    explained = set(re.findall(r"`([a-z_]+)`", section(runbook(verdict), "What kvdiag reports")))
    assert evidence_names()[verdict] <= explained


@pytest.mark.parametrize(
    ("module", "heading"),
    [
        (soak_memory, "## Figures of a soak"),
        (case, "## Figures of a post-mortem"),
        (fleet_verdicts, "## Figures of a fleet"),
    ],
    ids=["soak", "post-mortem", "fleet"],
)
def test_every_shared_figure_is_explained(module: ModuleType, heading: str) -> None:
    """Leaks that a soak calls share one list of evidence, as do verdicts on a crash and on many replicas."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    explained = index.partition(heading)[2].partition("\n## ")[0]
    assert names_given(module) <= set(re.findall(r"`([a-z_]+)`", explained))
