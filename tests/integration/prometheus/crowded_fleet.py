"""A Prometheus with 200 replicas, six of them faulty in six ways.

`python -m tests.integration.prometheus.crowded_fleet` makes and serves one, and prints the command of the
README's fleet section for it.
"""

import contextlib
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.integration.prometheus import histories
from tests.integration.prometheus.histories import END_SECONDS, FACTS, exporter, on, server, watched
from tests.integration.prometheus.openmetrics import dcgm, vllm
from tests.integration.prometheus.server import serving, write_history

README = Path(__file__).parents[3] / "README.md"

FAULTY = {
    "kv-leak/vllm-0": "leak.kv_blocks",
    "leak/vllm-1": "leak.device_torch",
    "own/vllm-0": "leak.device_torch",
    "two-engines/vllm-0": "leak.kv_blocks",
    "fragmented/vllm-0": "fragmentation.allocator",
    "cluster/vllm-0": "leak.host",
}
"""Six replicas that are faulty in six ways, and what each of them shows."""

REPLICAS = 200
HEALTHY_NEXT_TO_A_LEAK = 1

_FAULTY_WORLDS = (
    histories.kv_leak,
    histories.leak,
    histories.own,
    histories.engines_of_two,
    histories.fragmented,
)


def crowd(count: int) -> Iterator[str]:
    """Healthy replicas on GPUs of their own."""
    for number in range(count):
        timeline = on(watched(), f"GPU-crowd-{number}")
        yield from vllm(timeline, FACTS, server("crowd", f"vllm-{number}"))
        yield from dcgm(timeline, exporter("crowd", f"vllm-{number}", node=f"node-{number // 8}"))


def host() -> Iterator[str]:
    """A server whose host memory grows, by what cAdvisor reports."""
    return (line for line in histories.cluster() if "GPU-free" not in line)


def fleet(healthy: int, end_seconds: float) -> Iterator[str]:
    """The six and so many healthy ones, the last sample of each at this moment."""
    for world in _FAULTY_WORLDS:
        yield from until(end_seconds, world())
    yield from until(end_seconds, host())
    yield from until(end_seconds, crowd(healthy))


def until(end_seconds: float, lines: Iterable[str]) -> Iterator[str]:
    """The same samples, the last of them at another moment."""
    for line in lines:
        series, _, seconds = line.rpartition(" ")
        yield f"{series} {float(seconds) - END_SECONDS + end_seconds:.3f}"


def in_prod(lines: Iterable[str]) -> Iterator[str]:
    """The same replicas in the namespace of the README, their own in front of their names."""
    for line in lines:
        own = "exported_" if "exported_namespace=" in line else ""
        space = re.search(rf'(?<![a-z_]){own}namespace="([^"]+)"', line)
        if space is None:
            yield line
            continue
        moved = line.replace(space[0], f'{own}namespace="prod"', 1)
        yield re.sub(rf'(?<![a-z_]){own}pod="', f'{own}pod="{space[1]}-', moved, count=1)


def command(url: str) -> list[str]:
    """The README's command for a fleet, with this address."""
    section = README.read_text(encoding="utf-8").partition("**A fleet that Prometheus already scrapes.**")[2]
    words = shlex.split(section.partition("```sh\n")[2].partition("\n```")[0])
    return [url if word.startswith("http://") else word for word in words]


def main() -> int:
    """Fill one, and serve it until Ctrl-C."""
    with tempfile.TemporaryDirectory() as folder:
        healthy = REPLICAS - len(FAULTY) - HEALTHY_NEXT_TO_A_LEAK
        write_history(in_prod(fleet(healthy, float(int(time.time())))), Path(folder) / "data")
        with serving(Path(folder) / "data") as url:
            sys.stdout.write(f"{shlex.join(command(url))}\n")
            sys.stdout.flush()
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
