"""What Ollama's own engine prints of its memory (0.9 to 0.2x, `runner --ollama-engine`): lines in, values out. Pure.

`load request="{Operation:commit ... Parallel:1 BatchSize:512 ... KvSize:8192 KvCacheType:q8_0 ...}"` has the cells of
all requests; `msg="kv cache" device=CUDA0 size="1.1 GiB"` their bytes, in figures of one decimal. Its caches are
those of llama.cpp with slots that share cells (kvcache/causal.go), but for gpt-oss, whose windows keep 4,096 tokens
of each request (model/models/gptoss), and for states, of which it keeps copies that it does not print: they are not
compared.
"""

import re
from dataclasses import dataclass, field

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.pools.gguf_layers import keeps_states

_REQUEST = re.compile(
    r"request=\"\{Operation:\w{1,12} .{0,400}?Parallel:(\d{1,6}) BatchSize:(\d{1,9}) FlashAttention:\w{1,12} "
    r"KvSize:(\d{1,12}) KvCacheType:(\w{0,12})"
)
_SIZE = re.compile(
    r"msg=\"(model weights|kv cache|compute graph)\" device=([\w:.-]{1,40}) "
    r"size=\"(\d{1,6}(?:\.\d{1,3})?) ([KMGT]?i?B)\""
)
_ARCHITECTURE = re.compile(r"msg=\"\" architecture=([\w-]{1,60}) ")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_DEVICES = 64
_GPT_OSS_WINDOW_TOKENS = 4_096


@dataclass(slots=True)
class OllamaLoad:
    """What was printed of one model so far; of several attempts to load it the last counts."""

    architecture: str | None = None
    request: tuple[int, int, int, str] | None = None
    sizes: dict[str, dict[str, PrintedSize]] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """Read one line."""
        if (found := _REQUEST.search(line)) is not None:
            self.request = (int(found[1]), int(found[2]), int(found[3]), found[4])
        if (found := _ARCHITECTURE.search(line)) is not None:
            self.architecture = found[1]
        if (found := _SIZE.search(line)) is None:
            return
        part, device, printed, unit = found.groups()
        if part == "model weights" and any("kv cache" in sizes for sizes in self.sizes.values()):
            self.sizes.clear()
        slack = 0.5 * 10 ** -len(printed.partition(".")[2])
        try:
            size = PrintedSize(
                nominal_bytes=round(float(printed) * _UNITS[unit]), slack_bytes=round(slack * _UNITS[unit])
            )
        except (KvModelError, KeyError):
            return
        if device in self.sizes or len(self.sizes) < _MAX_DEVICES:
            self.sizes.setdefault(device, {})[part] = size

    def report(self) -> EngineReport | None:
        """Its pool and weights; `None` without the cells, or before they have bytes."""
        if self.request is None or not self.sizes:
            return None
        slots, batch, tokens, kind = self.request
        each = tokens // slots if slots else 0
        if not each:
            return None
        has_memory = self.architecture == "gptoss"
        states = keeps_states(self.architecture or "")
        return EngineReport(
            settings=EngineSettings(
                architecture=self.architecture,
                kv_dtype=kind or "f16",
                max_model_len_tokens=each,
                max_num_batched_tokens=None if has_memory else batch or None,
                block_size_tokens=1,
                slots=slots,
                shares_pool=True,
                window_tokens=min(tokens, slots * _GPT_OSS_WINDOW_TOKENS + batch) if has_memory else None,
            ),
            ranks=tuple(
                RankReport(
                    name=device,
                    weights=sizes.get("model weights"),
                    pool=None if states else sizes.get("kv cache"),
                    activation=sizes.get("compute graph"),
                )
                for device, sizes in self.sizes.items()
            ),
            num_blocks=tokens,
            tokens=tokens,
            concurrency=float(slots),
            concurrency_context_tokens=each,
            notes=("states are not compared: Ollama keeps copies of them that it does not print",) if states else (),
        )
