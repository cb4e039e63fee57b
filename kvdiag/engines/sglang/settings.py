"""The settings that an SGLang server logs as `server_args=`, and what its processes' titles and commands show.

Pure. The line is Python's repr of a dataclass, since 0.5.2x of a dict (`printed_settings`). A log that was put together
by hand may show the command line instead, over several lines.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from typing import Any

from kvdiag.engines.printed_settings import argument_patterns, command_patterns, found_settings, message_patterns
from kvdiag.kv.calibration.engine_report import EngineSettings

_DATA = resources.files("kvdiag.engines.sglang")
_TABLE = json.loads((_DATA / "arguments.json").read_bytes())
_ARGUMENTS, _COMMAND = argument_patterns(_TABLE), command_patterns(_TABLE)
# Those of TokenSettings that no other engine has.
_POOLS_ALONE = frozenset(field for field, *_ in _TABLE) - EngineSettings.__dataclass_fields__.keys()

_ABSENT = ("none", "auto")

ARGUMENT_LINE = re.compile(r"\bserver_args=(?:ServerArgs\(|\{)")
"""Each start prints it first."""

_COMMAND_LINE = re.compile(r"\blaunch_server\b|\bsglang[\s\"',]{1,6}serve\b|^[\s\"',+\[\\-]{0,80}--[a-z]")
"""How a server was started, or a further line of it that begins with a flag. Advice in messages begins otherwise."""

WORDINGS = json.loads((_DATA / "wordings.json").read_bytes())
"""The messages of a start that report a figure, as regular expressions; `{…}` stands for the form of a number."""

_RESOLVED = message_patterns(WORDINGS["resolved"])
"""Printed once the server has resolved a setting."""

PROCESS_TITLE = re.compile(r"sglang", re.IGNORECASE)
"""The launcher's command line, and `sglang::scheduler_TP0`, `sglang::detokenizer` (managers/scheduler.py)."""

_SCHEDULER = re.compile(r"sglang::scheduler((?:_[A-Z_]{1,8}\d{1,4})*)")
_RANK = re.compile(r"(DP|PP|TP)(\d{1,4})(?=_|$)")
_PARALLEL = re.compile(
    r" (?:--tensor-parallel-size|--tp-size|--tp|--pipeline-parallel-size|--pp-size|--nnodes|--config)\b"
)
_DISAGGREGATION = re.compile(r"--disaggregation-mode[ =](prefill|decode)\b")


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings of one start: what was resolved from the arguments, or read from the model, counts before these,
    and these before a command line.
    """
    command: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    for line in lines:
        if ARGUMENT_LINE.search(line):
            arguments = found_settings(_ARGUMENTS, line, absent=_ABSENT)
        elif "server_args" in line:
            # An excerpt of that line, or code in a traceback, which changes nothing of what is known.
            arguments = {**found_settings(_ARGUMENTS, line, absent=_ABSENT), **arguments}
        elif _COMMAND_LINE.search(line):
            command.update(found_settings(_COMMAND, line, absent=_ABSENT))
        # A drafter's weights and pool are loaded after the model's own.
        resolved = {**found_settings(_RESOLVED, line, absent=_ABSENT), **resolved}
    found = {**command, **arguments, **resolved}
    own = {name: found.pop(name) for name in _POOLS_ALONE if name in found}
    return replace(EngineSettings(), **found, flags=own)


def kv_connector(names: Iterable[str], commands: Iterable[str]) -> str | None:  # noqa: ARG001 - unused ones are there, too
    """What hands the KV pages of finished requests to another server, by the command lines; `None` without one."""
    found = next(filter(None, map(_DISAGGREGATION.search, commands)), None)
    return None if found is None else f"{found[1]} disaggregation"


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Tensor-parallel and pipeline-parallel ranks of one engine; `None` where the processes do not show them.

    Schedulers are called sglang::scheduler_DP1_PP0_TP3, without the parts that have one rank only. With data-parallel
    attention the ranks of one engine are those of its DP rank, though one numbering counts all of them.
    """
    ranks: dict[str | None, list[dict[str, str]]] = defaultdict(list)
    commands = list(commands)
    for command in commands:
        if (found := _SCHEDULER.match(command)) is not None:
            rank = dict(_RANK.findall(found[1]))
            ranks[rank.get("DP")].append(rank)
    if not ranks:
        return None
    # Ranks on other machines are no processes of this one.
    alone = all(len(own) == 1 and not own[0].keys() & {"TP", "PP"} for own in ranks.values())
    if not alone and any(re.search(r" --nnodes[ =](?!1\b)", command) for command in commands):
        return None
    tensor, pipeline = (max(len({rank.get(name) for rank in own}) for own in ranks.values()) for name in ("TP", "PP"))
    return tensor, pipeline
