"""`kvdiag drill`: serve a simulated server with a chosen fault until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import click

from kvdiag.errors import KvdiagError
from kvdiag.sim import SCENARIOS, Drill


@click.command()
@click.argument("story", default="healthy")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on loopback; 0 picks a free one.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End with standard input as well.")
def command(story: str, port: int, until_eof: bool) -> int:
    """Serve a simulated LLM server whose memory behaves as STORY says, until Ctrl-C.

    It speaks vLLM's completions and metrics over HTTP on loopback, and brings a simulated GPU.
    """
    if story not in SCENARIOS:
        raise KvdiagError(f"there is no story {story!r}; there are {', '.join(SCENARIOS)}")
    try:
        with Drill(SCENARIOS[story], port=port) as drill:
            click.echo(f"{story}: {SCENARIOS[story].summary}")
            signal.signal(signal.SIGTERM, _interrupt)
            click.echo(f"serving at {drill.url} until Ctrl-C; in another terminal: kvdiag run --url {drill.url}")
            sys.stdout.flush()
            if until_eof:
                sys.stdin.read()
            else:
                threading.Event().wait()
    except OSError as error:
        reason = (
            os.strerror(error.errno).lower() if error.errno else str(error)
        )  # asyncio's own text repeats the address
        raise KvdiagError(f"cannot serve on port {port}: {reason}; --port 0 takes a free one") from error
    except KeyboardInterrupt:
        pass  # the way in which a drill ends
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal handler's form
    raise KeyboardInterrupt
