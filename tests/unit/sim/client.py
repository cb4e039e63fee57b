"""What the simulator's tests see of it: HTTP from outside, with a deadline on everything."""

import http.client
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

DEADLINE_SECONDS = 30.0
_SALTS = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as its client saw it."""

    status: int
    chunks: int = 0
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, int] | None = None


@dataclass(slots=True)
class Peaks:
    """The maxima of gauges and the minimum of free device memory over an interval."""

    highest: dict[str, float] = field(default_factory=dict)


class Client:
    """One server's client."""

    def __init__(self, url: str) -> None:
        """Ask the server at `url`."""
        self.host = urlsplit(url).netloc

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        """Status and body of any request."""
        connection = http.client.HTTPConnection(self.host, timeout=DEADLINE_SECONDS)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def post(self, path: str, value: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON answer of a POST of JSON."""
        status, text = self.ask("POST", path, json.dumps(value))
        decoded: dict[str, Any] = json.loads(text)
        return status, decoded

    def series(self, *names: str) -> dict[str, float]:
        """Series of the metrics endpoint by name, with only the labels that distinguish them."""
        _, page = self.get("/metrics/?" + urlencode([("name[]", name) for name in names]))
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {_short(name): float(value) for name, _, value in lines}

    def gauge(self, name: str) -> float:
        """The one value of a vLLM series."""
        (value,) = self.series(f"vllm:{name}").values()
        return value

    def config(self) -> dict[str, str]:
        """Labels of vllm:cache_config_info."""
        _, page = self.get("/metrics/?name[]=vllm:cache_config_info")
        return dict(re.findall(r'(\w+)="([^"]*)"', page))

    @property
    def blocks(self) -> int:
        """Blocks of the pool, the null block among them."""
        return int(self.config()["num_gpu_blocks"])

    @property
    def used_blocks(self) -> float:
        """Blocks held now."""
        return self.gauge("kv_cache_usage_perc") * (self.blocks - 1)

    def complete(self, prompt_tokens: int, max_tokens: int, **more: Any) -> Answer:
        """Run one streamed request to its end, with a prompt that nothing has cached."""
        body = {
            "prompt": [5 + position % 200 for position in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": f"salt-{next(_SALTS)}",
            **more,
        }
        status, text = self.ask("POST", "/v1/completions", json.dumps(body))
        if status != http.HTTPStatus.OK:
            return Answer(status, error=json.loads(text)["error"]["message"])
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        choices = [event["choices"][0] for event in events if event.get("choices")]
        return Answer(
            status,
            chunks=len(choices),
            error=next((event["error"]["message"] for event in events if "error" in event), None),
            finish_reason=choices[-1]["finish_reason"] if choices else None,
            usage=next((event["usage"] for event in events if "usage" in event), None),
        )

    def batch(self, prompts: int, prompt_tokens: int, max_tokens: int) -> tuple[int, dict[str, Any]]:
        """Run several prompts in one request, so that all of them arrive in the same step; status and answer."""
        prompt = [[5 + number] * prompt_tokens for number in range(prompts)]
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})

    def load(self, requests: int, prompt_tokens: int, max_tokens: int) -> list[Answer]:
        """Run equal requests at once."""
        with ThreadPoolExecutor(requests) as pool:
            running = [pool.submit(self.complete, prompt_tokens, max_tokens) for _ in range(requests)]
            return [answer.result(DEADLINE_SECONDS) for answer in running]

    @contextmanager
    def watching(self, read: Callable[[], dict[str, float]]) -> Iterator[list[dict[str, float]]]:
        """What `read` returns, again and again, while the block runs."""
        seen: list[dict[str, float]] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                seen.append(read())

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield seen
            finally:
                over.set()
                watching.result(DEADLINE_SECONDS)

    @contextmanager
    def peaks(self, *names: str) -> Iterator[Peaks]:
        """The maxima of these series while the block runs."""
        peaks = Peaks()
        with self.watching(lambda: self.series(*names)) as seen:
            yield peaks
        peaks.highest = {
            name: max(one.get(name, 0.0) for one in seen) for name in {name for one in seen for name in one}
        }


def _short(name: str) -> str:
    """A series' name without the labels that all have."""
    return re.sub(r'engine="0",|,?model_name="drill"', "", name).replace("{,", "{").replace("{}", "")


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true before the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
