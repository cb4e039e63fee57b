"""The one file of `make pyz`, on a Python that has nothing installed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdiag
from kvdiag.sim import SCENARIOS, Drill

ROOT = Path(__file__).parents[3]
LONG_SECONDS = 300.0

Run = Callable[..., subprocess.CompletedProcess[str]]


def system_python() -> str:
    """The system's own Python where it is new enough, else the one that this environment was made from."""
    for candidate in ("/usr/bin/python3", sys._base_executable):  # type: ignore[attr-defined]  # noqa: SLF001 - undocumented, and there since 3.7
        told = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info >= (3, 11))"],
            capture_output=True,
            text=True,
            check=False,
        )
        if told.stdout.strip() == "True":
            return str(candidate)
    raise AssertionError("no Python from 3.11 on")


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the file, with a home of its own and without this environment's packages."""
    folder = tmp_path_factory.mktemp("pyz")
    file = folder / "kvdiag.pyz"
    subprocess.run(["make", "--no-print-directory", "pyz", f"PYZ={file}"], cwd=ROOT, check=True, timeout=LONG_SECONDS)
    python = system_python()

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-I", str(file), *args],
            cwd=folder,
            env={"HOME": str(folder), "PATH": "/usr/bin:/bin"} | environment,
            capture_output=True,
            text=True,
            timeout=LONG_SECONDS,
            check=False,
        )

    return run


@pytest.mark.xdist_group("pyz")
def test_the_file_runs_where_nothing_is_installed(pyz: Run, tmp_path: Path) -> None:
    """Version, a plan, a look at a server, a simulated one, and the agent that it brings along."""
    first = pyz("--version")
    assert pyz("explain", "--runbook", "leak.host").stdout == (ROOT / "alerts/runbooks/leak.host.md").read_text()
    assert f"kvdiag, version {kvdiag.__version__}\n" == first.stdout, first.stderr
    assert pyz("fit", "llama_70b", "--gpu", "h100", "--tp", "4").stdout.startswith("FITS")
    with Drill(SCENARIOS["healthy"]) as drill:
        looked = pyz("doctor", "--url", drill.url)
    assert (0, "") == (looked.returncode, looked.stderr)
    offered = pyz("run", "--simulate", "healthy", "--dry-run")
    assert (0, "") == (offered.returncode, offered.stderr)
    installed = pyz("agent", "install", str(tmp_path / "agent"))
    assert 0 == installed.returncode, installed.stderr
    assert any((tmp_path / "agent").rglob("publication.py"))


@pytest.mark.xdist_group("pyz")
def test_the_file_needs_no_home(pyz: Run, tmp_path: Path) -> None:
    """As in a container whose user has none: it unpacks where it may, and leaves nothing there."""
    actual = pyz("--version", HOME="/proc/none", TMPDIR=str(tmp_path))
    # It works, and the unpacked files are removed.
    assert (0, "") == (actual.returncode, actual.stderr)
    assert f"kvdiag, version {kvdiag.__version__}\n" == actual.stdout
    assert [] == list(tmp_path.iterdir())


@pytest.mark.xdist_group("pyz")
def test_a_folder_that_cannot_be_unpacked_into_is_said(pyz: Run) -> None:
    """One line and the code of what could not run: a traceback's code would be that of a suspect."""
    actual = pyz("--version", SHIV_ROOT="/proc/none")
    assert (3, 1) == (actual.returncode, actual.stderr.count("\n"))
    assert "set SHIV_ROOT" in actual.stderr
