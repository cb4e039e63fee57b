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
    batches = {name: size for name in ("batch", "ubatch") if (size := getattr(options, name)) is not None}
    try:
        found = size_cells(
            model,
            CellSettings(
                **batches,
                context_size=options.context_tokens or cells.total,
                slots=slots,
                unified=cells.unified,
                type_k=options.type_k,
                type_v=options.type_v,
                flash_attention=options.flash_attention,
                swa_full=options.swa_full,
            ),
        )
    except KvModelError:
        return None
    return found if found.context_tokens == cells.total else None


def is_mixed(cache: CellCache) -> bool:
    """Whether there are windows or states in addition to the cells, so that a cell has no size of its own."""
    return not {pool.name for pool in cache.pools} <= {"KV", "indexer"}
