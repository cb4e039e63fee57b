"""The settings that a vLLM server logs: its arguments, its engine config line, the values that it resolves from them.

Pure. The lines are Python's repr of dicts and objects (`printed_settings`).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from typing import Any

from kvdiag.engines.printed_settings import argument_patterns, found_settings, message_patterns
from kvdiag.kv.calibration.engine_report import EngineSettings

_DATA = resources.files("kvdiag.engines.vllm")
_ARGUMENTS = argument_patterns(json.loads((_DATA / "arguments.json").read_bytes()))

PROCESS_TITLE = re.compile(r"vllm|enginecore|worker", re.IGNORECASE)
"""vllm/utils/system_utils.py::set_process_title."""

_PARALLEL = re.compile(r" (--tensor-parallel|--pipeline-parallel|-tp|-pp|--config|--distributed-executor)\b")

_ARGUMENT_LINE = re.compile(r"\bnon-default args: |\bargs: Namespace\(")
_CONFIG_LINE = re.compile(r"Initializing an? (?:V[01] )?LLM engine \(v")

WORDINGS = json.loads((_DATA / "wordings.json").read_bytes())
"""The messages of a start that report a figure, as regular expressions; `{…}` stands for the form of a number."""

_RESOLVED = message_patterns(WORDINGS["resolved"])
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
            arguments = found_settings(_ARGUMENTS, line)
        elif _CONFIG_LINE.search(line):
            config = found_settings(_ARGUMENTS, line)
            # Objects printed in the line have block sizes of other things.
            config.pop("block_size_tokens", None)
        # A drafter's architecture is resolved after the model's own.
        first = {"architecture": resolved["architecture"]} if "architecture" in resolved else {}
        resolved.update({**found_settings(_RESOLVED, line), **first})
        resolved.update({name: value for name, pattern, value in _SWITCHES if pattern.search(line)})
    return replace(EngineSettings(), **{**arguments, **resolved, **config})


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
