"""Dependabot: a valid configuration that covers every folder with versions of others."""

from pathlib import PurePosixPath
from typing import Any

import yaml

from tests.integration.deploy.manifests import ROOT
from tests.integration.deploy.test_operators import problems

FILES = {
    "docker": "Dockerfile",
    "docker-compose": "compose.yaml",
    "helm": "Chart.yaml",
    "npm": "package.json",
    "uv": "uv.lock",
}
"""The name of a file by which each ecosystem finds its versions; workflows it finds from the root."""


def config() -> dict[str, Any]:
    """The file as a value."""
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))
    return found


def test_the_configuration_has_known_fields() -> None:
    """Dependabot refuses a file with a name that it does not know, and then updates nothing."""
    assert [] == problems("dependabot", config())
    assert problems("dependabot", {**config(), "update": []})


def test_every_folder_with_versions_is_covered() -> None:
    """Each ecosystem names the folders of the repository that have its file, and no others."""
    paths = [*ROOT.iterdir(), *(ROOT / "deploy").rglob("*"), *(ROOT / "tests").rglob("*")]
    folders = [
        (kind, path.parent.relative_to(ROOT)) for kind, name in FILES.items() for path in paths if path.name == name
    ]
    present = {(kind, str(PurePosixPath("/", folder))) for kind, folder in folders}
    named = {
        (one["package-ecosystem"], folder)
        for one in config()["updates"]
        for folder in one.get("directories", [one.get("directory")])
    }
    assert present | {("github-actions", "/")} == named
