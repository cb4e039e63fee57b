"""The workflows: pinned actions and few rights. Whether they are valid actionlint checks, in a job of CI."""

import re
from pathlib import Path

import pytest
import yaml

from tests.integration.deploy.manifests import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_a_workflow_is_pinned_and_may_do_little(path: Path) -> None:
    """Actions by commit; by default no right but to read; no token is left in the checkout."""
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["permissions"] in ({}, {"contents": "read"})
    actions = [use for use in re.findall(r"uses: (.+)", text) if not use.startswith("./")]
    assert [] == [use for use in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)]
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
