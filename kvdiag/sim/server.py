"""A drill: an LLM server with a simulated GPU and a scenario, on a loopback port, in a background thread.

with Drill(SCENARIOS["kv-leak"]) as drill:
    ...  # drill.url answers as vLLM 0.32 does; RemoteNvml(drill.url) is its GPU's NVML
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from kvdiag.sim.api import Api
from kvdiag.sim.http_server import HttpServer
from kvdiag.sim.llamacpp_api import LlamacppApi
from kvdiag.sim.lmdeploy_api import LmdeployApi
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.tgi_api import TgiApi
from kvdiag.sim.trtllm_api import TrtllmApi
from kvdiag.sim.vllm_api import VllmApi

START_SECONDS = 10.0

APIS: Mapping[str, Callable[[Scenario, Path], Api]] = {
    "vllm": VllmApi,
    "trtllm": TrtllmApi,
    "tgi": TgiApi,
    "lmdeploy": LmdeployApi,
    "llamacpp": LlamacppApi,
}
"""The API of each engine that a scenario can be of."""


class Drill:
    """Simulates a scenario during a `with` block."""

    def __init__(self, scenario: Scenario, port: int = 0) -> None:
        """Choose a scenario and a port, 0 for a free one; entering the block starts it."""
        self.scenario = scenario
        self.url = ""
        self._port = port
        self._thread = threading.Thread(target=self._run, name="kvdiag-drill", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        """Start serving; returns when `url` answers.

        Raises:
            OSError: the port is taken or may not be used.
        """
        self._thread.start()
        started = self._ready.wait(START_SECONDS)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        if not started:
            raise TimeoutError(f"the drill did not start within {START_SECONDS:g} s")
        return self

    def __exit__(self, *raised: object) -> None:
        """Close all connections and remove the model's folder; raises an error of the drill."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None and raised[0] is None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="kvdiag-drill-") as folder:
            root = Path(folder)
            self.scenario.model.write(root, max_positions=self.scenario.max_model_len_tokens)
            api = APIS[self.scenario.engine](self.scenario, root)
            # Kept open, as by a server that maps its weights.
            with (root / "model.safetensors").open("rb"):
                server = HttpServer(api.handle)
                port = await server.start(self._port)
                self.url = f"http://127.0.0.1:{port}"
                engine = asyncio.create_task(api.engine.run())
                stop = asyncio.create_task(self._stop.wait())
                self._ready.set()
                try:
                    await asyncio.wait((engine, stop), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    engine.cancel()
                    stop.cancel()
                    ended, _ = await asyncio.gather(engine, stop, return_exceptions=True)
                    await server.stop()
                if isinstance(ended, Exception):
                    raise ended
