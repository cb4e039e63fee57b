"""The engines that kvdiag can read, a folder for each; nothing outside names one of them."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

from kvdiag.engine_data import engine_data
from kvdiag.engines import dynamo, llamacpp, lmdeploy, ollama, sglang, tgi, trtllm, vllm
from kvdiag.engines.engine import EngineAdapter, EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import EngineReport
from kvdiag.sources.http import HttpReader, Unreadable
from kvdiag.sources.prometheus_names import Meaning

ENGINES: tuple[EngineAdapter, ...] = (
    vllm.ENGINE,
    llamacpp.ENGINE,
    ollama.ENGINE,
    sglang.ENGINE,
    trtllm.ENGINE,
    tgi.ENGINE,
    lmdeploy.ENGINE,
    trtllm.TRITON,
    dynamo.ENGINE,  # last: its workers' metrics are those of another engine, too
)
DEFAULT = ENGINES[0]
"""The engine that is assumed until a server reports another one."""

WRAPPERS = {"ollama": "llamacpp"}
"""Engines whose log holds the log of the one that they start."""

MAX_LOG_CHARACTERS = 4 * 2**20
"""How much of a log its engine is recognised by."""

OWNER_READS = 4
"""One after another: of two servers at random, seven times in eight not all are of the same one."""

ENGINE_METRICS: Mapping[str, Meaning] = MappingProxyType(
    {name: meaning for engine in ENGINES for name, meaning in engine.metrics.items()}
)


def engine_with_metrics(names: Iterable[str]) -> EngineAdapter | None:
    """The engine that some of these metrics are of."""
    present = set(names)
    return next((engine for engine in ENGINES if not present.isdisjoint(engine.metrics)), None)


async def recognise(http: HttpReader, engines: Sequence[EngineAdapter] = ENGINES) -> EngineClient:
    """The client for the server at the base address of `http`: of the engine that owns its models, else of the engine
    whose metrics it exports, else of `DEFAULT`.

    A server that does not answer is taken for the default: its client says why it cannot be read. The models are asked
    first, because a read of GET /metrics empties TensorRT-LLM's list of iterations and resets gauges of llama.cpp.
    """
    try:
        owner = _owner(await http.json("/v1/models"))
    except Unreadable as error:
        if error.status != HTTPStatus.NOT_FOUND:
            # Whose models they are is not known, and what a read of its metrics would empty.
            return DEFAULT.open(http)
    else:
        for engine in engines:
            if owner and engine.owned_by == owner:
                return engine.open(http)
    for path in sorted({engine.metrics_path for engine in engines}, key=len, reverse=True):
        with contextlib.suppress(Unreadable):
            text = "\n" + (await http.get(path, [])).text
            worker = dynamo.is_worker(text)
            for engine in engines:
                if (worker or engine.metrics_path == path) and f"\n{engine.metric_prefix}" in text:
                    return (dynamo.worker(engine, text) if worker else engine).open(http)
    return DEFAULT.open(http)


async def engines_in_turn(http: HttpReader) -> str | None:
    """Names of the engines that answer at one address in turn, by the owners of their models; `None` if it is one."""
    owners = set()
    for _ in range(OWNER_READS):
        with contextlib.suppress(Unreadable):
            owners.add(_owner(await http.json("/v1/models")))
    owners.discard(None)
    known = sorted(engine.title for engine in ENGINES if engine.owned_by and engine.owned_by in owners)
    names = known if len(known) == len(owners) else [*known, "another server"]
    return " and ".join(names) if len(owners) > 1 else None


def _owner(models: object) -> str | None:
    """The owner of the first model listed by GET /v1/models; a LoRA adapter has its server's, too."""
    entries = models.get("data") if isinstance(models, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return owner if isinstance(owner, str) else None


@cache
def _log_wordings() -> dict[str, re.Pattern[str]]:
    """What stands in an engine's log and in no other's: its files, flags and functions, its own lines and failures."""
    return {
        name: re.compile("|".join((words["log"], *(pattern for _, pattern in words.get("anchors", ())))))
        for name, words in engine_data("failures.json").items()
    }


def engine_of_image(image: str) -> str | None:
    """The name of the engine in a container image's name, without its registry."""
    text = image.rpartition("/")[2].lower()
    names = dict.fromkeys((*(engine.name for engine in ENGINES), *engine_data("failures.json")))
    return next((name for name in names if name in text.replace(".", "")), None)


def engine_of_log(text: str) -> str | None:
    """The name of the engine whose wordings a log has most of; `None` where it has no engine's."""
    text = text[:MAX_LOG_CHARACTERS]
    counts = {name: sum(1 for _ in wording.finditer(text)) for name, wording in _log_wordings().items()}
    for outer, inner in WRAPPERS.items():
        if counts[outer]:
            counts[outer] += counts.pop(inner)
    most = max(counts, key=counts.__getitem__)
    return most if counts[most] else None


def flags_of(engine_name: str | None) -> Mapping[str, str]:
    """The command-line flags of an engine's settings; those of `DEFAULT` where it is not known."""
    flags: Mapping[str, str] = engine_data("flags.json").get(engine_name or DEFAULT.name, DEFAULT.flags)
    return flags


def read_startup_log(path: Path) -> EngineReport:
    """The report of a log file; `-` is standard input. Of a long file its two ends are read, which a note then says.

    Raises:
        KvdiagError: it cannot be read, or no engine prints such a log when it starts.
    """
    from kvdiag.sources.log_file import read_long_log  # noqa: PLC0415 - the daemon reads no such log

    content, whole = read_long_log(path)
    text = content.decode("utf-8", "replace")
    notes = () if whole else ("the log is long: only its beginning and its end were read",)
    refused = {}
    for engine in ENGINES:
        try:
            report = engine.parse_startup_log(text)
        except KvdiagError as error:
            refused[engine.name] = str(error)
        else:
            return replace(report, engine_name=engine.name, notes=(*report.notes, *notes))
    nothing = "the log has no engine's memory figures: give the log from the server's start, at level INFO"
    raise KvdiagError(f"{path}: {refused.get(engine_of_log(text) or '') or nothing}")


def is_server_title(title: str) -> bool:
    """Whether a process is an engine's, by its title."""
    return any(engine.process_title.search(title) for engine in ENGINES)
