"""Ollama's loaded models (GET /api/ps) and their servers, each a llama-server child on a port of its own. Pure.

Ollama itself reports which models are loaded, their bytes and until when, and nothing of their use. A child's slots
are read as llama.cpp's; its port stands in its command line alone. Each child is an engine, labelled by its model's
name where one loaded model alone has its context, else by the file that it serves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.llamacpp import slots
from kvdiag.engines.llamacpp.command_line import MAX_RUNNERS, Runner, runners_of
from kvdiag.engines.metrics_reader import MAX_LABEL_CHARACTERS, split_by_engine
from kvdiag.model import MAX_BYTES, MAX_COUNT, Engine, Gap, KvPool
from kvdiag.sources.prometheus_text import Page, Series

LOADED = "ollama:models_loaded"
SIZE, SIZE_VRAM, CONTEXT = "ollama:model_bytes", "ollama:model_device_bytes", "ollama:model_context_tokens"
"""Of each loaded model, by its name: made from /api/ps."""

PORT = "ollama:runner_port"
"""The port of a runner, as its value."""

NONE_LOADED = "none"
"""The label of the engine that stands for a server without a loaded model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One entry of /api/ps; a figure that is missing or impossible is `None`."""

    name: str
    size_bytes: int | None
    device_bytes: int | None
    context_tokens: int | None


def loaded_models(answer: object) -> tuple[Loaded, ...]:
    """The models of a decoded answer of /api/ps; an entry without a name is left out."""
    entries = answer.get("models") if isinstance(answer, dict) else None
    found = []
    for entry in (entries if isinstance(entries, list) else [])[:MAX_RUNNERS]:
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and name:
            size, device, context = (entry.get(key) for key in ("size", "size_vram", "context_length"))
            found.append(
                Loaded(
                    name=name[:MAX_LABEL_CHARACTERS],
                    size_bytes=_within(size, MAX_BYTES),
                    device_bytes=_within(device, MAX_BYTES),
                    context_tokens=_within(context, MAX_COUNT),
                )
            )
    return tuple(found)


def _within(value: object, most: int) -> int | None:
    return value if type(value) is int and 0 <= value < most else None


def loaded_page(models: Sequence[Loaded]) -> Page:
    """The series of the loaded models."""
    page: dict[str, tuple[Series, ...]] = {LOADED: (Series({}, float(len(models))),)}
    for name, field in ((SIZE, "size_bytes"), (SIZE_VRAM, "device_bytes"), (CONTEXT, "context_tokens")):
        values = ((one.name, getattr(one, field)) for one in models)
        page[name] = tuple(Series({"model": model}, float(value)) for model, value in values if value is not None)
    return page


def label_of(runner: Runner, page: Page, models: Sequence[Loaded]) -> str:
    """The name of the loaded model that a runner serves, where no other loaded model has its context."""
    contexts = {line.value for line in page.get(slots.CONTEXT, ())}
    fitting = [one.name for one in models if contexts == {float(one.context_tokens or -1)}]
    return fitting[0] if len(fitting) == 1 else runner.file_label


def labelled(page: Page, label: str) -> Page:
    """A runner's series with its engine's label."""
    return {
        name: tuple(Series({**one.labels, "engine": label}, one.value) for one in lines) for name, lines in page.items()
    }


def joined(pages: Iterable[Page]) -> Page:
    """One page of several."""
    found: dict[str, tuple[Series, ...]] = {}
    for page in pages:
        for name, lines in page.items():
            found[name] = (*found.get(name, ()), *lines)
    return found


def distinct(labels: Sequence[str]) -> list[str]:
    """The labels, of which one that several runners have gets their number."""
    counts, at = Counter(labels), Counter[str]()
    named = []
    for label in labels:
        at[label] += 1
        named.append(label if counts[label] == 1 else f"{label} #{at[label]}")
    return named


HIDDEN = (
    "Ollama does not report its models' requests, and their servers are not visible; run kvdiag on Ollama's host, in "
    "its PID namespace, as its user"
)

RUNNER_NAMES = (
    *(slots.TOKENS, slots.CONTEXT, slots.PROCESSING, slots.OUTPUT, slots.SLOTS, slots.TRAINED),
    *slots.POOL,
)


def parse_engines(page: Page) -> EngineReading:
    """An engine for each runner; without a loaded model one that is asleep, since all memory has been released."""
    count = next((line.value for line in page.get(LOADED, ())), None)
    if count is None:
        return None, (Gap(SOURCE, "absent", "GET /api/ps does not answer as Ollama's: check the URL"),)
    if count == 0:
        asleep = Engine(engine=NONE_LOADED, kv_usage_ratio=0.0, requests_running=0, requests_waiting=0, asleep=True)
        return (asleep,), ()
    own = split_by_engine(page, RUNNER_NAMES, absent=HIDDEN)
    if isinstance(own, Gap):
        return None, (own,)
    engines: list[Engine] = []
    gaps: list[Gap] = []
    for label, of in own.items():
        found, refused = slots.parse_engines(of)
        engines += [replace(one, engine=label, asleep=False) for one in found or ()]
        gaps += refused
    return tuple(engines) or None, tuple(gaps)


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - no version reports it
    commands: Sequence[str] = (),
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The pool of each runner, by its own command line."""
    runners = {runner.port: runner for runner in runners_of(commands)}
    own = split_by_engine(page, (*RUNNER_NAMES, PORT), absent=HIDDEN)
    if isinstance(own, Gap):
        return (), () if next((line.value for line in page.get(LOADED, ())), 1) == 0 else (own,)
    pools: list[KvPool] = []
    gaps: list[Gap] = []
    for label, of in own.items():
        port = next((round(line.value) for line in of.get(PORT, ()) if 0 < line.value < 2**16), 0)
        own_command = [runners[port].command] if port in runners else []
        found, refused = slots.parse_pools(of, None, own_command)
        pools += [replace(one, engine=label) for one in found]
        gaps += refused
    return tuple(pools), tuple(gaps)
