"""The bytes of a server's caches: by the header of its model's file and the options of its command line.

No endpoint reports them. The arithmetic is that of `kvdiag fit` (`kvdiag.kv.pools.cell_cache`); a result whose cells
are not those of the running server is no result.
"""

from pathlib import Path

from kvdiag.engines.llamacpp.command_line import Cells, Options
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.kv.pools.cell_cache import CellCache, CellSettings, size_cells
from kvdiag.kv.pools.cell_model import CellModel
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from kvdiag.sources.gguf_file import read_gguf


def read_cells(file: Path) -> CellModel | None:
    """What the model in a GGUF file keeps in the caches; `None` where it cannot be read or is not modelled."""
    try:
        return cells_of_gguf(read_gguf(file))
    except (KvdiagError, KvModelError):
        return None


def caches(model: CellModel, options: Options, cells: Cells, *, slots: int) -> CellCache | None:
    """All caches of a server; `None` where the options do not give its cells, or part of them is host memory."""
    if options.cache_on_host or (options.device_layers is not None and options.device_layers <= model.depth):
        return None
    found = _sized(model, options, options.context_tokens or cells.total, slots=slots, unified=cells.unified)
    return found if found is not None and found.context_tokens == cells.total else None


def slot_state_bytes(model: CellModel, options: Options, *, slot_tokens: int) -> tuple[int, int] | None:
    """What a prompt as long as a slot takes in the prompt cache at most, and what a checkpoint of a slot takes.

    A checkpoint has a slot's windows and states, without the tokens of full attention
    (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY); a model without either has none. A draft model's part is not known.
    """
    one = None if options.drafts else _sized(model, options, slot_tokens, slots=1, unified=False)
    if one is None:
        return None
    partial = {"states"} if options.swa_full else {"states", "sliding window"}
    return one.bytes, sum(pool.bytes for pool in one.pools if pool.name in partial)


def _sized(model: CellModel, options: Options, tokens: int, *, slots: int, unified: bool) -> CellCache | None:
    given = {name: size for name in ("batch", "ubatch", "draft_tokens") if (size := getattr(options, name)) is not None}
    try:
        return size_cells(
            model,
            CellSettings(
                **given,
                context_size=tokens,
                slots=slots,
                unified=unified,
                type_k=options.type_k,
                type_v=options.type_v,
                flash_attention=options.flash_attention,
                swa_full=options.swa_full,
                spec_type=options.spec_type,
            ),
        )
    except KvModelError:
        return None


def is_mixed(cache: CellCache) -> bool:
    """Whether a cell has no size of its own: with states, or with windows that are shorter than the context."""
    return any(pool.unit != "cell" or pool.units != cache.pools[0].units for pool in cache.pools)
