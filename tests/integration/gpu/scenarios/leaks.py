"""Memory that each request takes and does not give back: of torch, and past it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.integration.gpu.figures import Figure
from tests.integration.gpu.scenario import Scenario
from tests.integration.gpu.stage import Stage

CYCLES = 7
LEAK_BYTES = 48 * 2**20


def _leaking(command: str | None) -> Callable[[Stage], Awaitable[tuple[Figure, ...]]]:
    async def play(stage: Stage) -> tuple[Figure, ...]:
        faults: list[tuple[str, dict[str, object]]] = [] if command is None else [(command, {"size_bytes": LEAK_BYTES})]
        for _ in range(CYCLES):
            await stage.cycle(*faults)
        return ()

    return play


SCENARIOS = (
    Scenario(
        name="no_leak",
        about="equal requests, nothing kept",
        play=_leaking(None),
        expected={"leak.device_torch": ("ok",), "leak.device_non_torch": ("ok",), "fragmentation.allocator": ("ok",)},
    ),
    Scenario(
        name="tensor_leak",
        about="a tensor of each request is kept",
        play=_leaking("keep"),
        expected={"leak.device_torch": ("fault",), "leak.device_non_torch": ("ok",)},
    ),
    Scenario(
        name="raw_leak",
        about="each request takes memory of the driver, past torch",
        play=_leaking("raw"),
        expected={"leak.device_torch": ("ok",), "leak.device_non_torch": ("fault",)},
    ),
)
