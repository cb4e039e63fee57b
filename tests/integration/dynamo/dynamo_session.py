"""Dynamo's front end and two simulated workers, and kvdiag's commands, in a network of their own.

Dynamo's event plane listens on every address, and its ports are fixed: `unshare` runs this program in a namespace. It
prints the outcome of every command as JSON. Arguments: the environment's Python, a folder for files.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
FRONT, WORKER = "http://127.0.0.1:8000", "http://127.0.0.1:8081"
START_SECONDS = 120.0
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = struct.unpack("16sh", fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0))[:18])[1]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def _answer(path: str, body: object = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(FRONT + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def _workers() -> int:
    try:
        listed = _answer("/health")
    except OSError:
        return 0
    instances = listed.get("instances", []) if isinstance(listed, dict) else []
    return sum(one["endpoint"] == "generate" for one in instances)


def _kvdiag(*arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "kvdiag", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def _session(python: str, folder: Path, stack: ExitStack) -> dict[str, object]:
    own = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST")
    environ = os.environ | dict.fromkeys(own, "127.0.0.1")
    environ |= {"HF_HUB_OFFLINE": "1", "DYN_FILE_KV": str(folder / "discovery")}
    found = ("--discovery-backend", "file")

    def start(module: str, *arguments: str, port: str = "-1") -> None:
        log = stack.enter_context((folder / f"{module}{port}.log").open("wb"))
        command = [python, "-m", f"dynamo.{module}", *found, *arguments]
        process = subprocess.Popen(command, env=environ | {"DYN_SYSTEM_PORT": port}, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)

    start("frontend", "--http-host", "127.0.0.1", "--http-port", "8000")
    engine = ("--model-path", str(HERE / "model"), "--model-name", "tiny", "--engine-type", "vllm")
    size = ("--block-size", "16", "--num-gpu-blocks-override", "4096")
    for port in ("8081", "8082"):
        start("mocker", *engine, *size, port=port)
    until_seconds = time.monotonic() + START_SECONDS
    while _workers() < 2:
        if time.monotonic() > until_seconds:
            raise SystemExit(f"Dynamo has not started within {START_SECONDS:g} s; see {folder}")
        time.sleep(0.2)
    outcomes: dict[str, object] = {"before": _kvdiag("doctor", "--url", WORKER, "--output", "json")}
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
    for _ in range(8):  # the front end chooses a worker for each
        _answer("/v1/completions", body)
    outcomes["worker"] = _kvdiag("doctor", "--url", WORKER, "--output", "json")
    outcomes["front"] = _kvdiag("doctor", "--url", FRONT, "--output", "json")
    through = ("--url", FRONT, "--metrics-url", WORKER, "--output", "json")
    outcomes["both"] = _kvdiag("doctor", *through)
    outcomes["run"] = _kvdiag("run", *through, "--soak", "5m", "--soak-cycle", "3")
    return outcomes


if __name__ == "__main__":
    _loopback_up()
    with ExitStack() as stack:
        print(json.dumps(_session(sys.argv[1], Path(sys.argv[2]), stack)))  # noqa: T201
