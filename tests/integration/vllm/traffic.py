"""Another client's requests on a server: small ones, one after the other, until the block ends.

They are far enough apart to leave a small machine the time for a run in parallel.
"""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.integration.vllm import gauges
from tests.integration.vllm.engine import MODEL_NAME, Engine

BODY = {
    "model": MODEL_NAME,
    "prompt": [500] * 300,
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
PAUSE_SECONDS = 0.3


@contextmanager
def other_traffic(server: Engine) -> Iterator[None]:
    """Keep requests running; the server is idle again afterwards."""
    stop = threading.Event()
    client = threading.Thread(target=_generate, args=(server.url, stop))
    client.start()
    try:
        gauges.wait_until(server.url, gauges.loaded)
        yield
    finally:
        stop.set()
        client.join()
    gauges.wait_until(server.url, gauges.idle)


def _generate(url: str, stop: threading.Event) -> None:
    address = urlsplit(url)
    while not stop.wait(PAUSE_SECONDS):
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            while not stop.is_set() and answer.readline():
                pass
        finally:
            connection.close()
