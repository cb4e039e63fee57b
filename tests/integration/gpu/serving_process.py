"""The serving process of a scenario: on command it holds memory as a server does, computes, and misbehaves.

Runs in the Python that has torch, with the standard library and torch alone; the agent is there as in production.
Takes one command a line on its input, as JSON, and answers each with one line.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

MIB = 2**20
ACTIVATION_BYTES = 64 * MIB
LAYERS = 64
LAYER_BYTES = 4 * MIB
MIN_GAP_SECONDS = 3e-6
"""A loop that reads the clock takes 0.1 µs a turn: a longer gap means that another thread held the interpreter."""

SWITCH_SECONDS = 0.0005


class Subject:
    """What the process holds. Each public method is a command; what it returns is the answer."""

    def __init__(self) -> None:
        """Hold nothing, and leave CUDA alone."""
        self._held: list[Any] = []
        self._holes: list[Any] = []
        self._layers: list[Any] = []

    def start(self, weights_bytes: int, pool_bytes: int) -> dict[str, Any]:
        """Take weights and pool, and answer once, so that the first touch is over."""
        self._held += [_tensor(weights_bytes), _tensor(pool_bytes)]
        self._layers = [_tensor(LAYER_BYTES) for _ in range(LAYERS)]
        self.request(0.0)
        return {"pid": os.getpid(), "uuid": str(torch.cuda.get_device_properties(0).uuid)}

    def request(self, seconds: float, activation_bytes: int = ACTIVATION_BYTES) -> dict[str, Any]:
        """Kernels over all layers with an activation allocated, for so long."""
        end = time.monotonic() + seconds
        activation = _tensor(activation_bytes)
        self._step()
        while time.monotonic() < end:
            self._step()
        del activation
        return {}

    def keep(self, size_bytes: int) -> dict[str, Any]:
        """Take a tensor and never let go of it."""
        self._held.append(_tensor(size_bytes))
        return {}

    def keep_share(self, ratio: float) -> dict[str, Any]:
        """Take so much of the device, and say how much that is."""
        size_bytes = int(ratio * torch.cuda.mem_get_info()[1])
        self._held.append(_tensor(size_bytes))
        return {"kept_bytes": size_bytes}

    def raw(self, size_bytes: int) -> dict[str, Any]:
        """Take device memory from the driver, past torch."""
        address = ctypes.c_uint64()
        code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
        if code:
            raise RuntimeError(f"cuMemAlloc: CUDA error {code}")
        return {}

    def comb(self, teeth: int, hole_bytes: int, tooth_bytes: int) -> dict[str, Any]:
        """Lay blocks so that freeing one kind leaves holes between blocks of the other; `open` frees them."""
        for _ in range(teeth):
            # One segment for both: torch cuts the block that was just given back.
            whole = _tensor(hole_bytes + tooth_bytes)
            del whole
            self._holes.append(_tensor(hole_bytes))
            self._held.append(_tensor(tooth_bytes))
        return {}

    def open(self) -> dict[str, Any]:
        """Free the holes of the comb."""
        self._holes.clear()
        return {}

    def fill(self, leave_bytes: int) -> dict[str, Any]:
        """Take all of the device but so much."""
        free_bytes, _ = torch.cuda.mem_get_info()
        size_bytes = max(free_bytes - leave_bytes, 0) // (20 * MIB) * (20 * MIB)
        self._held.append(_tensor(size_bytes))
        return {"filled_bytes": size_bytes}

    def cache(self, size_bytes: int, pieces: int) -> dict[str, Any]:
        """Take so many pieces and give all of them back, to torch's cache."""
        for piece in [_tensor(size_bytes // pieces) for _ in range(pieces)]:
            piece.add_(1)
        torch.cuda.synchronize()
        return {}

    def graph(self, size_bytes: int) -> dict[str, Any]:
        """Capture a CUDA graph whose steps need so much: its pool keeps it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                _tensor(size_bytes).add_(1)
        graph.replay()
        torch.cuda.synchronize()
        self._held.append(graph)
        return {}

    def ask(self, size_bytes: int) -> dict[str, Any]:
        """Ask for one block, and say what came of it."""
        try:
            block = _tensor(size_bytes)
        except RuntimeError as error:
            return {"error": str(error), "kind": type(error).__name__}
        del block
        return {"error": None, "kind": None}

    def cost(self, folder: str, publications: int, windows: int, window_seconds: float) -> dict[str, Any]:
        """A publication's duration, and the steps of a loop with the agent and without, alternating."""
        # Found on the path as in a server; the agent itself has not begun in this process.
        from kvdiag_agent.thread import Agent  # type: ignore[import-not-found]  # noqa: PLC0415

        agent = Agent(folder)
        agent.publish()
        wall, busy = timed(agent.publish, publications)
        steps: dict[str, list[int]] = {"with": [], "without": []}
        for number in range(windows):
            # In the order with, without, without, with: what drifts counts for both.
            name = "with" if number % 4 in (0, 3) else "without"
            steps[name] += self._window(Agent(folder) if name == "with" else None, window_seconds)
        return {
            "wall_seconds": statistics.median(wall),
            "busy_seconds": busy,
            "gil_seconds": _gil_seconds(agent.publish, max(publications // 10, 5)),
            "steps_nanoseconds": steps,
        }

    def _window(self, agent: Any, seconds: float) -> list[int]:
        if agent is not None:
            agent.start()
        end = time.monotonic() + seconds
        found = []
        while time.monotonic() < end:
            began = time.perf_counter_ns()
            self._step()
            found.append(time.perf_counter_ns() - began)
        if agent is not None:
            agent.end()
        return found

    def _step(self) -> None:
        """As one step of decoding: a small kernel for each layer, then the wait for the token."""
        for layer in self._layers:
            layer.add_(1)
        torch.cuda.synchronize()


def _tensor(size_bytes: int) -> Any:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def timed(publish: Callable[[], None], count: int) -> tuple[list[float], float]:
    """Seconds by the clock of each, and of the processor for one."""
    wall = []
    began_busy = time.thread_time()
    for _ in range(count):
        began = time.perf_counter()
        publish()
        wall.append(time.perf_counter() - began)
    return wall, (time.thread_time() - began_busy) / count


def _gil_seconds(publish: Callable[[], None], count: int) -> float:
    """For how long a publication keeps a thread that only wants the interpreter from having it; the median."""
    begun, over, found = threading.Lock(), [True], []
    begun.acquire()

    def work() -> None:
        for _ in range(count):
            begun.acquire()
            publish()
            over[0] = True

    threading.Thread(target=work, daemon=True).start()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    for _ in range(count):
        gaps, over[0] = 0.0, False
        begun.release()
        last = time.perf_counter()
        while not over[0]:
            now = time.perf_counter()
            if now - last > MIN_GAP_SECONDS:
                gaps += now - last
            last = now
        found.append(gaps)
    sys.setswitchinterval(usual)
    return statistics.median(found)


def main() -> None:
    """Answer commands until the input ends."""
    subject = Subject()
    # Libraries write to the standard output as they like: answers go by a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"done": getattr(subject, told.pop("do"))(**told)}
        except Exception as error:  # noqa: BLE001 - the scenario reports every error
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
