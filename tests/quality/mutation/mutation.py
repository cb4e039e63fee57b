"""Print which share of small wrong versions of what judges and computes the tests notice.

python -m tests.quality.mutation.mutation                    300 mutants, drawn with seed 1
python -m tests.quality.mutation.mutation --count 1000 --seed 7
python -m tests.quality.mutation.mutation --only kvdiag/kv/fit/plan.py:120

The tests run once, to learn which of them come by which function. Each mutant then meets the tests that come by its
own, the quickest first, until one fails: in a fork of the process that has run them, in which the function's code is
another. What happens on import (tables, limits) is changed before a fresh process imports it, and meets the tests of
its part. A mutant that is put where no test comes, or that all tests let pass, has survived. Mutants are drawn from
all there are, so that the share has a confidence interval.

Exit code 1 below 90 % killed.
"""

import argparse
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Literal

import jsonschema  # noqa: F401  what children need and no mutant changes is there before they are
import prometheus_client  # noqa: F401
import pytest
import structlog  # noqa: F401
from _pytest.runner import runtestprotocol

from tests.quality.mutation.mutants import Mutant, mutants, mutated

ROOT = Path(__file__).parents[3]
TARGETS = ("kvdiag/diagnosis", "kvdiag/kv", "kvdiag/ledger.py")
TESTS = (
    "tests/unit/diagnosis",
    "tests/unit/kv",
    "tests/unit/test_ledger.py",
    "tests/unit/test_ledger_sums.py",
    "tests/unit/test_ledger_torch.py",
    "tests/unit/stats/test_rank_tests.py",
    "tests/golden/test_recorded_runs.py",
    "tests/golden/test_golden.py",
    "tests/golden/test_wording.py",
    "tests/quality/corpus/test_incident_traces.py",
)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "kvdiag/kv": ("tests/unit/kv",),
    "kvdiag/ledger.py": ("tests/unit/test_ledger", "tests/unit/kv", "tests/unit/stats"),
    "kvdiag/diagnosis": (
        "tests/unit/diagnosis",
        "tests/quality/corpus",
        "tests/golden",
    ),
}
"""Where the tests of each part are: what another part's happen to notice does not count."""

QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--hypothesis-seed=0")
GOAL = 0.9
COUNT = 300
MAX_SECONDS = 60.0
"""Of CPU, as long as the tests took while they were watched, which is more than they take, for one mutant."""

AT_LEAST_SECONDS = 30.0
"""Of CPU. A mutant that takes so long, and as long again as its tests take unchanged, turns in circles: a failure."""

Z_95 = 1.96
SAID = os.dup(1)
"""Where results go."""

Outcome = Literal["killed", "hangs", "survived", "not reached"]
Place = tuple[str, str, int]
"""A function: its module's path, its name, and its first line."""


@dataclass(slots=True)
class Known:
    """Which tests come by which function, and how long each takes."""

    tests: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def in_order(self, path: str, first: set[str], others: set[str]) -> list[str]:
        """Tests of a module's part, some before others, the quickest first, as many as there is time for."""
        beside = next(tests for part, tests in BESIDE.items() if path.startswith(part))
        chosen, total = [], 0.0
        for test in sorted(first | others, key=lambda test: (test not in first, self.seconds[test])):
            if test.startswith(beside):
                total += self.seconds[test]
                if total > MAX_SECONDS:
                    break
                chosen.append(test)
        return chosen

    def by_module(self, path: str) -> set[str]:
        """The tests that come by any function of a module."""
        return set().union(*(tests for place, tests in self.tests.items() if place[0] == path))


class _Session:
    """A pytest plugin that runs all tests once, watched, and then has the mutants of functions meet them."""

    def __init__(self, drawn: Sequence[Mutant], workers: int, kept: Path) -> None:
        self._drawn = drawn
        self._workers = workers
        self._kept = kept
        self._paths = {str(ROOT / path): path for path in _files()}
        self._known = Known()
        self._now: set[CodeType] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._learn(item)
        _say(f"{len(self._known.seconds)} tests, {sum(self._known.seconds.values()):.0f} s of CPU watched")
        gc.collect()
        gc.disable()
        gc.freeze()
        functions = self._functions()
        items = {item.nodeid: item for item in session.items}
        met = _shared_out(self._drawn, self._workers, lambda mutant: self._met(mutant, items, functions))
        self._kept.write_text(json.dumps([met, self._tests_on_import(), self._known.seconds]), encoding="utf-8")
        return True

    def _learn(self, item: pytest.Item) -> None:
        self._now = set()
        begun = time.process_time()
        sys.settrace(self._called)
        try:
            reports = runtestprotocol(item, nextitem=None, log=False)
        finally:
            sys.settrace(None)
        if any(report.failed for report in reports):
            _say(f"fails without any change: {item.nodeid}")
            return
        self._known.seconds[item.nodeid] = time.process_time() - begun
        for code in self._now:
            self._known.tests[self._place(code)].add(item.nodeid)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename in self._paths:
            self._now.add(frame.f_code)

    def _place(self, code: CodeType) -> Place:
        return (self._paths[code.co_filename], code.co_qualname, code.co_firstlineno)

    def _functions(self) -> dict[Place, list[FunctionType]]:
        """Every function of the targets that there is now, wherever it is kept."""
        found: dict[Place, list[FunctionType]] = defaultdict(list)
        gc.unfreeze()
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in self._paths:
                found[self._place(one.__code__)].append(one)
        gc.freeze()
        return found

    def _tests_on_import(self) -> dict[str, list[str]]:
        """For each module the tests that its mutants on import meet."""
        every = set(self._known.seconds)
        paths = {mutant.path for mutant in self._drawn}
        return {path: self._known.in_order(path, self._known.by_module(path), every) for path in paths}

    def _met(
        self, mutant: Mutant, items: dict[str, pytest.Item], functions: dict[Place, list[FunctionType]]
    ) -> Outcome | None:
        """What became of a mutant; `None` where no function is another for it."""
        if not mutant.lines:
            return None
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        file = str(ROOT / mutant.path)
        before = {self._place(code): code for code in _codes(compile(source, file, "exec"))}
        changed = [
            (function, code)
            for code in _codes(compile(mutated(source, mutant.place), file, "exec"))
            if before.get(self._place(code)) != code
            for function in functions.get(self._place(code), ())
        ]
        if not changed:
            return None
        first = set().union(*(self._known.tests[self._place(function.__code__)] for function, _ in changed))
        tests = self._known.in_order(mutant.path, first, set())
        if not tests:
            return "not reached"

        def run() -> int:
            for function, code in changed:
                function.__code__ = code
            _forget()
            return int(any(report.failed for test in tests for report in _reports(items[test])))

        limit_seconds = AT_LEAST_SECONDS + sum(self._known.seconds[test] for test in tests)
        return _outcome(_in_child(run, limit_seconds))


def _reports(item: pytest.Item) -> Iterator[pytest.TestReport]:
    yield from runtestprotocol(item, nextitem=None, log=False)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _forget() -> None:
    """Answers that functions remember were given by the unchanged code."""
    gc.unfreeze()
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper) and str(one.__module__).startswith("kvdiag"):  # noqa: SLF001
            one.cache_clear()


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
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)
    every = [mutant for path in _files() for mutant in mutants(path, (ROOT / path).read_text(encoding="utf-8"))]
    if chosen.only:
        path, _, line = chosen.only.partition(":")
        drawn = [m for m in every if m.path.startswith(path) and (not line or m.line == int(line))]
    else:
        drawn = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))  # noqa: S311  a draw, no secret
    _say(f"{len(drawn)} of {len(every)} mutants, drawn with seed {chosen.seed}")
    with tempfile.TemporaryDirectory(prefix="kvdiag-mutation-") as folder:
        kept = Path(folder) / "session.json"
        session = _Session(drawn, chosen.workers, kept)
        # This process imports nothing of the package, so that its children can import what is another.
        _in_child(lambda: int(pytest.main([*QUIET, *TESTS], plugins=[session])), None)
        if not kept.exists():
            _say("the tests do not run")
            return 3
        met, tests, seconds = json.loads(kept.read_text(encoding="utf-8"))

    def imported(mutant: Mutant) -> Outcome:
        usual = sum(seconds[test] for test in tests[mutant.path])
        return _outcome(_in_child(lambda: _imported(mutant, tests[mutant.path]), AT_LEAST_SECONDS + usual))

    left = [mutant for mutant, outcome in zip(drawn, met, strict=True) if outcome is None]
    outcomes = [(mutant, outcome) for mutant, outcome in zip(drawn, met, strict=True) if outcome is not None]
    _say(f"{len(left)} of them are met on import")
    then = _shared_out(left, chosen.workers, imported)
    return _table(outcomes + [(mutant, outcome or "survived") for mutant, outcome in zip(left, then, strict=True)])


def _files() -> list[str]:
    return sorted(
        str(file.relative_to(ROOT))
        for target in TARGETS
        for file in ([ROOT / target] if target.endswith(".py") else (ROOT / target).rglob("*.py"))
    )


def _imported(mutant: Mutant, tests: list[str]) -> int:
    sys.meta_path.insert(0, _Changed(mutant))
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return int(pytest.main(["-x", *QUIET, *files], plugins=[_Chosen(tests)]))


def _in_child(run: Callable[[], int], limit_seconds: float | None) -> int | None:
    """Its exit code, or `None` where it took more CPU than that."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for end in (0, 1, 2):
            os.dup2(silent, end)
        code = 3
        try:
            if limit_seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit_seconds), int(limit_seconds)))
            code = run()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code


def _shared_out(
    drawn: Sequence[Mutant], workers: int, meet: Callable[[Mutant], Outcome | None]
) -> list[Outcome | None]:
    """The outcome of each mutant, from so many processes; each survivor is printed at once."""
    folder = Path(tempfile.mkdtemp(prefix="kvdiag-mutation-"))
    children = []
    for number in range(workers):
        if (child := os.fork()) == 0:
            try:
                with (folder / str(number)).open("w", encoding="utf-8") as file:
                    for place in range(number, len(drawn), workers):
                        outcome = meet(drawn[place])
                        if outcome in ("survived", "not reached"):
                            _say(f"{outcome:<12} {drawn[place].path}:{drawn[place].line}  {drawn[place].says}")
                        file.write(json.dumps([place, outcome]) + "\n")
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    lines = [line for path in folder.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(folder)
    return [outcome for _, outcome in sorted(json.loads(line) for line in lines)]


def _outcome(code: int | None) -> Outcome:
    if code is None:
        return "hangs"
    return "survived" if code == 0 else "killed"


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
    # Past pytest, which keeps what its tests print.
    os.write(SAID, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
