"""Wheel and sdist of `make packages`, each installed where nothing else is."""

import subprocess
import sys
from pathlib import Path

import kvdiag
from tests.integration.deploy.manifests import ROOT


def run(*command: str | Path) -> str:
    """What a program prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_wheel_and_sdist_are_installed_and_run(tmp_path: Path) -> None:
    """With what they bring along: rules, runbooks, catalogues, and the entry point of the agent."""
    uv, locked = Path(sys.executable).with_name("uv"), tmp_path / "locked.txt"
    run("make", "--no-print-directory", "packages", f"PACKAGES={tmp_path}")
    run(uv, "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", f"--output-file={locked}")
    for package in tmp_path.glob(f"kvdiag-{kvdiag.__version__}[-.]*"):
        environment = tmp_path / package.suffix
        run(uv, "venv", "--quiet", f"--python={sys.executable}", environment)
        run(uv, "pip", "install", "--quiet", f"--python={environment}", "--no-deps", "-r", locked, package)
        assert [*environment.glob("lib/python*/site-packages/kvdiag/py.typed")]
        command = environment / "bin" / "kvdiag"
        assert f"kvdiag, version {kvdiag.__version__}\n" == run(command, "--version")
        assert (ROOT / "alerts/runbooks/leak.host.md").read_text() == run(command, "explain", "--runbook", "leak.host")
        assert "alert: KvdiagDown" in run(command, "alerts")
        assert run(command, "fit", "llama_70b", "--gpu", "h100", "--tp", "4").startswith("FITS")
        assert run(command, "agent", "install", tmp_path / f"agent{package.suffix}")
    assert {".whl", ".gz"} == {path.name for path in tmp_path.glob(".*")}
