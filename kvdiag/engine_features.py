"""Which features of an engine are turned on, by the command lines of its processes or the arguments that it logs. Pure.

The data is engines/NAME/features.json: feature to the flags that turn it on. A feature that no flag shows is off only
where all of the command line could be read, and no file adds to it.
"""

import re
from collections.abc import Iterable
from functools import cache

from kvdiag.engine_data import engine_data

_OFF = r"(?!['\"]|None\b|False\b|false\b|0\b|\[\]|\{\})"
"""What no value of a feature that is on begins with, after a quote."""
_ARGUMENTS = re.compile(r"(?:\bnon-default args: |\bargs: Namespace\(|\bserver_args=)[^\n]*")
MAX_LINE_CHARACTERS = 20_000
_FILE = re.compile(r"--config[ =]")


def known_features(engine_name: str | None) -> tuple[str, ...]:
    """The features of an engine that its command line shows."""
    return tuple(engine_data("features.json").get(engine_name or "", {}))


def features_on(engine_name: str | None, commands: Iterable[str]) -> tuple[str, ...] | None:
    """The features that command lines turn on, sorted; `None` where they do not show all.

    `commands` are those of the server's processes; one that cannot be read is empty. Of processes that are renamed, as
    engine cores and workers are, the server's own shows the flags.
    """
    lines = [line for line in commands if " --" in line or " -" in line]
    if not lines or not known_features(engine_name) or any(map(_FILE.search, lines)):
        return None
    return tuple(name for name, flag, _ in _patterns(engine_name) if any(map(flag.search, lines)))


def features_logged(engine_name: str | None, log: str) -> tuple[str, ...] | None:
    """The features that the arguments of the last start in a log turn on; `None` where it has none.

    vLLM logs those that are not the default, or all of them, SGLang all of them: what is not there is off.
    """
    lines = [found[0][:MAX_LINE_CHARACTERS] for found in _ARGUMENTS.finditer(log)]
    if not lines or not known_features(engine_name):
        return None
    return tuple(name for name, _, logged in _patterns(engine_name) if logged.search(lines[-1]))


@cache
def _patterns(engine_name: str | None) -> tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...]:
    """Each feature with what is found in a command line, and in logged arguments, which Python has written."""
    features = sorted(engine_data("features.json").get(engine_name or "", {}).items())
    return tuple((name, re.compile(_typed(flags)), re.compile(_written(flags))) for name, flags in features)


def _typed(flags: list[str]) -> str:
    written = (
        re.escape(flag) + (rf"[ =]{re.escape(value)}" if value else r"(?=[ =.]|$)") for flag, value in _split(flags)
    )
    return rf"(?:^|[ =])(?:{'|'.join(written)})"


def _written(flags: list[str]) -> str:
    names = (
        (re.escape(flag.lstrip("-").replace("-", "_")), re.escape(value) if value else _OFF)
        for flag, value in _split(flags)
    )
    return "|".join(rf"\b{name}['\"]?\s{{0,2}}+[=:]\s{{0,2}}+['\"]?+{value}" for name, value in names)


def _split(flags: list[str]) -> list[tuple[str, str]]:
    """Flags, each with how its value begins where only some of its values turn the feature on."""
    return [(flag, value) for flag, _, value in (one.partition(" ") for one in flags)]
