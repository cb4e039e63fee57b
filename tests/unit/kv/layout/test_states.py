"""What one request's state takes on one rank, worked out from the published models' own sizes."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.layers import StateShape
from tests.unit.kv.refused import refused

# Qwen3-Next: K and Q of 16 heads and V of 32, all of 128, and a matrix of 128 x 128 for each of the 32.
DELTA = StateShape(
    conv_channels=2 * 128 * 16 + 128 * 32,
    conv_steps=3,
    drafts_lengthen_conv=True,
    recurrent_heads=32,
    recurrent_head_elements=128 * 128,
)
# Nemotron-H: 128 heads of 64, 8 groups with B and C of 128.
MAMBA_2 = StateShape(
    conv_channels=128 * 64,
    conv_steps=3,
    drafts_lengthen_conv=True,
    recurrent_heads=128,
    recurrent_head_elements=64 * 128,
    conv_groups=8,
    conv_group_channels=2 * 128,
    prefill_checkpoints=1,
)
SHORT = StateShape(
    conv_channels=2048, conv_steps=2, drafts_lengthen_conv=False, recurrent_heads=0, recurrent_head_elements=0
)
LINEAR = replace(DELTA, conv_channels=0, conv_steps=0)


def on_rank(shape: StateShape, *, ranks: int = 1, drafts: int = 0, conv_bytes: int = 2, matrix_bytes: int = 4) -> int:
    """The state's bytes with a convolution in 16 bits and a matrix in 32."""
    return shape.rank_bytes(
        tensor_parallel=ranks,
        speculative_tokens=drafts,
        conv_element_bytes=conv_bytes,
        recurrent_element_bytes=matrix_bytes,
    )


@pytest.mark.parametrize(
    ("shape", "ranks", "drafts", "expected"),
    [
        (DELTA, 1, 0, 8192 * 3 * 2 + 32 * 128 * 128 * 4),
        (DELTA, 4, 0, 2048 * 3 * 2 + 8 * 128 * 128 * 4),
        (DELTA, 4, 2, 2048 * (3 + 2) * 2 + 8 * 128 * 128 * 4),
        (MAMBA_2, 1, 0, (8192 + 8 * 256) * 3 * 2 + 128 * 64 * 128 * 4),
        (MAMBA_2, 8, 0, (8192 + 8 * 256) // 8 * 3 * 2 + 16 * 64 * 128 * 4),
        # 8 groups do not divide by 16: each rank gets one of its own.
        (MAMBA_2, 16, 0, (8192 + 16 * 256) // 16 * 3 * 2 + 8 * 64 * 128 * 4),
        (MAMBA_2, 1, 3, (8192 + 8 * 256) * 6 * 2 + 128 * 64 * 128 * 4),
        (SHORT, 2, 0, 1024 * 2 * 2),
        (SHORT, 2, 4, 1024 * 2 * 2),
        # Without a convolution there is none to lengthen.
        (LINEAR, 2, 4, 16 * 128 * 128 * 4),
    ],
)
def test_bytes_of_a_state_on_a_rank(shape: StateShape, ranks: int, drafts: int, expected: int) -> None:
    """Channels and heads are divided over ranks; drafts lengthen the convolution where the kind does so."""
    assert expected == on_rank(shape, ranks=ranks, drafts=drafts)


def test_each_part_has_a_format_of_its_own() -> None:
    """The convolution in 1 byte and the matrix in 2."""
    assert 8192 * 3 + 32 * 128 * 128 * 2 == on_rank(DELTA, conv_bytes=1, matrix_bytes=2)


@pytest.mark.parametrize(
    ("shape", "ranks"), [(DELTA, 3), (replace(DELTA, conv_channels=8191), 2), (replace(DELTA, recurrent_heads=31), 2)]
)
def test_ranks_that_do_not_divide_a_state_are_refused(shape: StateShape, ranks: int) -> None:
    """The engine refuses to start with them."""
    with refused("tensor_parallel"):
        on_rank(shape, ranks=ranks)


def test_one_element_is_a_state() -> None:
    """The smallest there can be, of either part."""
    nothing: dict[str, Any] = {"conv_channels": 0, "conv_steps": 0, "recurrent_heads": 0, "recurrent_head_elements": 0}

    assert 2 == on_rank(replace(DELTA, **{**nothing, "conv_channels": 1, "conv_steps": 1}))
    assert 4 == on_rank(replace(DELTA, **{**nothing, "recurrent_heads": 1, "recurrent_head_elements": 1}))


def test_parts_of_one_size_are_a_state() -> None:
    """As many elements in the convolution as in the matrix are twice as many, not none."""
    same = replace(DELTA, conv_channels=4, conv_steps=3, recurrent_heads=4, recurrent_head_elements=3)

    assert 12 * 2 + 12 * 4 == on_rank(same)
