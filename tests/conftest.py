"""What holds for every test: no bound on its time by default, and the order in which the tests are taken, by one worker
or by several side by side (`pytest -n 4 --dist loadgroup`).

Most tests take milliseconds; some wait half a minute for a server. Those that share one carry the mark `xdist_group`,
so that one worker takes them all. The groups are spread over the others: waiting and computing then go side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy is no mistake of what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

GOLDEN = Path(__file__).with_name("golden")

LAST_GROUP_AT = 0.7
"""Where among the other tests the last group begins: at their end it would be waited for alone."""


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
    """Make the mark known that only the order needs."""
    config.addinivalue_line("markers", "kills_the_server: comes after all others of its group")
