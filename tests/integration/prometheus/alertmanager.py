"""A real Alertmanager and its amtool: Debian's package, fetched and unpacked by a plain user, as Prometheus is."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.hostile import free_port
from tests.integration.prometheus.server import own_or_installed, unpack_package, wait_until_ready

NAMES = ("prometheus-alertmanager", "amtool")

SHARE = b"/usr/share/prometheus/alertmanager"
HERE = b"./alertmanager".ljust(len(SHARE), b"/")
"""Debian's binary holds an absolute path to its templates; it is patched to a relative one, with the files there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertPrograms:
    """The server, and amtool."""

    alertmanager: Path
    amtool: Path


def alert_programs() -> AlertPrograms:
    """Debian's package unpacked in the cache, else Alertmanager as it is installed; about 10 s the first time.

    Raises:
        PrometheusEnvError: it cannot be had.

    """
    server, tool = own_or_installed("alertmanager", _fetch, NAMES)
    return AlertPrograms(alertmanager=server, amtool=tool)


def _fetch(folder: Path) -> None:
    parts = (*(f"usr/bin/{name}" for name in NAMES), SHARE.decode().strip("/"))
    unpack_package(folder, "prometheus-alertmanager", parts)
    program = folder / NAMES[0]
    program.write_bytes(program.read_bytes().replace(SHARE, HERE))


@contextmanager
def alerting(folder: Path, config: str) -> Iterator[str]:
    """An Alertmanager of this configuration on a loopback port, alone in its cluster; its address."""
    settings, log = folder / "alertmanager.yml", folder / "alertmanager.log"
    settings.write_text(config)
    port = free_port()
    with (
        log.open("w") as output,
        subprocess.Popen(
            [
                str(alert_programs().alertmanager),
                f"--config.file={settings}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
                "--log.level=warn",
            ],
            cwd=alert_programs().alertmanager.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, log)
            yield url
        finally:
            process.terminate()
