"""Values that cannot be are refused at their edges, and those beside the edge are not."""

from __future__ import annotations

import pytest

from kvdiag.kv.fit.scenario import GivenWeights
from kvdiag.kv.model_error import KvModelError
from kvdiag.kv.weights.checkpoint import CheckpointTensor, RankWeights


@pytest.mark.parametrize(("stage", "weights_bytes"), [(-1, 0), (0, -1), (-1, 5), (5, -1)])
def test_a_rank_has_a_stage_and_weights(stage: int, weights_bytes: int) -> None:
    """Either of them below 0 is impossible."""
    # THEN
    with pytest.raises(KvModelError, match="is impossible"):
        RankWeights(stage=stage, weights_bytes=weights_bytes)
    assert 0 == RankWeights(stage=0, weights_bytes=0).weights_bytes


@pytest.mark.parametrize(("stored_bytes", "elements"), [(-1, 0), (0, -1), (-1, 5), (5, -1)])
def test_a_tensor_has_bytes_and_elements(stored_bytes: int, elements: int) -> None:
    """Either of them below 0 is impossible."""
    # THEN
    with pytest.raises(KvModelError, match="is impossible"):
        CheckpointTensor(name="a", stored_bytes=stored_bytes, elements=elements)
    assert 0 == CheckpointTensor(name="a", stored_bytes=0, elements=0).elements


@pytest.mark.parametrize("total_bytes", [-1, (1 << 50) + 1])
def test_given_weights_are_bounded(total_bytes: int) -> None:
    """None at all, and a pebibyte, are still weights."""
    # THEN
    with pytest.raises(KvModelError, match=r"must lie between 0 and 1125899906842624$") as caught:
        GivenWeights(total_bytes=total_bytes)
    assert "weights" == caught.value.field
    assert [0, 1 << 50] == [GivenWeights(total_bytes=edge).total_bytes for edge in (0, 1 << 50)]
