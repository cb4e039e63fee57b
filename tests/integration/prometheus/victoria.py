"""A real VictoriaMetrics with a history that the tests wrote: Debian's package, unpacked by a plain user."""

import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.hostile import free_port
from tests.integration.prometheus.server import own_or_installed, unpack_package, wait_until_ready

AT_ONCE = 20_000
"""Lines that one request imports."""


def victoria_metrics() -> Path:
    """Debian's package unpacked in the cache, else the program as it is installed."""
    [found] = own_or_installed("victoria-metrics", _fetch, ("victoria-metrics",))
    return found


def _fetch(folder: Path) -> None:
    unpack_package(folder, "victoria-metrics", ("usr/bin/victoria-metrics",))


@contextmanager
def holding(lines: Iterable[str], folder: Path) -> Iterator[str]:
    """A VictoriaMetrics on a loopback port that holds these lines of OpenMetrics; its address."""
    port = free_port()
    log = folder / "victoria-metrics.log"
    command = [
        str(victoria_metrics()),
        f"-storageDataPath={folder / 'data'}",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-retentionPeriod=100y",
        "-memory.allowedBytes=256MB",
        "-search.disableCache",
    ]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, log)
            _import(lines, url)
            yield url
        finally:
            process.terminate()


def _import(lines: Iterable[str], url: str) -> None:
    batch: list[str] = []
    for line in lines:
        # Prometheus' own format has milliseconds, OpenMetrics seconds.
        series, _, seconds = line.rpartition(" ")
        batch.append(f"{series} {round(float(seconds) * 1000.0)}\n")
        if len(batch) >= AT_ONCE:
            _post(f"{url}/api/v1/import/prometheus", "".join(batch))
            batch.clear()
    _post(f"{url}/api/v1/import/prometheus", "".join(batch))
    _post(f"{url}/internal/force_flush", "")


def _post(address: str, text: str) -> None:
    with urllib.request.urlopen(address, data=text.encode(), timeout=60.0) as answer:
        answer.read()
