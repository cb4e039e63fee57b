"""What all families share refuses figures that cannot be, whoever read them."""

from __future__ import annotations

import pytest

from kvdiag.kv.families.base import Heads, Parts, full_layers
from kvdiag.kv.model_error import KvModelError

ONE = Heads(attention_heads=1, kv_heads=1, head_size=1)


@pytest.mark.parametrize(("depth", "count"), [(0, 1), (1, 0), (0, 0)])
def test_a_model_has_a_depth_and_layers(depth: int, count: int) -> None:
    """Neither can be missing."""
    with pytest.raises(KvModelError) as caught:
        Parts(depth=depth, attention_heads=1, layers=full_layers(count, ONE))

    assert "num_hidden_layers" == caught.value.field


def test_the_smallest_model_has_one_layer_of_one_head() -> None:
    """A drafter of one layer is a model."""
    parts = Parts(depth=1, attention_heads=1, layers=full_layers(1, ONE))

    assert (1, 1) == (parts.depth, len(parts.layers))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_heads_are_at_least_one(heads: int, kv_heads: int, size: int) -> None:
    """None of the three can be nothing."""
    with pytest.raises(KvModelError) as caught:
        Heads(attention_heads=heads, kv_heads=kv_heads, head_size=size)

    assert "num_attention_heads" == caught.value.field
