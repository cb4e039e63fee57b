"""Look for input that a reader neither reads nor refuses, led by which lines it reaches (atheris, libFuzzer).

python -m tests.quality.fuzz                      a minute for each reader
python -m tests.quality.fuzz page log --seconds 600
python -m tests.quality.fuzz --keep               and keep the smallest set that reaches as much in
tests/quality/fuzz/corpus

What is found is written to .cache/fuzz/NAME-crash-…: put it into the corpus, and mend the reader.
"""

import argparse
import importlib
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CORPUS = Path(__file__).with_name("corpus")
WORK = ROOT / ".cache" / "fuzz"
ONE = "--one"
"""First argument of the process that fuzzes one reader: what follows is libFuzzer's."""

SECONDS = 60
MAX_BYTES = 4096
MAX_KEPT = 24
"""Files of the corpus for each reader: those that reach most, as libFuzzer orders them."""

ONE_SECONDS = 10
"""For one input: what takes longer is found as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz one reader after the other."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [ONE]:
        return _fuzz(given[1], given[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--keep", action="store_true")
    chosen = parser.parse_args(arguments)
    seeded = _seeded()
    failed = 0
    spent_seconds = 0.0
    for name in chosen.readers or seeded:
        work = WORK / name
        flags = [f"-max_total_time={chosen.seconds}", f"-max_len={MAX_BYTES}", f"-timeout={ONE_SECONDS}"]
        flags += ["-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={WORK}/{name}-"]
        before_seconds = _children_seconds()
        ended = _one(name, [str(work), *flags])
        took_seconds = _children_seconds() - before_seconds
        spent_seconds += took_seconds
        runs = [line.split()[-1] for line in ended.splitlines() if "number_of_executed_units" in line]
        problems = [line for line in ended.splitlines() if "Test unit written" in line or "SUMMARY" in line]
        problems = problems or ([] if runs else [f"did not run: {WORK / name}.log"])
        failed += bool(problems)
        cost = f"{runs[-1] if runs else '?':>10} runs {took_seconds:>6.0f} s of CPU"
        sys.stdout.write(f"{name:<15}{cost}  {'; '.join(problems) or 'nothing'}\n")
        sys.stdout.flush()
        if chosen.keep:
            _keep(name)
    sys.stdout.write(f"{spent_seconds / 60:.1f} min of CPU, {failed} readers with something found\n")
    return 1 if failed else 0


def _children_seconds() -> float:
    """CPU of all processes that were waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seeded() -> list[str]:
    """The readers' names; each has something to begin with."""
    from tests.quality.fuzz.seeds import seeds  # noqa: PLC0415  the instrumented child imports nothing of the package before

    names: dict[str, None] = {}
    for number, (name, data) in enumerate(seeds()):
        names[name] = None
        (WORK / name).mkdir(parents=True, exist_ok=True)
        (WORK / name / f"seed-{number}").write_bytes(data)
    for path in CORPUS.glob("*/*"):
        (WORK / path.parent.name).mkdir(parents=True, exist_ok=True)
        (WORK / path.parent.name / path.name).write_bytes(path.read_bytes())
    return sorted(names)


def _one(name: str, flags: list[str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.quality.fuzz", ONE, name, *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    (WORK / f"{name}.log").write_bytes(ended.stderr)
    return ended.stderr.decode(errors="replace")


def _keep(name: str) -> None:
    """Put the least set of inputs that reaches as much into the corpus."""
    least = WORK / f"{name}-least"
    least.mkdir(exist_ok=True)
    for path in least.iterdir():
        path.unlink()
    _one(name, ["-merge=1", f"-max_len={MAX_BYTES}", str(least), str(WORK / name)])
    kept = CORPUS / name
    kept.mkdir(exist_ok=True)
    for path in sorted(least.iterdir(), key=lambda path: path.stat().st_size)[-MAX_KEPT:]:
        (kept / path.name[:12]).write_bytes(path.read_bytes())


def _fuzz(name: str, flags: list[str]) -> int:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["kvdiag"]):
        from tests.quality.fuzz.readers import READERS  # noqa: PLC0415  has to be imported under the instruments
    logging.disable()
    os.chdir(ROOT)
    atheris.Setup([name, *flags], READERS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
