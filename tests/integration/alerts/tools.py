"""promtool and amtool, as they judge the shipped files."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fixtures.require import require
from tests.integration.prometheus.alertmanager import alert_programs
from tests.integration.prometheus.server import PrometheusEnvError, programs


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    return ran("Prometheus", lambda: programs().promtool, arguments)


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What amtool says."""
    return ran("Alertmanager", lambda: alert_programs().amtool, arguments)


def ran(
    what: str, program: Callable[[], str | Path], arguments: Sequence[str | Path]
) -> subprocess.CompletedProcess[str]:
    """What a program answers; the test is skipped where the program cannot be had, and fails under CI."""
    try:
        found = program()
    except PrometheusEnvError as error:
        require(ok=False, what=f"{what} ({error})")
        raise
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
