"""A real Prometheus with a history that the tests wrote: Debian's package, fetched and unpacked by a plain user.

By hand: `python -m tests.integration.prometheus.server` fetches it and prints where it is.
"""

import http
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.debian import NoPackageError, unpack
from tests.fixtures.hostile import free_port
from tests.fixtures.once import cache, made_once

READY_SECONDS = 180.0
BLOCKS_SECONDS = 300.0
"""For promtool to make blocks of a history."""


class PrometheusEnvError(Exception):
    """Prometheus cannot be had on this machine; the message is one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The server, and promtool."""

    prometheus: Path
    promtool: Path


def programs() -> Programs:
    """Debian's package unpacked in the cache, else Prometheus as it is installed; about 15 s the first time."""
    server, tool = own_or_installed("prometheus", _fetch, ("prometheus", "promtool"))
    return Programs(prometheus=server, promtool=tool)


def own_or_installed(folder: str, fetch: Callable[[Path], None], names: Sequence[str]) -> list[Path]:
    """Programs of the tests' own copy, since others' versions differ; where it cannot be had, those on PATH.

    Raises:
        PrometheusEnvError: there are neither.

    """
    try:
        made = made_once(cache() / folder, fetch)
    except PrometheusEnvError:
        installed = [found for name in names if (found := shutil.which(name))]
        if len(installed) < len(names):
            raise
        return [Path(found) for found in installed]
    return [made / name for name in names]


def _fetch(folder: Path) -> None:
    unpack_package(folder, "prometheus", ("usr/bin/prometheus", "usr/bin/promtool"))


def unpack_package(folder: Path, package: str, parts: tuple[str, ...]) -> None:
    """Make the folder, with these programs and folders of a Debian package in it."""
    try:
        root = unpack([package], folder)
    except NoPackageError as error:
        raise PrometheusEnvError(str(error)) from error
    for part in parts:
        (root / part).rename(folder / Path(part).name)
    shutil.rmtree(root)


def write_history(lines: Iterable[str], storage: Path) -> None:
    """Make blocks of a Prometheus' storage from lines of OpenMetrics."""
    text = storage.with_suffix(".om")
    with text.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.write("# EOF\n")
    # With blocks of the usual two hours promtool would read the whole file once for each.
    make = [
        str(programs().promtool),
        "tsdb",
        "create-blocks-from",
        "--max-block-duration=24h",
        "openmetrics",
        "--quiet",
    ]
    subprocess.run([*make, str(text), str(storage)], check=True, stdout=subprocess.DEVNULL, timeout=BLOCKS_SECONDS)
    text.unlink()


@contextmanager
def serving(storage: Path, *options: str, config: str = "") -> Iterator[str]:
    """A Prometheus on a loopback port over this storage; its address."""
    settings = storage.with_suffix(".yml")
    settings.write_text(config)
    port = free_port()
    with (
        storage.with_suffix(".log").open("w") as log,
        subprocess.Popen(
            [
                str(programs().prometheus),
                f"--config.file={settings}",
                f"--storage.tsdb.path={storage}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, storage.with_suffix(".log"))
            yield url
        finally:
            process.terminate()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; its end, or a minute without an answer, is an error."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PrometheusEnvError(f"{log.stem} ended: {log.read_text()[-300:]}")
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5.0).close()
        except urllib.error.HTTPError as answer:
            # Behind TLS, a password or a path prefix it answers something else, and is ready all the same.
            if answer.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.05)
    raise PrometheusEnvError(f"{log.stem} was not ready within {READY_SECONDS:g} s")


if __name__ == "__main__":
    found = programs()
    print(found.prometheus, found.promtool, sep="\n")  # noqa: T201
