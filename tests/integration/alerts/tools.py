"""promtool and amtool, as they judge the shipped files."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.fixtures.require import require
from tests.integration.prometheus.alertmanager import alert_programs
from tests.integration.prometheus.server import PrometheusEnvError, programs


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    try:
        program = programs().promtool
    except PrometheusEnvError as error:
        require(ok=False, what=f"Prometheus ({error})")
        raise
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What amtool says."""
    try:
        program = alert_programs().amtool
    except PrometheusEnvError as error:
        require(ok=False, what=f"Alertmanager ({error})")
        raise
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
