"""Print which share of small wrong versions of what judges and computes the tests notice.

python -m tests.bench.mutation                    150 mutants, drawn with seed 1
python -m tests.bench.mutation --count 500 --seed 7
python -m tests.bench.mutation --only kvdiag/kv/plan.py:120

First the tests run once, to learn which of them come by which line. Each mutant then runs, in a process of its own,
the tests that come by its line, the quickest first, until one fails. A mutant that is put where no test comes, or that
all tests let pass, has survived. Mutants are drawn from all there are, so that the share has a confidence interval.

Exit code 1 below 90 % killed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Literal

import jsonschema  # noqa: F401  what children need and no mutant changes is there before they are
import prometheus_client  # noqa: F401
import pytest
import structlog  # noqa: F401

from tests.bench.mutants import Mutant, mutants, mutated

ROOT = Path(__file__).parents[2]
TARGETS = ("kvdiag/diagnosis", "kvdiag/kv", "kvdiag/ledger.py")
TESTS = (
    "tests/diagnosis",
    "tests/kv",
    "tests/test_ledger.py",
    "tests/test_ledger_torch.py",
    "tests/test_ranks.py",
    "tests/test_traces.py",
    "tests/test_golden.py",
    "tests/test_soak_on_stories.py",
    "tests/corpus/test_traces.py",
)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "kvdiag/kv": ("tests/kv",),
    "kvdiag/ledger.py": ("tests/test_ledger", "tests/kv", "tests/test_ranks"),
    "kvdiag/diagnosis": (
        "tests/diagnosis",
        "tests/corpus",
        "tests/test_traces",
        "tests/test_golden",
        "tests/test_soak_on_stories",
    ),
}
"""Where the tests of each part are: what another part's happen to notice does not count."""

QUIET = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--hypothesis-seed=0")
GOAL = 0.9
COUNT = 150
MOST_SECONDS = 120.0
"""Of CPU, as long as the tests took while they were watched, which is ten times as long, for one mutant."""

TIMES_SLOWER = 1.0
AT_LEAST_SECONDS = 30.0
"""Of CPU. A mutant that takes so long, and so many times what the tests take unchanged, turns in circles: a failure."""

Z_95 = 1.96
IMPORT = "import"

Outcome = Literal["killed", "hangs", "survived", "not reached"]
Line = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tests come by which line, and how long each takes."""

    tests: dict[Line, list[str]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of its part that come by a mutant's function, quickest first; by an import come all."""
        found = {test for line in mutant.lines for test in self.tests.get((mutant.path, line), ())}
        if not mutant.lines:
            found = set(self.seconds)
        beside = next(tests for part, tests in BESIDE.items() if mutant.path.startswith(part))
        chosen, total = [], 0.0
        for test in sorted(found - {IMPORT}, key=lambda test: self.seconds.get(test, 0.0)):
            total += self.seconds[test] if test.startswith(beside) else 0.0
            if total > MOST_SECONDS:
                break
            if test.startswith(beside):
                chosen.append(test)
        return chosen


class _Watching:
    """A pytest plugin that keeps what of the targets each test comes by."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self._known: set[CodeType] = set()
        self._now: set[Line] = set()
        self.lines: dict[str, set[Line]] = defaultdict(set)
        self.seconds: dict[str, float] = {}

    def begin(self, test: str) -> None:
        self._known, self._now = set(), self.lines[test]
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        """Note every line of what is called: single lines would take ten times as long to learn."""
        path = self._files.get(frame.f_code.co_filename)
        if path is not None and frame.f_code not in self._known:
            self._known.add(frame.f_code)
            self._now.update((path, line) for _, _, line in frame.f_code.co_lines() if line is not None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = time.process_time()
        self.begin(item.nodeid)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[item.nodeid] = time.process_time() - begun

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.lines.pop(report.nodeid, None)


class _Chosen:
    """A pytest plugin that runs these tests alone, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self._order = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )


class _Changed(importlib.abc.MetaPathFinder):
    """Finds the changed module in the place of the real one."""

    def __init__(self, mutant: Mutant) -> None:
        self._file = ROOT / mutant.path
        self._name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._place = mutant.place

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, str(self._file))
        loader.place = self._place
        return importlib.util.spec_from_file_location(fullname, self._file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    place: int

    def get_code(self, fullname: str) -> CodeType:
        tree = mutated(Path(self.path).read_text(encoding="utf-8"), self.place)
        return compile(tree, self.path, "exec")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="FILE or FILE:LINE, all of its mutants")
    parser.add_argument("--found", type=Path, default=ROOT / ".cache" / "mutation.jsonl", help="where each is noted")
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)
    every = [mutant for path in _files() for mutant in mutants(path, (ROOT / path).read_text(encoding="utf-8"))]
    if chosen.only:
        path, _, line = chosen.only.partition(":")
        drawn = [m for m in every if m.path.startswith(path) and (not line or m.line == int(line))]
    else:
        drawn = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))  # noqa: S311  a draw, no secret
    reach = _reach()
    _say(f"{len(drawn)} of {len(every)} mutants, drawn with seed {chosen.seed}; {len(reach.seconds)} tests")
    everything = list(reach.seconds)
    if _in_child(lambda: _run(None, everything), AT_LEAST_SECONDS + TIMES_SLOWER * sum(reach.seconds.values())):
        _say("the tests do not pass without any change")
        return 3
    outcomes: list[tuple[Mutant, Outcome]] = []
    chosen.found.parent.mkdir(parents=True, exist_ok=True)
    with chosen.found.open("w", encoding="utf-8") as found:
        for mutant in drawn:
            outcome = _outcome(mutant, reach.of(mutant), reach)
            outcomes.append((mutant, outcome))
            found.write(json.dumps([mutant.path, mutant.line, mutant.says, outcome]) + "\n")
            found.flush()
            if outcome in ("survived", "not reached"):
                _say(f"{outcome:<12} {mutant.path}:{mutant.line}  {mutant.says}")
    return _table(outcomes)


def _files() -> list[str]:
    return sorted(
        str(file.relative_to(ROOT))
        for target in TARGETS
        for file in ([ROOT / target] if target.endswith(".py") else (ROOT / target).rglob("*.py"))
    )


def _reach() -> Reach:
    """What the tests come by, kept until a file of the package or of its tests changes."""
    state = hashlib.sha256()
    parts = [ROOT / "kvdiag", *(ROOT / test for test in TESTS)]
    for file in sorted(file for part in parts for file in (part.rglob("*.py") if part.is_dir() else [part])):
        state.update(file.read_bytes())
    kept = ROOT / ".cache" / f"reach-{state.hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        _in_child(lambda: _learn(kept), 3600.0)
    learnt = json.loads(kept.read_text(encoding="utf-8"))
    names = list(learnt["seconds"])
    tests = {
        (path, line): [IMPORT if number < 0 else names[number] for number in numbers]
        for path, line, numbers in learnt["lines"]
    }
    return Reach(tests, learnt["seconds"])


def _learn(kept: Path) -> int:
    watching = _Watching({str(ROOT / path): path for path in _files()})
    watching.begin(IMPORT)
    pytest.main([*(flag for flag in QUIET if flag != "-x"), *TESTS], plugins=[watching])
    seconds = {test: spent for test, spent in watching.seconds.items() if test in watching.lines}
    numbers = {**{test: number for number, test in enumerate(seconds)}, IMPORT: -1}
    tests: dict[Line, list[int]] = defaultdict(list)
    for test, lines in watching.lines.items():
        for line in lines:
            tests[line].append(numbers[test])
    lines_of_tests = [(path, line, known) for (path, line), known in tests.items()]
    kept.write_text(json.dumps({"lines": lines_of_tests, "seconds": seconds}), encoding="utf-8")
    return 0


def _outcome(mutant: Mutant, tests: list[str], reach: Reach) -> Outcome:
    if not tests:
        return "not reached"
    usual = sum(reach.seconds.get(test, 0.0) for test in tests)
    code = _in_child(lambda: _run(mutant, tests), AT_LEAST_SECONDS + TIMES_SLOWER * usual)
    if code is None:
        return "hangs"
    return "survived" if code == 0 else "killed"


def _run(mutant: Mutant | None, tests: list[str]) -> int:
    if mutant is not None:
        sys.meta_path.insert(0, _Changed(mutant))
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return int(pytest.main([*QUIET, *files], plugins=[_Chosen(tests)]))


def _in_child(run: Callable[[], int], limit_seconds: float) -> int | None:
    """Its exit code, or `None` where it took more CPU than that. What a child imports, the next one imports anew."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):
            os.dup2(silent, end)
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_seconds), int(limit_seconds)))
            code = run()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code


def _table(outcomes: list[tuple[Mutant, Outcome]]) -> int:
    _say("")
    _say(f"{'':<20}{'mutants':>8}{'killed':>8}{'survived':>10}{'share':>8}   95 % interval")
    for target in (*TARGETS, ""):
        of_it = [outcome for mutant, outcome in outcomes if mutant.path.startswith(target)]
        if of_it:
            killed = sum(outcome in ("killed", "hangs") for outcome in of_it)
            low, high = interval(killed, len(of_it))
            name = target or "all"
            share = f"{killed / len(of_it):>8.1%}   {low:.1%} to {high:.1%}"
            _say(f"{name:<20}{len(of_it):>8}{killed:>8}{len(of_it) - killed:>10}{share}")
    killed = sum(outcome in ("killed", "hangs") for _, outcome in outcomes)
    return 0 if killed >= GOAL * len(outcomes) else 1


def interval(successes: int, tries: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927, JASA 22: 209)."""
    share = successes / tries
    middle = share + Z_95**2 / (2 * tries)
    half = Z_95 * sqrt(share * (1 - share) / tries + Z_95**2 / (4 * tries**2))
    scale = 1 + Z_95**2 / tries
    return (middle - half) / scale, (middle + half) / scale


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
