"""`kvdiag drill`: serve a simulated server with a chosen fault until Ctrl-C; and the same as a child process."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

import kvdiag
from kvdiag.commands.interruption import end_on_signals
from kvdiag.errors import KvdiagError
from kvdiag.sim import SCENARIOS, Drill, Scenario, started_with

STOP_SECONDS = 5.0


class _WithScenarios(click.Command):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's form
        with formatter.section("Scenarios"):
            formatter.write_dl([(one.name, one.summary) for one in SCENARIOS.values()])


@click.command(cls=_WithScenarios)
@click.argument("scenario", default="healthy")
@click.argument("flags", nargs=-1, metavar="[-- FLAGS]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Loopback port; 0 picks a free one.")
@click.option("--until-eof", is_flag=True, hidden=True, help="Also stop when standard input ends.")
def command(scenario: str, flags: tuple[str, ...], port: int, until_eof: bool) -> int:
    """Run a simulated LLM server whose memory behaves as in SCENARIO, until Ctrl-C.

    It serves the completions and metrics of vLLM, or of the engine that SCENARIO names, on loopback, and has a
    simulated GPU. FLAGS are those of vllm serve, such as -- --max-num-seqs 6.
    """
    chosen = drilled(scenario, flags)
    try:
        with Drill(chosen, port=port) as drill:
            click.echo(f"{scenario}: {chosen.summary}")
            end_on_signals()
            click.echo(f"serving at {drill.url} until Ctrl-C; in another terminal: kvdiag run --url {drill.url}")
            sys.stdout.flush()
            if until_eof:
                sys.stdin.read()
            else:
                threading.Event().wait()
    except OSError as error:
        # asyncio's own text repeats the address
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise KvdiagError(f"cannot serve on port {port}: {reason}; --port 0 picks a free one") from error
    except KeyboardInterrupt:
        pass  # the normal end of a drill
    return 0


def drilled(name: str, flags: Sequence[str] = ()) -> Scenario:
    """The scenario of this name, started with `flags`.

    Raises:
        KvdiagError: there is no such scenario or flag.
    """
    if name not in SCENARIOS:
        raise KvdiagError(f"unknown scenario {name!r}: choose one of {', '.join(SCENARIOS)}")
    try:
        return started_with(SCENARIOS[name], flags)
    except ValueError as error:
        raise KvdiagError(str(error)) from error


@contextmanager
def simulated(scenario: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """Serve `scenario`, started with `flags`, in a process of its own, as a real server is, and yield its address.

    Raises:
        KvdiagError: there is no such scenario or flag, or it does not start.
    """
    drilled(scenario, flags)
    # A session of its own: Ctrl-C is for kvdiag, which still has requests to cancel on the server.
    # It exits with us even if we are killed: its standard input is then closed.
    # PYTHONPATH: the same package as ours, even inside a pyz file; -P: no module of the current directory.
    packages = [str(Path(kvdiag.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    arguments = [sys.executable, "-P", "-m", "kvdiag", "drill", scenario, "--until-eof", "--", *flags]
    with subprocess.Popen(  # noqa: S603 - our own program
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as server:
        try:
            lines = iter(server.stdout or ())
            address = next((found[0] for line in lines if (found := re.search(r"http://[\d.]+:\d+", line))), None)
            if address is None:
                raise KvdiagError(f"the simulated server exited at once with code {server.wait(STOP_SECONDS)}")
            yield address
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
