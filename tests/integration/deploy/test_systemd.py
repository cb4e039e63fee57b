"""The systemd unit: systemd itself finds nothing wrong, and it is closed as far as NVML allows."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.require import require_program
from tests.integration.deploy.manifests import DEPLOY

UNIT = DEPLOY / "systemd" / "kvdiag.service"
MAX_EXPOSED = 20
"""Tenths of systemd's own score, where 100 is a service without any protection."""


@pytest.fixture
def _systemd() -> None:
    """`security --offline` came with systemd 250."""
    require_program("systemd-analyze", "--version", least=(250,))


def settings() -> Iterator[tuple[str, str]]:
    """Every setting in order."""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            yield name, value


def test_it_is_closed() -> None:
    """No root, no capability, nothing to write, and of the devices NVIDIA's alone."""
    told = dict(settings())
    assert "yes" == told["DynamicUser"] == told["NoNewPrivileges"]
    assert "" == told["CapabilityBoundingSet"] == told["AmbientCapabilities"]
    assert "strict" == told["ProtectSystem"]
    assert told["ExecStart"].endswith(f"--record-dir /var/lib/{told['StateDirectory']}")
    assert ("closed", "char-nvidia* rw") == (told["DevicePolicy"], told["DeviceAllow"])


def test_a_reload_is_a_hangup() -> None:
    """`systemctl reload` has it read its files again, as SIGHUP does."""
    assert "/bin/kill -HUP $MAINPID" == dict(settings())["ExecReload"]


@pytest.mark.usefixtures("_systemd")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """With a program that exists in the place of /opt's, the unit is valid to the last setting."""
    program = Path(sys.executable).with_name("kvdiag")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/kvdiag/bin/kvdiag serve", f'"{program}" serve')
    unit = tmp_path / UNIT.name
    unit.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "" == "".join(line for line in done.stderr.splitlines() if UNIT.name in line)


@pytest.mark.usefixtures("_systemd")
def test_systemd_calls_it_safe() -> None:
    """The unit's exposure score, which systemd computes without running it, is within the limit."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={MAX_EXPOSED}", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-500:]
