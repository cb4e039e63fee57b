"""The settings that a vLLM server logs: its arguments, its engine config line, the values that it resolves from them.

Pure. The lines are Python's repr of dicts and objects; each value is found by its own bounded pattern, none is
evaluated, and a value of an unexpected form is missing.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from typing import Any

from kvdiag.kv.calibration.engine_report import EngineSettings

MAX_TEXT_CHARACTERS = 512
_MOST = 1 << 40
_FORMS = {
    "whole": r"(\d{1,15})(?!\w|\.\d)",
    "fraction": r"(\d(?:\.\d{1,20})?(?:e-\d{1,2})?)(?!\w|\.\d)",
    "flag": r"(True|False)\b",
    "word": r"'?(?:torch\.)?([A-Za-z][\w.-]{0,60})'?",
    "text": rf"'([^'\n]{{1,{MAX_TEXT_CHARACTERS}}})'",
}

_DATA = resources.files("kvdiag.engines.vllm")
_ARGUMENTS = tuple(
    # `'name': value` of a dict, `name=value` of a Namespace or a config line.
    (field, form, re.compile(rf"(?<![\w])'?{name}'?(?:=|: ){_FORMS[form]}"))
    for field, name, form in json.loads((_DATA / "arguments.json").read_bytes())
)
"""Field of `EngineSettings`, form of its value, and its pattern among the arguments or in the config line."""

PROCESS_TITLE = re.compile(r"vllm|enginecore|worker", re.IGNORECASE)
"""vllm/utils/system_utils.py::set_process_title."""

_PARALLEL = re.compile(r" (--tensor-parallel|--pipeline-parallel|-tp|-pp|--config|--distributed-executor)\b")

_ARGUMENT_LINE = re.compile(r"\bnon-default args: |\bargs: Namespace\(")
_CONFIG_LINE = re.compile(r"Initializing an? (?:V[01] )?LLM engine \(v")

WORDINGS = json.loads((_DATA / "wordings.json").read_bytes())
"""The messages of a start that report a figure, as regular expressions; `{…}` stands for the form of a number."""

_RESOLVED = tuple(
    (name, form, re.compile(wording.replace(f"{{{form}}}", _FORMS[form])))
    for name, form, wording in WORDINGS["resolved"]
)
"""Printed by the server once it has resolved a setting."""

_SWITCHES = tuple((name, re.compile(wording), value) for name, wording, value in WORDINGS["switches"])


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings of one start; of two lines that report the same one, the later. What the engine's config line says
    stands above what was asked for: it is what came of it, and of the model itself where a drafter is loaded too.
    """
    arguments: dict[str, Any] = {}
    config: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    for line in lines:
        if _ARGUMENT_LINE.search(line):
            arguments = _found(_ARGUMENTS, line)
        elif _CONFIG_LINE.search(line):
            config = _found(_ARGUMENTS, line)
            # Objects printed in the line have block sizes of other things.
            config.pop("block_size_tokens", None)
        # A drafter's architecture is resolved after the model's own.
        first = {"architecture": resolved["architecture"]} if "architecture" in resolved else {}
        resolved.update({**_found(_RESOLVED, line), **first})
        resolved.update({name: value for name, pattern, value in _SWITCHES if pattern.search(line)})
    return replace(EngineSettings(), **{**arguments, **resolved, **config})


def _found(table: Iterable[tuple[str, str, re.Pattern[str]]], line: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, form, pattern in table:
        match = pattern.search(line)
        if match is not None and name not in found and (value := _value(form, match[1])) is not None:
            # The argument switches the hybrid manager off.
            found[name] = not value if name == "hybrid_manager" else value
    return found


def _value(form: str, text: str) -> Any:
    if form in ("text", "word"):
        return None if text.lower() == "none" else text
    if form == "flag":
        return text == "True"
    if form == "fraction":
        return ratio if 0 < (ratio := float(text)) <= 1 else None
    return number if 0 < (number := int(text)) <= _MOST else None


_CONNECTOR = re.compile(r"\bkv_connector[\"'\s:=]{1,8}([A-Za-z]\w{0,60})")
_CONNECTOR_METRICS = re.compile(r"vllm:(nixl|mooncake)_")
"""distributed/kv_transfer/kv_connector/v1/nixl/stats.py and mooncake/store/metrics.py; other connectors have none."""


def kv_connector(names: Iterable[str], commands: Iterable[str]) -> str | None:
    """The connector of --kv-transfer-config, or the one whose metrics there are; `None` where neither shows one."""
    found = next(filter(None, map(_CONNECTOR.search, commands)), None)
    found = found or next(filter(None, map(_CONNECTOR_METRICS.match, names)), None)
    return None if found is None else found[1]


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Tensor-parallel and pipeline-parallel ranks of one engine; `None` where the processes do not show them.

    Workers are called VLLM::Worker_PP1_TP3, without the part that has one rank only
    (vllm/v1/executor/multiproc_executor.py::WorkerProc.setup_proc_title_and_log_prefix). An engine without workers is
    one rank (UniProcExecutor), unless its command asks for more (Ray's workers are no children of the server).
    Context parallelism is not modelled: `None`.
    """
    commands = list(commands)
    workers = [command.removeprefix("VLLM::Worker") for command in commands if command.startswith("VLLM::Worker")]
    if not workers:
        alone = any(command.startswith("VLLM::EngineCore") for command in commands)
        return (1, 1) if alone and not any(_PARALLEL.search(command) for command in commands) else None
    parts = [dict(re.findall(r"_([A-Z]{2,3})(\d{1,4})", worker)) for worker in workers]
    if any(name in part for part in parts for name in ("PCP", "DCP")):
        return None
    tensor, pipeline = (1 + max(int(part.get(name, 0)) for part in parts) for name in ("TP", "PP"))
    return tensor, pipeline
