"""What TensorRT-LLM alone does with the layers of a pool: windows, V, and the states of a hybrid's requests. Pure.

Without max_attention_window every layer keeps every token, also those with a window (resource_manager.py::
KVCacheManager, the default manager). With it each window size has a pool of its own, all with the same bytes, and
max_tokens is ignored (calculate_max_num_blocks_for_vswa, 1.2); windows are cut where the pool cannot hold one sequence
(adjust_window_sizes_for_vswa). V has K's width. States: one slot for each of max_batch_size, outside the pool until 1.2
(mamba_cache_manager.py), in it since 1.3, with snapshots where mamba_state_cache_interval is set
(_calculate_max_num_blocks_for_linear_attention).

KVCacheManagerV2 (kv_cache/kv_cache_manager_v2.py) divides its bytes among windows and states by the lengths of a
typical batch (kv_cache_manager_v2/_storage_manager.py::ratio_from_batch), which is not modelled. Where all layers keep
as many tokens it has one pool with the blocks of the other manager, less what its granules of memory round off;
max_tokens are those of the 0.95 of it up to which it resumes requests. By default the model's class and the version
decide which manager is taken.
"""

import math
from collections.abc import Mapping, Sequence

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.dtypes import model_dtype_bytes
from kvdiag.kv.layout.layers import LayerKind, StateLayer

Version = tuple[int, ...]

_FIRST_ROUNDING_DOWN = (1, 2)
_FIRST_EQUAL_SHARES = (1, 2)
_FIRST_STATES_IN_POOL = (1, 3)
_RESUME_RATIO = 0.95
_STATE_KINDS = (LayerKind.MAMBA2, LayerKind.GATED_DELTA_NET, LayerKind.KIMI_DELTA)


def rounds_up(version: Version | None) -> bool:
    """Whether blocks are rounded up: the C++ runtime (#2268), and resource_manager.py until 1.1."""
    return version is not None and version < _FIRST_ROUNDING_DOWN


def check_manager_v2(windows: Sequence[int] | None, *, longest: int, states: bool) -> None:
    """Refuse what KVCacheManagerV2 divides its pool among.

    Raises:
        KvModelError: the model has states, or its layers keep different numbers of tokens.
    """
    if states or len({min(longest, window) for window in windows or (longest,)}) > 1:
        raise KvModelError(
            "KVCacheManagerV2 divides its pool among windows and states by the lengths of requests, which is not "
            "modelled; start the server with use_kv_cache_manager_v2: false and pass --use_kv_cache_manager_v2 false",
            "use_kv_cache_manager_v2",
        )


def tokens_for(max_tokens: int, *, manager_v2: bool) -> int:
    """The tokens that a pool for max_tokens has."""
    return math.ceil(max_tokens / _RESUME_RATIO) if manager_v2 else max_tokens


def states_in_pool(version: Version | None) -> bool:
    """Whether the KV pool holds the states, too."""
    return version is None or version >= _FIRST_STATES_IN_POOL


def state_bytes(layers: Sequence[StateLayer], *, ranks: int, model_dtype: str, state_dtype: str | None) -> int:
    """Bytes of one request's states on one rank: convolutions in the model's number format, as is the rest unless
    mamba_ssm_cache_dtype names another (config_utils.py::resolve_ssm_cache_dtype).

    Raises:
        KvModelError: TensorRT-LLM has no manager for such states.
    """
    if other := next((layer.kind for layer in layers if layer.kind not in _STATE_KINDS), None):
        raise KvModelError(f"TensorRT-LLM keeps no {other.value.replace('_', ' ')} states", "engine")
    element = model_dtype_bytes(model_dtype)
    recurrent = element if state_dtype in (None, "auto") else model_dtype_bytes(str(state_dtype))
    return sum(
        layer.state.rank_bytes(
            tensor_parallel=ranks,
            speculative_tokens=0,
            conv_element_bytes=element,
            recurrent_element_bytes=recurrent,
        )
        for layer in layers
    )


def window_blocks(
    rows: Sequence[int],
    windows: Sequence[int],
    *,
    longest: int,
    pool_bytes: int,
    block: int,
    version: Version | None,
) -> Sequence[tuple[int, int, tuple[int, ...]]]:
    """Window sizes, ascending, with the blocks of each and the bytes of a token in each of its layers, `rows` of which
    there are: the list of windows is repeated over them, and all windows get the same bytes.

    Raises:
        KvModelError: an older version divides the pool by rules that are not modelled.
    """
    if version is not None and version < _FIRST_EQUAL_SHARES:
        raise KvModelError("max_attention_window before TensorRT-LLM 1.2 is not modelled", "version")
    kept = dict[int, list[int]]()
    for place, size in enumerate(rows):
        kept.setdefault(min(longest, windows[place % len(windows)]), []).append(size)
    fitting = _fitting(kept, pool_bytes)
    part = pool_bytes / len(fitting)
    blocks = {window: int(part / sum(sizes) // block) for window, sizes in fitting.items()}
    return [(min(window, blocks[window] * block), blocks[window], tuple(sizes)) for window, sizes in fitting.items()]


def _fitting(kept: Mapping[int, list[int]], pool_bytes: int) -> Mapping[int, list[int]]:
    """The windows in ascending order, cut where one sequence does not fit: each next one gets what smaller ones leave
    (adjust_window_sizes_for_vswa).
    """
    ordered = dict(sorted(kept.items()))
    if len(ordered) == 1 or sum(window * sum(sizes) for window, sizes in ordered.items()) < pool_bytes:
        return ordered
    found = dict[int, list[int]]()
    left, reached, smaller, rest = pool_bytes, 0, 0, sum(map(sum, ordered.values()))
    for window, sizes in ordered.items():
        if left > 0:
            more = min(left // rest, window - smaller)
            left -= more * rest
            reached += more
            left = 0 if reached < window else left
        found.setdefault(reached, []).extend(sizes)
        rest -= sum(sizes)
        smaller = window
    return found
