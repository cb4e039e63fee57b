"""What a fleet's daemon costs on a real Prometheus: the first read of a day, a round, and memory.

By hand: `python -m tests.quality.bench.fleet_rounds [REPLICAS]`; by default 1,000 replicas, a day, every 30 seconds:
the history of `fleet_speed`. Exit 1: over budget, 3: no Prometheus.
"""

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.state_folder import StateFolder
from tests.fixtures.once import cache, made_once
from tests.integration.prometheus.server import PrometheusEnvError, programs, serving
from tests.quality.bench.fleet_speed import END_SECONDS, write_fleet

HOURS = 23.0
ROUNDS = 6
EVERY_SECONDS = 300.0
BUDGET_FIRST_SECONDS, BUDGET_ROUND_SECONDS, BUDGET_BYTES = 60.0, 5.0, 256 * 2**20


def main() -> int:
    """Measure, and print next to the budget."""
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    try:
        programs()
    except PrometheusEnvError as error:
        sys.stderr.write(f"fleet_rounds: not run: no Prometheus here ({error})\n")
        return 3
    folder = made_once(cache() / f"fleet-{replicas}-24h-30s", lambda target: write_fleet(target, replicas, 24.0, 30))
    with serving(folder / "data") as url, tempfile.TemporaryDirectory() as state:
        kept = StateFolder(Path(state), {})
        feed = FleetFeed(PrometheusOptions(prometheus=url).access().source, "", HOURS * 3600.0, kept)
        began, spent = time.monotonic(), time.process_time()
        asyncio.run(feed.round(END_SECONDS - ROUNDS * EVERY_SECONDS))
        first_seconds, first_cpu = time.monotonic() - began, time.process_time() - spent
        costs, judged = [], []
        for number in range(ROUNDS - 1, -1, -1):
            spent = time.process_time()
            found = asyncio.run(feed.round(END_SECONDS - number * EVERY_SECONDS))
            costs.append(time.process_time() - spent)
            judged.append(found.judged)
        size = sum(file.stat().st_size for file in Path(state).iterdir())
        kept.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(
        f"{replicas} replicas, {HOURS:g} h, every 30 s\n"
        f"  first read: {first_seconds:.1f} s (budget {BUDGET_FIRST_SECONDS:g}), {first_cpu:.1f} s of a processor\n"
        f"  round: {statistics.median(costs):.2f} s of a processor (budget {BUDGET_ROUND_SECONDS:g}), "
        f"at most {max(costs):.2f}; {statistics.median(judged):.0f} of them judged again\n"
        f"  resident: {peak / 2**20:.0f} MiB at most (budget {BUDGET_BYTES >> 20}); on disk {size / 2**20:.0f} MiB\n"
    )
    over = first_seconds > BUDGET_FIRST_SECONDS or max(costs) > BUDGET_ROUND_SECONDS or peak > BUDGET_BYTES
    return int(replicas == 1000 and over)


if __name__ == "__main__":
    sys.exit(main())
