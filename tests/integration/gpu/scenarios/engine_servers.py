"""Real servers of other engines: each is started with the model of KVDIAG_GPU_MODEL, and a run has to find no fault.

They are played only where they are named, since each needs its engine's program. The trace of the run is kept.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2

from kvdiag.feeds.live.sampling import ticks
from tests.integration.gpu.figures import Figure, one_of
from tests.integration.gpu.scenario import Measurement, Run
from tests.integration.gpu.stage import StageError

STARTS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
"""How each engine's server is started, by the engine's name in kvdiag."""

MODEL = "KVDIAG_GPU_MODEL"
"""Names the folder, the hub's id, or for llama.cpp the GGUF file of the model."""

OPTIONS = "return_perf_metrics: true\nenable_iter_perf_stats: true\n"
"""What TensorRT-LLM needs to report its pool."""

START_SECONDS, RUN_SECONDS, STOP_SECONDS = 1200.0, 900.0, 60.0
LOOK_SECONDS = 0.5


async def _played(name: str, run: Run) -> tuple[Figure, ...]:
    model = os.environ.get(MODEL)
    if not model:
        raise StageError(f"{MODEL} names no model")
    options = run.work / "options.yaml"
    options.write_text(OPTIONS, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"python": run.python, "model": model, "port": port, "options": options}
    command = [word.format(**values) for word in STARTS[name]]
    if shutil.which(command[0]) is None:
        raise StageError(f"{command[0]} is not installed")
    async with _serving(command, f"http://127.0.0.1:{port}", run.work / "server.log") as url:
        arguments = ("run", "--url", url, "--record", str(run.trace), "--output", "json")
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvdiag", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, errors = await asyncio.wait_for(program.communicate(), RUN_SECONDS)
    try:
        document = json.loads(out)
    except ValueError as error:
        raise StageError(f"kvdiag run ended with {program.returncode}: {errors.decode()[-300:]}") from error
    steps = {f"step {step['id']}": step["status"] for step in document["steps"]}
    leaks = {one["id"]: one["status"] for one in document["findings"] if one["id"] == "leak.kv_blocks"}
    return tuple(one_of(what, status, ("ok",)) for what, status in (steps | leaks).items())


@contextlib.asynccontextmanager
async def _serving(command: Sequence[str], url: str, log: Path) -> AsyncIterator[str]:
    """The address of a server once it lists its model; it ends with the block, and so do all of its processes."""
    with log.open("wb") as written:
        server = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=written, stderr=written, start_new_session=True
        )
    try:
        try:
            async with asyncio.timeout(START_SECONDS), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                async for _ in ticks(LOOK_SECONDS):
                    if server.returncode is not None or await _answers(client):
                        break
        except TimeoutError:
            raise StageError(f"the server does not answer after {START_SECONDS:g} s: {_tail(log)}") from None
        if server.returncode is not None:
            raise StageError(f"the server ended with {server.returncode}: {_tail(log)}")
        yield url
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait(), STOP_SECONDS)


async def _answers(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/v1/models")).status_code == httpx2.codes.OK
    except httpx2.HTTPError:
        return False


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-300:]


def _server(name: str) -> Measurement:
    async def measure(run: Run) -> tuple[Figure, ...]:
        return await _played(name, run)

    return Measurement(name=f"server_{name}", about=f"a real server of {name} and the four steps", measure=measure)


SERVERS = tuple(map(_server, STARTS))
