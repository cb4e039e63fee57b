"""Linear layers: how ranks share them, what they add up to, and counts that cannot be."""

import pytest

from kvdiag.kv.weights.linear_layers import LayerParameters, Linear, Parameters, Sharding, block

LAYER = LayerParameters(index=0)


@pytest.mark.parametrize(
    ("spread", "ranks", "parts"),
    [
        (Sharding.DIVIDED, 1, 1),
        (Sharding.DIVIDED, 8, 8),
        # Three KV heads: two ranks have one and a half each, six ranks share three.
        (Sharding.KV_HEADS, 2, 2),
        (Sharding.KV_HEADS, 3, 3),
        (Sharding.KV_HEADS, 6, 3),
        (Sharding.REPLICATED, 8, 1),
    ],
)
def test_ranks_share_a_linear_layer_as_it_is_spread(spread: Sharding, ranks: int, parts: int) -> None:
    """A matrix is divided by the ranks, by as many as there are KV heads, or not at all."""
    assert parts == Linear(name="self_attn.k_proj", parameters=12, spread=spread, kv_heads=3).share(ranks)


def test_a_matrix_of_which_no_more_is_said() -> None:
    """A linear layer is divided, is not padded, and what has KV heads has one."""
    linear = Linear(name="mlp.down_proj", parameters=12)

    assert (4, 0, 1) == (linear.share(4), linear.padded_parameters, linear.kv_heads)


def test_a_gated_block_has_three_matrices() -> None:
    """Gate and up go by one name and are twice the down projection; without a gate there is one up projection."""
    gated = block(3, "mlp", inputs=5, width=7)
    plain = block(3, "mlp", inputs=5, width=7, matrices=2)

    assert [("mlp.gate_proj", 70), ("mlp.down_proj", 35)] == [(one.name, one.parameters) for one in gated.linears]
    assert [("mlp.up_proj", 35), ("mlp.down_proj", 35)] == [(one.name, one.parameters) for one in plain.linears]
    assert (3, 0) == (gated.index, gated.plain)


def test_a_block_of_no_width_has_no_matrices() -> None:
    """Layers without shared experts have none that are empty."""
    assert LayerParameters(index=3) == block(3, "mlp.shared_experts", inputs=5, width=0)


def test_layers_add_up_under_the_first_ones_number() -> None:
    """Matrices and what every rank holds are added; the model is embedding, output layer, layers and the rest."""
    first = LayerParameters(index=2, linears=(Linear(name="a", parameters=10),), plain=3)
    second = LayerParameters(index=7, linears=(Linear(name="b", parameters=20),), plain=4)

    both = first + second

    assert (2, ["a", "b"], 7, 37) == (both.index, [one.name for one in both.linears], both.plain, both.total)
    assert 100 + 200 + 37 + 13 == Parameters(embedding=100, head=200, layers=(first, second), other=13).total
    assert 100 + 200 + 37 == Parameters(embedding=100, head=200, layers=(both,)).total
