"""The boards have no field that Grafana's published types lack, in the oldest version supported and a newer one."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dashboards.generate import BOARDS, FOLDER
from tests.fixtures.once import cache, made_once

PROGRAM = Path(__file__).with_name("grafana_schema.py")

PACKAGES = {
    "10.4": """grafana-foundation-sdk==1769699796!10.4.0 \\
    --hash=sha256:e3e9e59effc17fa7a3bacaed40dcea2ecc39d6cc4c37dc7b494968afaf35a7b4
""",
    "11.6": """grafana-foundation-sdk==1769699379!11.6.0 \\
    --hash=sha256:92d7a8144eba0fa802e728fb70e63d74b056fb1195ff116d812ad7a4ccfa5eca
""",
}
"""Grafana's own, generated from the schema of each version."""

NOT_IN_THE_TYPES = {
    # The Prometheus data source's own fields of an annotation.
    "/annotations/list/step",
    "/annotations/list/textFormat",
    "/annotations/list/titleFormat",
    "/annotations/list/useValueForTime",
    # Grafana's editor writes it next to `query`.
    "/templating/list/definition",
    # `null` and `false` are left out when a board is written.
    "/id",
    "/panels/fieldConfig/defaults/custom/spanNulls",
}


def lost(version: str, *boards: Path) -> set[str]:
    """The fields of some boards that Grafana's types lack."""
    requirement = PACKAGES[version]
    wanted = hashlib.sha256(requirement.encode()).hexdigest()[:12]

    def install(folder: Path) -> None:
        uv = Path(sys.executable).with_name("uv")
        installing: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        installing += [f"--target={folder}", "--requirement", "-"]
        subprocess.run(installing, input=requirement, capture_output=True, text=True, check=True, timeout=300)

    types = made_once(cache() / f"grafana-types-{wanted}", install)
    command: list[str | Path] = [sys.executable, PROGRAM, *boards]
    done = subprocess.run(command, env={"PYTHONPATH": str(types)}, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("version", PACKAGES)
def test_boards_have_the_fields_of_grafana(version: str) -> None:
    """And a few that its types do not name."""
    assert NOT_IN_THE_TYPES == lost(version, *(FOLDER / name for name in BOARDS))


def test_a_misspelt_field_is_found(tmp_path: Path) -> None:
    """In a panel within a row."""
    text = (FOLDER / next(iter(BOARDS))).read_text(encoding="utf-8")
    assert '"lineWidth"' in text
    spoilt = tmp_path / "board.json"
    spoilt.write_text(text.replace('"lineWidth"', '"lineWide"'), encoding="utf-8")
    assert {"/panels/fieldConfig/defaults/custom/lineWide"} == lost("10.4", spoilt) - NOT_IN_THE_TYPES
