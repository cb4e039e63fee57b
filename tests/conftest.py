"""What holds for every test: its surroundings, which tests are long, in which order they run, and where the time goes.

Surroundings: settings of the developer's shell that kvdiag or its programs read are taken away, so that a test sees the
same everywhere. Length: `LONG` names what `make test` leaves to `make test-all`. Order: most tests take milliseconds,
some wait half a minute for a server. Those that share one carry the mark `xdist_group`, so that one worker takes them
all (`pytest -n 4 --dist loadgroup`); the groups are spread over the others, so that waiting and computing overlap.
Time: the slowest groups are printed at the end.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy is no mistake of what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

SLOWEST = 10

FOREIGN = frozenset(
    (
        *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "LANGUAGE"),
        *("VLLM_PLUGINS", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CUDA_VISIBLE_DEVICES"),
        *("MAKEFLAGS", "MFLAGS", "MAKELEVEL"),
    )
)
"""Variables that change what kvdiag, rich, click, vLLM or make do."""

LONG = (
    "integration/vllm/test_architectures_on_vllm.py",
    "integration/vllm/test_fit_on_vllm.py",
    "quality/faults",
)
"""Files and folders whose every test is long: they get the mark `long`, as single tests elsewhere do."""

LAST_GROUP_AT = 0.7
"""Where among the other tests the last group begins: at their end it would be waited for alone."""


LONGEST_ID = 200
"""Characters of one value in a test's name: every worker sends all names to the leading process."""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long text or long bytes by its length."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what stands in a long file, before tests are chosen by their marks."""
    if any(item.path.is_relative_to(TESTS / one) for one in LONG):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the groups, the largest first, over the other tests in their random order."""
    groups: dict[str, list[pytest.Item]] = {}
    alone: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        (alone if mark is None else groups.setdefault(mark.args[0], [])).append(item)
    ordered: list[pytest.Item] = []
    taken = 0
    for place, group in enumerate(sorted(groups.values(), key=len, reverse=True)):
        until = int(LAST_GROUP_AT * len(alone) * place / len(groups))
        ordered += [*alone[taken:until], *sorted(group, key=_ends_what_it_shares)]
        taken = until
    items[:] = [*ordered, *alone[taken:]]


def _ends_what_it_shares(item: pytest.Item) -> bool:
    return item.get_closest_marker("kills_the_server") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """One flag rewrites every golden file."""
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file under tests/golden/: `golden("terminal/healthy.txt", text)`.

    With `--update-golden` the file is written instead; its difference is then reviewed as text.
    """
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{name} is not there yet: run pytest with --update-golden, then review it"
        assert file.read_text(encoding="utf-8") == text

    return compare


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known that only the order needs, and take away what a developer's shell may set."""
    config.addinivalue_line("markers", "kills_the_server: comes after all others of its group")
    for name in list(os.environ):
        if (name.startswith("KVDIAG_") and name != "KVDIAG_TEST_CACHE") or name in FOREIGN:
            del os.environ[name]
    # Servers of tests are on loopback, where no proxy is asked; packages may well come through one.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup; a process that is started inherits what is ignored, but not a handler.
        signal.signal(signal.SIGHUP, lambda *_: None)


class Durations:
    """Sums what tests took by the group that shares a server, or by their file, and prints the slowest."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; xdist appends `@group` to the name of a test that is in one."""
        file, _, test = report.nodeid.partition("::")
        name = test.rpartition("@")[2] if "@" in test and not test.endswith("]") else file
        self._seconds[name] += report.duration
        self._tests[name].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest groups."""
        slowest = sorted(self._seconds.items(), key=lambda one: one[1], reverse=True)[:SLOWEST]
        if len(self._seconds) < SLOWEST:
            return
        terminalreporter.section(f"slowest {len(slowest)} groups")
        for name, seconds in slowest:
            terminalreporter.write_line(f"{seconds:7.1f} s  {len(self._tests[name]):4d} tests  {name}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Sum durations where reports come together: in the one process, or in that which leads the workers."""
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Durations(), "kvdiag-durations")
