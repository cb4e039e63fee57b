"""Play every scenario on the GPU at hand, keep the traces and the figures, and print the table.

python -m tests.integration.gpu.check --out DIR [--python PYTHON] [SCENARIO ...]

PYTHON is the one that has torch with CUDA, by default the one that runs this, which needs kvdiag on its path with
kvdiag's own dependencies. Exit codes: 0 all as it should be, 2 something is not, 3 could not be run here, and why.
"""

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.integration.gpu.figures import Machine, Result, keep, table

OK, WRONG, NOT_HERE = 0, 2, 3
PROBE_SECONDS = 300.0
MEMORY = "/dev/shm"  # noqa: S108 - where a volume in memory is, as the agents' folder should be
PROBE = """
import json, platform
try:
    import torch
    print(json.dumps({
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None}))
except ImportError as error:
    print(json.dumps({"missing": str(error)}))
"""


class NotHereError(Exception):
    """Why there is nothing to play on; one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.gpu.check", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the traces and figures.json")
    parser.add_argument("--python", default=sys.executable, help="the Python with torch (default: this one)")
    parser.add_argument("--brief", action="store_true", help="costs so shortly that they say nothing")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="all of them by default")
    chosen = parser.parse_args(arguments)
    try:
        where = machine(chosen.python)
        _make(chosen.out)
        results = asyncio.run(play(chosen.python, chosen.out, chosen.scenarios, brief=chosen.brief))
    except NotHereError as reason:
        sys.stderr.write(f"gpu-check: not run: {reason}\n")
        return NOT_HERE
    keep(chosen.out / "figures.json", where, results)
    sys.stdout.write(table(where, results))
    return OK if all(result.ok for result in results) else WRONG


def machine(python: str) -> Machine:
    """The GPU, driver and torch at hand.

    Raises:
        NotHereError: one of them is missing, or kvdiag's own dependencies are.

    """
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        told = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise NotHereError(f"{python} cannot be asked for its torch ({type(error).__name__})") from error
    if not told or "missing" in told:
        reason = told.get("missing") or (done.stderr.splitlines() or ["it said nothing"])[-1]
        raise NotHereError(f"{python} has no torch ({reason[:160]}): name one that has, GPU_PYTHON=...")
    if told["gpu"] is None:
        raise NotHereError(f"torch {told['torch']} of {python} finds no GPU to use through CUDA")
    return Machine(
        gpu=told["gpu"],
        driver=_driver(),
        torch=told["torch"],
        cuda=str(told["cuda"]),
        python=told["python"],
        kvdiag=_kvdiag(),
    )


def _kvdiag() -> str:
    try:
        import kvdiag  # noqa: PLC0415 - a missing package is reported in one line
        import tests.integration.gpu.scenarios  # noqa: F401, PLC0415 - as above
    except ImportError as error:
        raise NotHereError(f"kvdiag cannot be imported by {sys.executable} ({error})") from error
    return kvdiag.__version__


def _driver() -> str:
    try:
        import pynvml  # noqa: PLC0415 - as above
    except ImportError as error:
        raise NotHereError(f"nvidia-ml-py is not on the path of {sys.executable} ({error})") from error
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        # What kvdiag itself holds is measured from before it has asked anything.
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NotHereError(f"NVML does not answer ({error})") from error
    return version


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotHereError(f"{out} cannot be written: {error.strerror}") from error


def _memory() -> str | None:
    return MEMORY if Path(MEMORY).is_dir() else None


async def play(python: str, out: Path, names: Sequence[str], *, brief: bool) -> tuple[Result, ...]:
    """Every scenario, or those named, one after the other.

    Raises:
        NotHereError: a name is none.

    """
    import structlog  # noqa: PLC0415 - as the next ones

    from tests.integration.gpu.scenario import Run, result  # noqa: PLC0415 - needs what `_kvdiag` has asked for
    from tests.integration.gpu.scenarios import BY_NAME, SCENARIOS  # noqa: PLC0415 - as above

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if strange := [name for name in names if name not in BY_NAME]:
        raise NotHereError(f"no scenario is called {strange[0]}: there are {', '.join(BY_NAME)}")
    results = []
    for name in names or [scenario.name for scenario in SCENARIOS]:
        sys.stderr.write(f"gpu-check: {name}\n")
        with tempfile.TemporaryDirectory(prefix=f"kvdiag-{name}-", dir=_memory()) as work:
            run = Run(python=python, work=Path(work), trace=out / f"{name}.jsonl.gz", brief=brief)
            results.append(await result(BY_NAME[name], run))
    return tuple(results)


if __name__ == "__main__":
    sys.exit(main())
