"""SGLang's pools: tokens, window tokens and state slots of a budget.

As SGLang 0.5.23 does (srt/model_executor/pool_configurator.py, mem_cache/kv_cache_configurator.py), in this order: a
hybrid's recurrent states take their share first; what is left is divided by the cell, the bytes of a token in all
layers of the rank, a window layer counting by the ratio of its tokens; tokens are floored to pages; --max-total-tokens
and the smallest pipeline stage bound them; running requests follow. One page more than the capacity is allocated. A
token limit (`max_total_tokens`) does not bound the states.
"""

from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_TOKENS
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LayerKind
from kvdiag.kv.pools.engine_plan import POOL_TYPES
from kvdiag.kv.pools.token_cells import EXTRA_SLOTS, WINDOW_KINDS, Cells, StageCell, TokenSettings

GIB = 1 << 30
# configs/model_config.py::is_hybrid_swa_model; every other model keeps all tokens in its window layers, too.
_WINDOW_POOL_TYPES = frozenset(POOL_TYPES["window_pool"])
# model_override_base.py: the extra buffer of states is for these (overrides.py::_MAMBA_EXTRA_BUFFER_ARCHS).
_NO_EXTRA_BUFFER_TYPES = frozenset(POOL_TYPES["no_extra_buffer"])
_BASE_SLOTS_PER_REQUEST = 3
_STATE_DTYPE = "float32"
_DSA_PAGE_TOKENS = 64
_SPECULATIVE_RUNNING_REQUESTS = 48
_FEWEST_RUNNING, _MOST_RUNNING, _RUNNING_SCALE = 2_048, 4_096, 512
_SWA_EVICTION_INTERVAL_TOKENS = 128
# Where the device is unknown (memory_hook.py), and on one of 20 to 60 GiB.
_CHUNK_TOKENS = 4_096
_INPUT_MARGIN_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPools:
    """What SGLang allocates on each rank. `tokens` is max_total_num_tokens."""

    page: int
    tokens: int
    window_tokens: int | None
    state_slots: int | None
    max_running_requests: int
    longest_input_tokens: int
    context_tokens: int
    request_table_bytes: int
    cells: tuple[StageCell, ...]
    bounded_by: str = "memory"


class TokenModel:
    """A model served by SGLang with some flags: its cells, and the pools of a budget."""

    def __init__(
        self, architecture: Architecture, settings: TokenSettings, *, config_state_dtype: str | None = None
    ) -> None:
        """Compute the cells.

        Raises:
            KvModelError: the flags are impossible for this model.
        """
        self._architecture = architecture
        self._settings = settings
        self._config_state_dtype = config_state_dtype
        self._state_dtype = settings.state_dtype or config_state_dtype or _STATE_DTYPE
        kinds = architecture.kinds
        self.windowed = (
            settings.window_pool
            and architecture.model_type in _WINDOW_POOL_TYPES
            and any(kind in kinds for kind in WINDOW_KINDS)
        )
        windows = [
            layer.window_tokens or layer.chunk_tokens or 0
            for layer in architecture.layers
            if isinstance(layer, AttentionLayer) and layer.kind in WINDOW_KINDS
        ]
        # models/*.py::get_attention_sliding_window_size: some leave out the token itself.
        own = architecture.model_type in POOL_TYPES["exclusive_window"]
        self.window_tokens = max(windows, default=0) - own if self.windowed else 0
        self.page = self._page()
        self.cells = tuple(
            Cells(architecture, settings, windowed=self.windowed, state_dtype=self._state_dtype).of_stages()
        )

    @property
    def settings(self) -> TokenSettings:
        """The flags."""
        return self._settings

    @property
    def latent(self) -> bool:
        """Whether attention keeps latent rows."""
        return self._architecture.uses_mla

    def with_settings(self, settings: TokenSettings) -> "TokenModel":
        """The same model with other flags."""
        return TokenModel(self._architecture, settings, config_state_dtype=self._config_state_dtype)

    @property
    def context_tokens(self) -> int:
        """The longest request that the server allows, before the pool bounds it."""
        return self._settings.context_tokens or self._architecture.max_context_tokens or _MOST_RUNNING

    def _page(self) -> int:
        """Page size, by --page-size or by what the attention backend needs (arg_groups/overrides.py)."""
        asked, backend = self._settings.page_size, self._settings.backend
        indexed = LayerKind.MLA_DSA in self._architecture.kinds
        if indexed or backend == "flashmla":
            return _DSA_PAGE_TOKENS
        needs = {"trtllm_mla": (32, 64), "cutedsl_mla": (32, 64), "trtllm_mha": (16, 32, 64, 128)}.get(backend or "")
        if needs is not None and asked not in needs:
            return 64
        # Ascend's devices: hardware_backend/npu/utils.py::set_default_server_args
        return (128 if backend == "ascend" else 1) if asked is None else asked

    @property
    def slots_per_request(self) -> int:
        """State slots that a running request needs at most (_calculate_mamba_ratio)."""
        settings = self._settings
        if not settings.radix_cache:
            return 1
        strategy = settings.state_strategy
        if strategy == "auto":
            wants = settings.overlap or (settings.page_size or 1) > 1
            possible = self._architecture.model_type not in _NO_EXTRA_BUFFER_TYPES
            strategy = "extra_buffer" if wants and possible else "no_buffer"
        extra = EXTRA_SLOTS[strategy]
        return _BASE_SLOTS_PER_REQUEST + (extra if settings.overlap else min(extra, 1))

    def pools_of(self, budget_gib: float | None) -> TokenPools:
        """The pools of a budget per rank, in GiB as SGLang counts; None for one that --max-total-tokens exceeds in no
        way.

        Raises:
            KvModelError: SGLang would refuse to start.
        """
        settings = self._settings
        slots, budget_gib = self._state_slots(budget_gib)
        cap = self._window_cap()
        tokens = settings.max_total_tokens
        profiled = None
        if budget_gib is not None:
            profiled = min(self._affordable(cell, int(budget_gib * GIB), cap) for cell in self.cells)
        bounded = profiled is None or (tokens is not None and tokens < profiled)
        chosen = tokens if bounded else profiled
        if chosen is None:
            raise KvModelError("the memory for the pool is unknown: pass --gpu or --max-total-tokens", "gpu")
        if cap is not None and bounded:
            cap = min(cap, chosen)
        chosen = chosen // self.page * self.page
        if chosen < 1:
            raise KvModelError("SGLang does not start: not enough memory; raise --mem-fraction-static", "gpu")
        window = self._window_share(chosen, cap)
        running = self._running(chosen, slots)
        rows, columns = running + 1, self.context_tokens + self._table_margin()
        return TokenPools(
            page=self.page,
            tokens=chosen,
            window_tokens=window,
            state_slots=slots,
            max_running_requests=running,
            longest_input_tokens=max(0, min(self.context_tokens, chosen) - 1 - _INPUT_MARGIN_TOKENS),
            context_tokens=self.context_tokens,
            request_table_bytes=rows * columns * 4,
            cells=self.cells,
            bounded_by="--max-total-tokens" if bounded else "memory",
        )

    def _table_margin(self) -> int:
        """Columns beyond the context (allocation_sizing.py::get_req_to_token_extra_context_len)."""
        return 4 + (self._settings.draft_tokens or 0)

    def _affordable(self, cell: StageCell, budget: int, cap: int | None) -> int:
        """Tokens that one stage affords, in whole pages."""
        if cap is not None:
            tokens = int((budget - cap * cell.window_bytes) // (cell.full_bytes + cell.draft_bytes))
        elif cell.window_layers and not cell.full_layers:
            tokens = int(budget // (cell.window_bytes + cell.draft_bytes))
        elif cell.window_layers:
            tokens = int(
                budget // (cell.full_bytes + cell.draft_bytes + self._settings.window_ratio * cell.window_bytes)
            )
        elif cell.full_bytes:
            tokens = budget // (cell.full_bytes + cell.draft_bytes)
        else:
            # A stage without attention bounds nothing; a model without takes its context (_zero_kv_max_tokens).
            tokens = MAX_TOKENS if any(one.full_bytes for one in self.cells) else self.context_tokens
        return max(0, tokens) // self.page * self.page

    def _window_share(self, tokens: int, cap: int | None) -> int | None:
        """Tokens of the window pool."""
        if not self.windowed:
            return None
        if cap is not None:
            return cap
        if not any(cell.full_layers for cell in self.cells):
            return tokens
        window = int(tokens * self._settings.window_ratio) // self.page * self.page
        if self.window_tokens + self.page >= window:
            raise KvModelError(
                f"SGLang does not start: the window pool of {window:,} tokens cannot hold one request, which needs "
                f"{self.window_tokens + self.page:,}; raise --swa-full-tokens-ratio or the pool",
                "swa_full_tokens_ratio",
            )
        return window

    def _window_cap(self) -> int | None:
        """Window tokens by requests instead of the ratio: without radix cache and with --max-running-requests
        (compute_swa_request_cap).
        """
        settings = self._settings
        full = any(cell.full_layers for cell in self.cells)
        chunk = settings.chunked_prefill_size or _CHUNK_TOKENS
        if not self.windowed or not full or settings.radix_cache or settings.max_running_requests is None or chunk < 0:
            return None
        drafts = settings.draft_tokens or 1
        taken = max(drafts, settings.draft_step_tokens or 0)
        # Two steps are outstanding where they overlap; else each is in whole pages.
        decode = 2 * taken if settings.draft_tokens and settings.overlap else -(-taken // self.page) * self.page
        each = self.window_tokens + _SWA_EVICTION_INTERVAL_TOKENS * drafts + self.page + decode
        requests = max(1, settings.max_running_requests // settings.attention_parallel)
        # parallel_hook.py: groups for attention share a chunk.
        cap = each * requests + (2 if settings.overlap else 1) * (chunk // settings.attention_parallel) + self.page
        return -(-cap // self.page) * self.page

    def _state_slots(self, budget_gib: float | None) -> tuple[int | None, float | None]:
        """State slots, and the budget that they leave (_handle_max_mamba_cache)."""
        settings = self._settings
        if not any(cell.state_layers for cell in self.cells):
            return None, budget_gib
        each = max(cell.state_bytes for cell in self.cells)
        drafts = settings.draft_tokens or 0
        requests = settings.max_running_requests or (_SPECULATIVE_RUNNING_REQUESTS if drafts else None)
        per_worker = None if requests is None else max(1, requests // settings.attention_parallel)
        ratio = self.slots_per_request
        if settings.state_slots is not None:
            slots = settings.state_slots // settings.attention_parallel
            drafting = min(per_worker or slots, slots // ratio) + 1
        elif not settings.radix_cache and settings.max_running_requests is not None:
            slots = per_worker or 1
            drafting = slots + 1
        elif budget_gib is None:
            return None, None
        else:
            share = budget_gib * settings.state_ratio / (1 + settings.state_ratio) * GIB
            if drafts:
                slots = int((share - each * (1 + drafts)) // (each * (1 + drafts / ratio)))
            else:
                slots = int((share - each) // each)
            drafting = min(per_worker or slots, max(0, slots) // ratio) + 1
        if slots < 1:
            raise KvModelError(
                "SGLang does not start: no memory for recurrent states; raise --mem-fraction-static", "gpu"
            )
        if budget_gib is not None:
            if drafts:
                budget_gib -= each * drafting * drafts / GIB
            budget_gib -= (slots + 1) * each / GIB
        return slots, budget_gib

    def _running(self, tokens: int, slots: int | None) -> int:
        """max_running_requests of one data-parallel group (resolve_max_num_reqs)."""
        settings = self._settings
        asked = settings.max_running_requests
        if asked is None and settings.draft_tokens:
            asked = _SPECULATIVE_RUNNING_REQUESTS
        if asked is None:
            estimate = max(min(int(tokens / self.context_tokens * _RUNNING_SCALE), _MOST_RUNNING), _FEWEST_RUNNING)
        else:
            estimate = max(1, asked // settings.attention_parallel)
        running = min(estimate, tokens // 2)
        return running if slots is None else min(running, slots // self.slots_per_request)
