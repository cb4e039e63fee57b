"""What is known of each verdict: symptom, likely cause, how to confirm it, what to change. One entry for every id.

The texts stand in knowledge.json, apart from the rules, so that advice can be reviewed and changed without touching a
judgement, with the flags of one engine. Another engine's own mechanisms stand in engines/NAME/knowledge.json; elsewhere
the flags are replaced by that engine's (flags.json), or by the setting's name. A rule or the post-mortem brings its own
text only where it is computed from the figures; `diagnose` fills in the others. A verdict without an entry is an error
of the program, and the entry names its runbook.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from kvdiag.engine_data import engine_data
from kvdiag.engine_memory import advice_engine, engine_title


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verdict explained to the person who has to act on it."""

    symptom: str
    likely_cause: str
    confirm: str
    remedy: str
    runbook: str


KNOWLEDGE: Mapping[str, Entry] = {
    verdict: Entry(runbook=f"alerts/runbooks/{verdict}.md", **texts)
    for verdict, texts in json.loads(
        resources.files("kvdiag.diagnosis").joinpath("knowledge.json").read_text(encoding="utf-8")
    ).items()
}

TEXTS = ("symptom", "likely_cause", "confirm", "remedy")


def known_engines() -> tuple[str, ...]:
    """The engines that advice can be given for, by name."""
    return tuple(engine_data("flags.json"))


def entry_of(verdict: str, engine_name: str | None = None) -> Entry:
    """The entry of a verdict for an engine; the general one where the engine is not known."""
    entry = KNOWLEDGE[verdict]
    own = engine_data("knowledge.json").get(engine_name or "", {}).get(verdict, {})
    texts = {name: own.get(name) or worded(getattr(entry, name), engine_name) for name in TEXTS}
    return replace(entry, **texts)


def worded(advice: str, engine_name: str | None) -> str:
    """Advice with the flags and names of the engine that it is for."""
    for pattern, its in _words(engine_name):
        advice = pattern.sub(its.replace("\\", r"\\"), advice)
    return advice


def with_assumption(advice: str) -> str:
    """Advice for a failure of an engine that is not known: with whose flags it names, if it names any."""
    flags = engine_data("flags.json")[advice_engine()].values()
    if not any(flag in advice for flag in flags):
        return advice
    return f"{advice} The flags are {engine_title(advice_engine())}'s: the text does not show which engine failed."


@cache
def _words(engine_name: str | None) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What is replaced in an advice, whole phrases before their parts; nothing for the engine whose flags it names."""
    flags = engine_data("flags.json")
    ours = advice_engine()
    if engine_name in {None, ours} or engine_name not in flags:
        return ()
    its = flags[engine_name]
    words = {flag: its.get(setting, f"the {setting.replace('_', ' ')}") for setting, flag in flags[ours].items()}
    longest_first = sorted(words.items(), key=lambda pair: -len(pair[0]))
    return tuple((re.compile(rf"(?<![\w-]){re.escape(old)}(?![\w-])"), new) for old, new in longest_first)
