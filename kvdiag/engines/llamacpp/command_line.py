"""The settings of llama.cpp's server that only its command line and environment show. Pure.

No endpoint reports the pool: /props and /slots have the context of one slot, and whether slots share one pool of cells
or have one each is not reported. What is read here is common/arg.cpp's: an option on the command line counts more than
its environment variable. `kvdiag.sources.host` puts the variables in front of a command, as a shell would.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from kvdiag.engines.metrics_reader import MAX_LABEL_CHARACTERS
from kvdiag.model import MAX_COUNT
from kvdiag.sources.host import NO_ENVIRONMENT

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "context": ("-c", "--ctx-size", "LLAMA_ARG_CTX_SIZE"),
    "slots": ("-np", "--parallel", "LLAMA_ARG_N_PARALLEL"),
    "context_per_slot": ("--kv-unified-per-slot", "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    "sleep_idle": ("--sleep-idle-seconds",),
    "type_k": ("-ctk", "--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"),
    "type_v": ("-ctv", "--cache-type-v", "LLAMA_ARG_CACHE_TYPE_V"),
    "batch": ("-b", "--batch-size", "LLAMA_ARG_BATCH"),
    "ubatch": ("-ub", "--ubatch-size", "LLAMA_ARG_UBATCH"),
    "device_layers": ("-ngl", "--gpu-layers", "--n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS"),
    "spec_type": ("--spec-type", "LLAMA_ARG_SPEC_TYPE"),
    "draft_tokens": ("--spec-draft-n-max", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    "cache_ram": ("-cram", "--cache-ram", "LLAMA_ARG_CACHE_RAM"),
    "checkpoints": ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "LLAMA_ARG_CTX_CHECKPOINTS"),
    "model": ("-m", "--model", "LLAMA_ARG_MODEL"),
    "draft": ("-md", "--model-draft", "--spec-draft-model", "-hfd", "--hf-repo-draft", "LLAMA_ARG_MODEL_DRAFT"),
}
_SWITCHES: Mapping[str, Mapping[str, bool]] = {
    "unified": {"-kvu": True, "--kv-unified": True, "-no-kvu": False, "--no-kv-unified": False},
    "offload": {"-kvo": True, "--kv-offload": True, "-nkvo": False, "--no-kv-offload": False},
    "swa_full": {"--swa-full": True},
}
"""Options without a value."""

_VALUED: Mapping[str, str] = {
    "LLAMA_ARG_KV_UNIFIED": "unified",
    "LLAMA_ARG_KV_OFFLOAD": "offload",
    "LLAMA_ARG_SWA_FULL": "swa_full",
    "LLAMA_ARG_FLASH_ATTN": "flash_attention",
    "-fa": "flash_attention",
    "--flash-attn": "flash_attention",
}
"""Options and variables that are on or off by their value."""

_TRUE, _FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")
"""common/arg.cpp::is_truthy and is_falsey."""

_ON_OFF: Mapping[str, bool | None] = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False), "auto": None}

ENVIRONMENT = tuple(
    name
    for name in (*(name for names in _OPTIONS.values() for name in names), *_VALUED)
    if name.startswith("LLAMA_ARG_")
)
"""The variables that are read; none of them holds a key."""

PROGRAM = re.compile(r"llama[-_]server|\bllama serve\b|\s(?:-m|--model|-hf|--hf-repo|drill)\s")
"""Found in the command line of the server itself, or of `kvdiag drill`."""

DEFAULT_CHECKPOINTS = 32
"""Context checkpoints of a slot by default (common/common.h: n_ctx_checkpoints; b8210 has 8, b9014 32)."""

_PORT = re.compile(r"\s--port[ =](\d{1,5})\b")
_MODEL = re.compile(r"\s(?:-m|--model|-hf|-hfr|--hf-repo)[ =](\S{1,512})")
"""Its file; of a model in the cache of downloads, which a router starts by its repository, that."""

_DIGEST = re.compile(r"sha256-([0-9a-f]{12})")
MAX_RUNNERS = 64
"""Ollama loads three a GPU by default (OLLAMA_MAX_LOADED_MODELS), a router four (--models-max)."""

_NUMBER = re.compile(r"-?\d{1,12}")
_TYPE = re.compile(r"[a-z][a-z0-9_]{1,15}")
_CELLS_MULTIPLE = 256
"""llama_context pads its context, and each stream's, to this many cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for; `None` where an option is not given. `complete` is False if the environment is unknown."""

    context_tokens: int | None = None
    slots: int | None = None
    unified: bool | None = None
    tokens_per_slot: int | None = None
    sleep_idle_seconds: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    batch: int | None = None
    ubatch: int | None = None
    flash_attention: bool | None = None
    swa_full: bool = False
    cache_on_host: bool = False
    device_layers: int | None = None
    model: str | None = None
    limits_prompt_cache: bool = False
    checkpoints: int = DEFAULT_CHECKPOINTS
    drafts: bool = False
    spec_type: str = "none"
    draft_tokens: int | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A pool of cells, one token each: those allocated, and those that requests of all slots together can hold."""

    total: int
    usable: int
    unified: bool = True


def parse_options(commands: Iterable[str]) -> Options | None:
    """The options of the server among these command lines; `None` where there is none."""
    command = next((one for one in commands if PROGRAM.search(one)), None)
    if command is None:
        return None
    words = command.replace("=", " ").split()
    found: dict[str, str] = {}
    switched: dict[str, bool | None] = {}
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        for option, names in _OPTIONS.items():
            if word in names:
                found[option] = following
        # The environment comes first, so that the command line has the last word.
        for switch, values in _SWITCHES.items():
            if word in values:
                switched[switch] = values[word]
        if word in _VALUED:
            # `-fa` alone is on, as it was before it took a value.
            alone = True if word.startswith("-") else None
            switched[_VALUED[word]] = _ON_OFF.get(following, alone)
    types = (found.get(name, "") for name in ("type_k", "type_v"))
    type_k, type_v = (text if _TYPE.fullmatch(text) else "f16" for text in types)
    return Options(
        context_tokens=_count(found.get("context")),
        slots=_count(found.get("slots")),
        unified=switched.get("unified"),
        tokens_per_slot=_count(found.get("context_per_slot")),
        sleep_idle_seconds=_count(found.get("sleep_idle")),
        type_k=type_k,
        type_v=type_v,
        batch=_count(found.get("batch")),
        ubatch=_count(found.get("ubatch")),
        flash_attention=switched.get("flash_attention"),
        swa_full=bool(switched.get("swa_full")),
        cache_on_host=switched.get("offload") is False,
        device_layers=_from_zero(found.get("device_layers")),
        model=found.get("model"),
        limits_prompt_cache="cache_ram" in found,
        checkpoints=DEFAULT_CHECKPOINTS if (given := _from_zero(found.get("checkpoints"))) is None else given,
        drafts="draft" in found or "draft" in found.get("spec_type", ""),
        spec_type=found.get("spec_type", "none"),
        draft_tokens=_from_zero(found.get("draft_tokens")),
        complete=NO_ENVIRONMENT not in command,
    )


def _count(text: str | None) -> int | None:
    """A number above zero; 0 and -1 stand for the default."""
    number = int(text) if text and _NUMBER.fullmatch(text) else 0
    return number if 0 < number <= MAX_COUNT else None


def _from_zero(text: str | None) -> int | None:
    """A number of 0 or more; -1, auto and all stand for the default."""
    number = int(text) if text and _NUMBER.fullmatch(text) else -1
    return number if 0 <= number <= MAX_COUNT else None


def pool_cells(options: Options | None, *, slots: int, slot_tokens: int, trained_tokens: int | None) -> Cells | str:
    """The cells of a server with so many slots of `slot_tokens` each, or why they are not known.

    With n_ctx = pad256(-c): one pool for all slots of n_ctx cells if unified, else one of pad256(n_ctx / slots) for
    each. A slot never has more than the model's trained context. `-c 0` is as much as the model was trained for, or
    fits: then a slot shows it. Unified is the default where -np is not given (since b7300, 2025-12; before, one slot).
    """
    asked = None if options is None or options.context_tokens is None else _padded(options.context_tokens)
    if slots == 1:
        # Only -c shows cells beyond those that the one slot may use.
        if options is not None and asked is not None:
            is_capped = options.tokens_per_slot is not None or slot_tokens == min(asked, trained_tokens or asked)
            return Cells(total=max(asked, slot_tokens) if is_capped else slot_tokens, usable=slot_tokens)
        return Cells(total=slot_tokens, usable=slot_tokens)
    if options is None:
        return (
            "the KV pool is not reported, and the command line is not visible, which shows whether the slots share it; "
            "run kvdiag on the server's host, in its PID namespace"
        )
    capped = options.tokens_per_slot is not None
    if asked is None and options.tokens_per_slot is not None:
        asked = _padded(slots * options.tokens_per_slot)
    one = slot_tokens if asked is None else asked
    each = slot_tokens if asked is None else _padded(-(-asked // slots))
    by_kind = {True: one, False: slots * each}
    # Older builds let a slot have more than the model was trained for.
    shown = {kind: {tokens, min(tokens, trained_tokens or tokens)} for kind, tokens in ((True, one), (False, each))}
    fitting = [kind for kind, tokens in shown.items() if slot_tokens in tokens and not capped]
    unified = options.unified
    if unified is None and options.complete:
        unified = options.slots is None
    if asked is not None and len(fitting) == 1:
        # What the server reports decides, where flags override one another: without -np, --no-kv-unified has no effect.
        (unified,) = fitting
    if unified is None:
        return (
            "the KV pool is not reported, and the server's environment is not readable, which may set whether the "
            "slots share it; run kvdiag as the server's user"
        )
    if not capped and not fitting:
        return (
            f"the command line's context gives {min(shown[unified]):,} tokens a slot, but the server reports "
            f"{slot_tokens:,}; check --ctx-size and --parallel in its log"
        )
    total = by_kind[unified]
    return Cells(total=total, usable=min(total, slots * slot_tokens), unified=unified)


def _padded(tokens: int) -> int:
    return -(-tokens // _CELLS_MULTIPLE) * _CELLS_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """The server of one model that another process started: its port, the model's file, and its command line."""

    port: int
    model: str
    command: str

    @property
    def file_label(self) -> str:
        """A short name of its model's file."""
        digest = _DIGEST.search(self.model)
        return digest[1] if digest else PurePath(self.model).name[:MAX_LABEL_CHARACTERS] or str(self.port)

    @property
    def address(self) -> str:
        """Its model and where it answers, on this host."""
        return f"{self.file_label} at http://127.0.0.1:{self.port}"


def runners_of(commands: Iterable[str]) -> tuple[Runner, ...]:
    """The models' servers among the command lines of Ollama's processes, or of a router's."""
    found = {}
    for command in commands:
        port, model = _PORT.search(command), _MODEL.search(command)
        if port is not None and model is not None and 0 < int(port[1]) < 2**16:
            found[int(port[1])] = Runner(port=int(port[1]), model=model[1], command=command)
    return tuple(found.values())[:MAX_RUNNERS]
