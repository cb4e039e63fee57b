"""What a simulated engine counts of its steps, for APIs whose metrics are few."""

from collections.abc import Iterable, Mapping

from kvdiag.sim.scheduler import Batch, Request, Scheduler

Rows = Iterable[tuple[str, str, float | None]]
"""A metric's name, its type, and its value; `None` for one that was never set."""


class StepCounts:
    """Requests and blocks as of the last step, and totals since the start."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.running: list[Request] = []
        self.waiting = 0
        self.used_blocks = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished_requests = 0

    def see(self, scheduler: Scheduler) -> None:
        """Take the scheduler's state."""
        self.running = list(scheduler.running)
        self.waiting = len(scheduler.waiting)
        self.used_blocks = scheduler.pool.held_blocks

    def scheduled(self, batch: Batch, now_seconds: float) -> None:
        """Note when requests first left the queue."""
        for request in batch.tokens:
            if request.scheduled_seconds is None:
                request.scheduled_seconds = now_seconds

    def sampled(self, previous_seconds: dict[Request, float | None], now_seconds: float) -> None:  # noqa: ARG002 - `Statistics`
        """Count a step's new tokens, and the prompts of those that had their first."""
        self.generated_tokens += len(previous_seconds)
        for request, previous in previous_seconds.items():
            if previous is None:
                self.prompt_tokens += len(request.prompt)
                self.cached_tokens += request.cached_tokens

    def finished(self, request: Request, now_seconds: float) -> None:  # noqa: ARG002 - `Statistics`
        """Count a request that has come to its end."""
        self.finished_requests += request.finish_reason in ("stop", "length")


def text_page(rows: Rows, labels: Mapping[str, str] | None = None) -> bytes:
    """Metrics in Prometheus's text format, all with the same labels."""
    inner = ",".join(f'{name}="{value}"' for name, value in (labels or {}).items())
    suffix = f"{{{inner}}}" if inner else ""
    lines = [
        f"# TYPE {name} {kind}\n{name}{suffix} {float(value)}\n" for name, kind, value in rows if value is not None
    ]
    return "".join(lines).encode()
