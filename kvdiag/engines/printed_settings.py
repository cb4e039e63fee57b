"""Reads the settings that a server logs as Python's repr of its arguments or as flags, by a table of names. Pure.

Each value is found by its own bounded pattern, none is evaluated, and a value of an unexpected form is missing.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_TEXT_CHARACTERS = 512
_MOST = 1 << 40
_FORMS = {
    "whole": r"(\d{1,15})(?!\w|\.\d)",
    "given": r"'?([1-9][\d.]{0,20}|0\.\d{0,8}[1-9]|[A-Za-z/.~][^'\s,]{0,200})",
    "fraction": r"(\d(?:\.\d{1,20})?(?:e-\d{1,2})?)(?!\w|\.\d)",
    "flag": r"(True|False)\b",
    "negated": r"(True|False)\b",
    "word": r"'?(?:torch\.)?([A-Za-z][\w.-]{0,60})'?",
    "text": rf"'([^'\n]{{1,{MAX_TEXT_CHARACTERS}}})'",
}

_SWITCHES = ("flag", "negated")
_COMMAND_FORMS = {**_FORMS, "text": rf"([^\s'\"]{{1,{MAX_TEXT_CHARACTERS}}})"}

Patterns = tuple[tuple[str, str, re.Pattern[str]], ...]
"""Field of `EngineSettings`, form of its value, and its pattern."""


def argument_patterns(table: Iterable[Sequence[str]]) -> Patterns:
    """Of rows of field, name and form: `'name': value` of a dict, `name=value` of a Namespace or a dataclass."""
    return tuple(
        (field, form, re.compile(rf"(?<!\w)'?(?:{names})'?(?:=|: ){_FORMS[form]}")) for field, names, form in table
    )


def command_patterns(table: Iterable[Sequence[str]]) -> Patterns:
    """Of the same rows: `--name value`, `--name=value`, quoted or in a list; a switch has no value."""
    return tuple(
        (
            field,
            form,
            re.compile(
                rf"(?<![\w-])--(?:{names.replace('_', '-')})"
                + ("(?![\\w=-])" if form in _SWITCHES else rf"['\"]?(?:=|[\s,]{{1,9}})['\"]?{_COMMAND_FORMS[form]}")
            ),
        )
        for field, names, form in table
    )


def message_patterns(table: Iterable[Sequence[str]]) -> Patterns:
    """Of rows of field, form and wording, in which `{form}` stands for the value."""
    return tuple((field, form, re.compile(text.replace(f"{{{form}}}", _FORMS[form]))) for field, form, text in table)


def found_settings(patterns: Patterns, line: str, *, absent: Sequence[str] = ("none",)) -> dict[str, Any]:
    """The settings in a line; a text in `absent` is none."""
    found: dict[str, Any] = {}
    for name, form, pattern in patterns:
        match = pattern.search(line)
        text = None if match is None else match[1] if pattern.groups else "True"
        if text is not None and name not in found and (value := _value(form, text, absent)) is not None:
            found[name] = value
    return found


def _value(form: str, text: str, absent: Sequence[str]) -> Any:
    if form in ("text", "word"):
        return None if text.lower() in absent else text
    if form in _SWITCHES:
        return (text == "True") is (form == "flag")
    if form == "given":
        return None if text.lower() in absent else True
    if form == "fraction":
        return ratio if 0 < (ratio := float(text)) <= 1 else None
    return number if 0 < (number := int(text)) <= _MOST else None
