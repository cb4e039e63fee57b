"""Print the cost of `kvdiag serve` next to nvitop-exporter's, on the NVML stand-in with one GPU and with eight.

python -m tests.quality.bench.serve_cost [--seconds N] [--scrapes N]

kvdiag also scrapes a vLLM, holds a day of history (every figure, torch's among them, changes in each sample) and
diagnoses it every ten seconds; nvitop-exporter does none of these. Exits 3 where there is no compiler or no
nvitop-exporter.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from tests.fixtures.hostile import eventually, free_port
from tests.fixtures.once import cache, made_once
from tests.quality.bench.serve_day import facts_of, gpu, record_a_day, vllm
from tests.quality.bench.table import note, processor
from tests.stand_ins.nvml.stand_in import StandIn, State, build, compiler

MIB = 2**20
NVITOP = "nvitop-exporter==1.7.2"
THEIR_SECONDS = 60.0
"""Over which the other's processor time is taken: it does the same at every tick."""

ROUNDS = 3
"""Of scrapes; the cheapest counts, of either exporter: others on the machine only ever add to it."""

SETTLE_SECONDS = 12.0
"""For the first diagnosis, and what is made once."""

MAX_BYTES = 64 * MIB
MAX_CPU_RATIO = 0.01
MAX_SCRAPE_SECONDS = 1.0
MAX_P50_SECONDS = 1.5e-3
HERTZ = os.sysconf("SC_CLK_TCK")


class Missing(Exception):  # noqa: N818 - it is an answer, not a mistake
    """What the benchmark needs cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one exporter: memory at the end, share of a core, a core's time for 1000 scrapes, and how long one takes."""

    resident_bytes: int
    cpu_ratio: float
    scrape_seconds: float
    p50_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 where a budget is not kept, 3 where there is nothing to compare with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="over which processor time is taken: some diagnoses"
    )
    parser.add_argument("--scrapes", type=int, default=1000)
    asked = parser.parse_args(arguments)
    try:
        exporter = nvitop_exporter()
        kept = [compared(gpus, exporter, asked.seconds, asked.scrapes) for gpus in (1, 8)]
    except (Missing, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"serve_cost: not run: {error}\n")
        return 3
    return 0 if all(kept) else 1


def nvitop_exporter() -> Path:
    """The program, in an environment of its own; some seconds the first time.

    Raises:
        Missing: it cannot be installed.

    """
    if compiler() is None:
        raise Missing("no C compiler (cc) here")
    uv = Path(sys.executable).with_name("uv")

    def install(folder: Path) -> None:
        for command in (
            ["venv", "--quiet", "--python", sys.executable, str(folder)],
            ["pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), NVITOP],
        ):
            subprocess.run([str(uv), *command], check=True, capture_output=True, timeout=300)

    try:
        return made_once(cache() / NVITOP.replace("==", "-"), install) / "bin" / "nvitop-exporter"
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"{NVITOP} cannot be installed ({type(error).__name__})") from error


def compared(gpus: int, exporter: Path, seconds: float, scrapes: int) -> bool:
    """Print both exporters with so many GPUs; whether kvdiag keeps its budgets."""
    with tempfile.TemporaryDirectory(prefix="kvdiag-serve-cost-") as name:
        folder = Path(name)
        stand_in = StandIn(build(folder), folder / "state")
        stand_in.show(State(gpus=tuple(gpu(number) for number in range(gpus))))
        port = free_port()
        with running([str(exporter), "--port", str(port), "--interval", "1"], stand_in, folder) as other:
            theirs = cost(other, f"http://127.0.0.1:{port}/metrics", min(seconds, THEIR_SECONDS), scrapes)
        with vllm() as url:
            arguments = [sys.executable, "-m", "kvdiag", "serve", "--url", url]
            arguments += ["--record-dir", str(folder / "record"), "--listen", f"127.0.0.1:{port}"]
            with running(arguments, stand_in, folder) as first:
                answers(first, f"http://127.0.0.1:{port}/-/ready")
                eventually(lambda: facts_of(folder / "record", url) is not None)
            facts = facts_of(folder / "record", url)
            if facts is None:
                raise Missing("kvdiag serve has seen no server")
            record_a_day(folder / "record", facts, gpus)
            with running(arguments, stand_in, folder) as own:
                ours = cost(own, f"http://127.0.0.1:{port}/metrics", seconds, scrapes)
    shown(gpus, ours, theirs)
    return (
        ours.resident_bytes <= MAX_BYTES
        and ours.cpu_ratio <= MAX_CPU_RATIO
        and ours.scrape_seconds <= MAX_SCRAPE_SECONDS
        and ours.p50_seconds <= MAX_P50_SECONDS
    )


def shown(gpus: int, ours: Cost, theirs: Cost) -> None:
    """A table of one number of GPUs."""
    rows = (
        ("resident memory, MiB", ours.resident_bytes / MIB, theirs.resident_bytes / MIB, MAX_BYTES / MIB),
        ("CPU, % of one core", 100 * ours.cpu_ratio, 100 * theirs.cpu_ratio, 100 * MAX_CPU_RATIO),
        ("CPU seconds per 1,000 scrapes", ours.scrape_seconds, theirs.scrape_seconds, MAX_SCRAPE_SECONDS),
        ("scrape latency p50, ms", 1e3 * ours.p50_seconds, 1e3 * theirs.p50_seconds, 1e3 * MAX_P50_SECONDS),
    )
    machine = f"{os.cpu_count()} x {processor()}, Python {platform.python_version()}"
    sys.stdout.write(f"{gpus} GPU{'s' * (gpus > 1)} ({machine})\n")
    sys.stdout.write(f"  {'':28}{'kvdiag':>9}{'nvitop-exporter':>18}{'ratio':>8}{'budget':>9}\n")
    for name, own, other, budget in rows:
        word = "met" if own <= budget else "NOT MET"
        whole = f"serve, {gpus} GPU{'s' * (gpus > 1)}: {name}"
        note(whole, own, other, than="nvitop-exporter 1.7.2", unit="")
        sys.stdout.write(f"  {name:28}{own:9.2f}{other:18.2f}{own / (other or 1e-9):8.2f}{budget:9.2f}  {word}\n")
    sys.stdout.flush()


@contextmanager
def running(arguments: Sequence[str], stand_in: StandIn, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended afterwards."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(arguments, env=stand_in.environment(), stdout=log, stderr=log)
        with process:
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def answers(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a page is there.

    Raises:
        Missing: it never is.

    """

    def there() -> bool:
        try:
            return process.poll() is not None or fetched(url) > 0
        except OSError:
            return False

    if not eventually(there) or process.poll() is not None:
        raise Missing(f"{process.args!r:.80} does not serve {url}")


def fetched(url: str) -> int:
    """Bytes of a page, on a connection of its own.

    Raises:
        OSError: there is none.

    """
    with scraper(url) as ask:
        return ask()


@contextmanager
def scraper(url: str) -> Iterator[Callable[[], int]]:
    """A client that keeps its connection, as Prometheus does, where the server does; it takes little time itself.

    What it gives fetches the page and says its bytes, and raises OSError where there is none.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=10)

    def ask() -> int:
        try:
            connection.request("GET", parts.path)
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise OSError(answer.reason)
            return len(answer.read())
        except HTTPException as error:
            raise OSError(str(error)) from error

    try:
        yield ask
    finally:
        connection.close()


def cost(process: subprocess.Popen[bytes], url: str, seconds: float, scrapes: int) -> Cost:
    """What a program costs when it is left alone, and when it is asked again and again."""
    answers(process, url)
    time.sleep(SETTLE_SECONDS)
    begun, begun_cpu = time.monotonic(), cpu_seconds(process.pid)
    time.sleep(seconds)
    cpu_ratio = (cpu_seconds(process.pid) - begun_cpu) / (time.monotonic() - begun)
    busy, p50 = min(scraped(process, url, scrapes, cpu_ratio) for _ in range(ROUNDS))
    return Cost(
        resident_bytes=resident_bytes(process.pid),
        cpu_ratio=cpu_ratio,
        scrape_seconds=busy / scrapes * 1000,
        p50_seconds=p50,
    )


def scraped(process: subprocess.Popen[bytes], url: str, scrapes: int, idle_ratio: float) -> tuple[float, float]:
    """What so many scrapes cost beyond what it costs anyway, in seconds of a core, and how long one takes."""
    took, begun, begun_cpu = [], time.monotonic(), cpu_seconds(process.pid)
    with scraper(url) as ask:
        for _ in range(scrapes):
            before = time.perf_counter()
            ask()
            took.append(time.perf_counter() - before)
            # As scrapes are: each of a page that is another one.
            time.sleep(0.005)
    busy = cpu_seconds(process.pid) - begun_cpu - idle_ratio * (time.monotonic() - begun)
    return busy, statistics.median(took)


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


def resident_bytes(pid: int) -> int:
    """Memory that is resident."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
