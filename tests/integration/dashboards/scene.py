"""Three simulated servers under load, `kvdiag serve` for each, and a Prometheus that scrapes all six and alerts.

Everything runs in real time: figures per hour and ages are what the daemons measured, not computed from a model.
"""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvdiag.commands.drill import simulated
from tests.integration.prometheus.server import serving
from tests.integration.vllm.cli import started
from tests.unit.sim.client import Client

ALERTS = Path(__file__).parents[3] / "alerts"
SCRAPE_SECONDS = 2
WAVE_SECONDS, BUSY_SECONDS = 40.0, 26.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A server, its clients, and the length of their requests."""

    pod: str
    scenario: str
    clients: int
    prompt_tokens: int
    pause_seconds: float = 1.0


REPLICAS = (
    Replica(pod="vllm-0", scenario="kv-leak", clients=4, prompt_tokens=4000),
    Replica(pod="vllm-1", scenario="healthy", clients=3, prompt_tokens=3000),
    Replica(pod="vllm-2", scenario="concurrency-thrash", clients=8, prompt_tokens=2000, pause_seconds=4.0),
)


@contextmanager
def scene(storage: Path) -> Iterator[str]:
    """The address of the Prometheus, while it scrapes."""
    with ExitStack() as stack:
        scraped = [_replica(stack, number, one) for number, one in enumerate(REPLICAS)]
        config = {
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "5s"},
            "rule_files": [str(ALERTS / "alerting-rules.yaml"), str(ALERTS / "recording-rules.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [targets[place] for targets in scraped]}
                for place, job in enumerate(("vllm", "kvdiag"))
            ],
        }
        yield stack.enter_context(serving(storage, config=json.dumps(config)))


def _replica(stack: ExitStack, number: int, one: Replica) -> list[dict[str, object]]:
    """Start a server, its daemon and its clients; the two targets, labelled as in Kubernetes."""
    server = stack.enter_context(simulated(one.scenario))
    daemon = stack.enter_context(started("serve", "--url", server, "--listen", "127.0.0.1:0"))
    assert daemon.stderr is not None
    address = json.loads(daemon.stderr.readline())["address"]
    threading.Thread(target=daemon.stderr.read, daemon=True).start()
    over = threading.Event()
    for client in range(one.clients):
        random_of_client = random.Random(10 * number + client)  # noqa: S311 - nothing depends on its strength
        threading.Thread(target=_load, args=(Client(server), one, random_of_client, over), daemon=True).start()
    stack.callback(over.set)
    return [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {"instance": f"10.42.0.{11 + number}:{port}", "namespace": "llm", "pod": one.pod},
        }
        for url, port in ((server, 8000), (address, 9743))
    ]


def _load(client: Client, one: Replica, chance: random.Random, over: threading.Event) -> None:
    """Send requests in waves with idle time between them, until the test is over or the server has exited."""
    while not over.wait(one.pause_seconds * chance.uniform(0.3, 1.7)):
        if time.time() % WAVE_SECONDS < BUSY_SECONDS:
            try:
                client.complete(round(one.prompt_tokens * chance.uniform(0.2, 1.8)), chance.randint(150, 700))
            except (OSError, AssertionError):
                if over.is_set():
                    return
