"""A setting as it is typed for one engine, from its flags.json."""

import re

from kvdiag.engine_data import engine_data
from kvdiag.engine_memory import advice_engine

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
_IN_PARENTHESES = re.compile(r"\(([A-Z][A-Z0-9_]+)\)")


def typed(engine_name: str | None, setting: str, value: object = None) -> str | None:
    """The setting with its value: `--max-num-seqs 6`, `OLLAMA_NUM_PARALLEL=6`, `max_tokens: 6 in kv_cache_config`.

    Without a value the setting alone. `None` where the engine has no such setting; an engine that is not known is taken
    to be the one whose flags all advice names.
    """
    flag: str | None = engine_data("flags.json").get(engine_name or advice_engine(), {}).get(setting)
    if flag is None:
        return None
    flag = flag.split(", ")[0]
    if (variable := _IN_PARENTHESES.search(flag)) is not None:
        flag = variable[1]
    if value is None:
        return flag
    if _VARIABLE.fullmatch(flag):
        return f"{flag}={value}"
    name, _, file = flag.partition(" in ")
    return f"{name}: {value} in {file}" if file else f"{flag} {value}"
