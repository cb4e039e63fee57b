"""Runs in SGLang's own Python: imports it once, for a minute, and forks a server for each line of standard input.

A line is a JSON object: `args` of the server, its `log`, and `env`, the variables that it gets. Each server is the
leader of a session of its own and starts its schedulers as forks, too; apart from that it starts as by
`python -m sglang.launch_server`. The server's process id is printed as a line.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import sys


def main() -> None:
    """Fork servers until standard input ends."""
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for `spawn`, with which each scheduler would import everything again.
    multiprocessing.set_start_method = lambda *_, **__: None
    for name in ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.models.registry"):
        importlib.import_module(name)
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        server = json.loads(line)
        begun, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            file = os.open(server["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.close(begin)
            serve(server["args"], file, server["env"])
        # Its end of the pipe is closed once it has a session and a log.
        os.close(begin)
        os.read(begun, 1)
        os.close(begun)
        print(pid, flush=True)  # noqa: T201


def serve(args: list[str], file: int, env: dict[str, str]) -> None:
    """Become the server; returns never."""
    os.environ.update(env)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if plugin := env.get("KVDIAG_TEST_PLUGIN"):
        importlib.import_module(plugin).register()
    sys.argv = ["sglang.launch_server", *args]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
