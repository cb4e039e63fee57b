"""What `kvdiag serve` has around it while its cost is taken: GPUs, a vLLM whose pages cost nothing, a day recorded."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.recording.segment_store import SegmentStore, files
from kvdiag.feeds.recording.trace import read_header
from kvdiag.model import Allocator, Device, Engine, Facts, HostProcess, Memory, Process, Sample
from tests.stand_ins.nvml.stand_in import Gpu, Running

GIB = 2**30
MIB = 2**20
PAGE = Path(__file__).parents[2] / "fixtures" / "scrapes" / "vllm-0.32.0-cpu-load.prom"
DAY_SECONDS = 86_400


def gpu(number: int) -> Gpu:
    """One that a server has nearly filled."""
    running = Running(pid=os.getpid(), used_bytes=70 * GIB, name="VLLM::Worker")
    uuid = f"GPU-{number:08x}-1111-2222-3333-444444444444"
    return Gpu(uuid=uuid, total_bytes=80 * GIB, free_bytes=8 * GIB, reserved_bytes=600 * MIB, processes=(running,))


@contextmanager
def vllm() -> Iterator[str]:
    """The address of a vLLM whose pages cost nothing to make; like its own server it keeps connections for 5 s."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5
    lines = tuple(PAGE.read_text(encoding="utf-8").splitlines(keepends=True))
    models: ClassVar = {"object": "list", "data": [{"id": "m", "object": "model", "root": "m", "max_model_len": 4096}]}

    def do_GET(self) -> None:
        """The series that are asked for, as vLLM's own server gives them, or who it is."""
        target = urlsplit(self.path)
        names = tuple(parse_qs(target.query).get("name[]", []))
        bodies = {
            "/metrics": lambda: "".join(line for line in self.lines if not names or line.startswith(names)),
            "/version": lambda: json.dumps({"version": "0.32.0"}),
            "/v1/models": lambda: json.dumps(self.models),
        }
        made = bodies.get(target.path.rstrip("/"))
        body = b"" if made is None else made().encode()
        lines = (
            f"HTTP/1.1 {404 if made is None else 200} -",
            f"Content-Length: {len(body)}",
            "Content-Type: text/plain",
        )
        self.wfile.write("".join(f"{line}\r\n" for line in (*lines, "")).encode() + body)


def facts_of(folder: Path, url: str) -> Facts | None:
    """What a daemon has recorded about its server."""
    for path in reversed(files(folder)):
        header = read_header(path)
        if header is not None and header.facts.url == url:
            return header.facts
    return None


def record_a_day(folder: Path, facts: Facts, gpus: int) -> None:
    """A history until now, as a daemon leaves it."""
    segments, tiers, now_seconds = SegmentStore(folder, max_bytes=256 * MIB), Retention(), time.time()
    segments.begin(facts)
    for ago_seconds in range(DAY_SECONDS, 600, -15):
        for sample in drawn(now_seconds - ago_seconds, gpus, lists_processes=ago_seconds % 30 == 0):
            segments.keep(tiers.add(sample))
    segments.close()


def drawn(at_seconds: float, gpus: int, *, lists_processes: bool) -> Iterator[Sample]:
    """The samples of one moment: every figure differs from the previous sample."""
    free = [random.randrange(GIB) for _ in range(gpus)]  # noqa: S311 - guards nothing
    uuids = [gpu(number).uuid for number in range(gpus)]
    yield Sample(
        at_seconds=at_seconds,
        devices=tuple(
            Device(
                uuid=uuids[number],
                index=number,
                name="NVIDIA H100 80GB HBM3",
                memory=Memory(total_bytes=80 * GIB, free_bytes=free[number], driver_reserved_bytes=600 * MIB),
                processes=(Process(pid=4242 + number, used_bytes=79 * GIB - free[number], name="VLLM::Worker"),)
                if lists_processes
                else None,
            )
            for number in range(gpus)
        ),
    )
    count = int(at_seconds) % 10**8 * 100
    busy = at_seconds % 3000 > 200
    engine = Engine(
        engine="0",
        kv_usage_ratio=random.random() if busy else 0.0,  # noqa: S311
        requests_running=300 if busy else 0,
        requests_waiting=0,
        requests_waiting_for_capacity=0,
        preemptions_total=0,
        prompt_tokens_total=count,
        generation_tokens_total=count,
        prefix_queries_total=count,
        prefix_hits_total=count // 2,
    )
    yield Sample(at_seconds=at_seconds + 0.1, engines=(engine,))
    yield Sample(
        at_seconds=at_seconds + 0.2,
        engines=(replace(engine, generation_tokens_total=count + 1),),
        host=tuple(
            HostProcess(pid=4242 + number, name="VLLM::Worker", resident_bytes=8 * GIB + count, anonymous_bytes=count)
            for number in range(gpus + 2)
        ),
    )
    yield Sample(
        at_seconds=at_seconds + 0.3,
        allocators=tuple(
            Allocator(
                device_uuid=uuids[number][4:],
                pid=4242 + number,
                pid_seen=True,
                start_ticks=1,
                age_seconds=random.random(),  # noqa: S311
                allocated_bytes=60 * GIB + free[number],
                reserved_bytes=62 * GIB + free[number],
                active_bytes=60 * GIB + free[number],
                requested_bytes=59 * GIB + free[number],
                inactive_split_bytes=free[number],
                alloc_retries_total=0,
                ooms_total=0,
                title=f"VLLM::Worker_TP{number}",
                tensor_rank=number,
            )
            for number in range(gpus)
        ),
    )
