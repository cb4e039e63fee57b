"""What deploy/ says of kvdiag is so: its command lines, metrics, paths and files exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kvdiag.commands import cli
from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.outputs.metrics.fleet_metrics import fleet_contract
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import Request
from tests.fixtures.require import require
from tests.integration.deploy.manifests import DEPLOY, ROOT, documents, manifests
from tests.integration.docs.test_runbooks import commands, parse
from tests.unit.outputs.test_metrics import page, snapshot

FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and not path.is_symlink())
NO_METRICS = {"kvdiag_agent", "kvdiag_scope"}
"""The agent's package, and the label of a whole node's targets."""


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every command line of kvdiag: arguments of containers, the unit's program, and those in texts."""
    for path in manifests():
        for document in documents(path):
            for arguments in _arguments(document):
                yield path.name, arguments
    unit = (DEPLOY / "systemd" / "kvdiag.service").read_text(encoding="utf-8")
    for line in re.findall(r"(?m)^ExecStart=\S+/kvdiag (.*)$", unit):
        yield "kvdiag.service", line.split()
    for arguments in commands((DEPLOY / "README.md").read_text(encoding="utf-8")):
        if arguments and arguments[0] in cli.list_commands(click.Context(cli)):
            yield "README.md", arguments


def _arguments(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        if str(value.get("image", "")).startswith("kvdiag:"):
            yield value.get("args") or value["command"]
        for part in value.values():
            yield from _arguments(part)
    elif isinstance(value, list):
        for part in value:
            yield from _arguments(part)


@pytest.mark.parametrize(
    "arguments", [pytest.param(arguments, id=f"{where}: {' '.join(arguments)}") for where, arguments in command_lines()]
)
def test_a_command_line_is_understood(arguments: list[str]) -> None:
    """The command exists, and so do its options, with values that they take."""
    parse(arguments)


def test_all_of_them_are_looked_at() -> None:
    """Every file that starts kvdiag is among those."""
    expected = {path.name for path in manifests() if re.search(r"image: kvdiag:", path.read_text(encoding="utf-8"))}
    assert {*expected, "kvdiag.service"} <= {where for where, _ in command_lines()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_what_is_named_exists(path: Path) -> None:
    """Metrics are on the page of an exporter or of a fleet's daemon, paths are served, and links lead to files."""
    text = path.read_text(encoding="utf-8")
    metrics = set(re.findall(r"\bkvdiag_[a-z_]+\b", text)) - NO_METRICS
    paths = set(re.findall(r"(/-/[a-z]+|/api/v1/[a-z]+)", text))
    links = re.findall(r"\]\(([^)#]+)", text) if path.suffix == ".md" else []
    told = page(snapshot())
    of_a_fleet = {f"kvdiag_{name}" for name in fleet_contract()}
    assert not {name for name in metrics - of_a_fleet if f"# HELP {name} " not in told}
    shown = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())
    pages = Pages(newest=lambda: shown)
    assert not {one for one in paths if pages.answer(Request(method="GET", path=one)).status == 404}
    missing = {target for link in links if not (target := (path.parent / link).resolve()).exists()}
    assert not {target for target in missing if target.is_relative_to(DEPLOY)}
    require(not missing, ", ".join(str(target.relative_to(ROOT)) for target in missing))


def test_the_readme_has_everything() -> None:
    """Each folder of deploy/ is linked from its README."""
    links = re.findall(r"\]\(([^)#]+)", (DEPLOY / "README.md").read_text(encoding="utf-8"))
    reached = {(DEPLOY / link).resolve() for link in links}
    loose = [
        path
        for path in FILES
        if path.parent != DEPLOY and not reached & {path, *path.parents} and "base" not in path.parts
        if not path.is_relative_to(DEPLOY / "compose")
    ]
    assert [] == loose


def test_nothing_is_called_latest() -> None:
    """Every image has a version."""
    for path in FILES:
        for image in re.findall(r"(?m)^\s*(?:- )?image: ([^\s{]+)", path.read_text(encoding="utf-8")):
            assert re.search(r":v?\d", image), path
            assert "latest" not in image, path
