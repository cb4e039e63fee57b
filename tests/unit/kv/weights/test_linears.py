"""Linear layers: how ranks share them, and what they add up to."""

import pytest

from kvdiag.kv.weights.linear_layers import LayerParameters, Linear, Parameters, block


@pytest.mark.parametrize(
    ("most", "ranks", "parts"),
    [
        (None, 1, 1),
        (None, 8, 8),
        # Three KV heads: two ranks have one and a half each, six ranks share three.
        (3, 2, 2),
        (3, 3, 3),
        (3, 6, 3),
        (1, 8, 1),
    ],
)
def test_ranks_share_a_linear_layer_as_it_is_spread(most: int | None, ranks: int, parts: int) -> None:
    """A matrix is divided by the ranks, by as many as there are KV heads, or not at all."""
    assert parts == Linear("self_attn.k_proj", 12, most).share(ranks)


def test_a_gated_block_has_three_matrices() -> None:
    """Gate and up go by one name and are twice the down projection; without a gate there is one up projection, and
    without a width no matrix.
    """
    gated = block("mlp", inputs=5, width=7)

    assert LayerParameters((Linear("mlp.gate_proj", 70), Linear("mlp.down_proj", 35))) == gated
    plain = block("mlp", inputs=5, width=7, matrices=2)
    assert (Linear("mlp.up_proj", 35), Linear("mlp.down_proj", 35)) == plain.linears
    assert LayerParameters() == block("mlp.shared_experts", inputs=5, width=0)


def test_layers_add_up() -> None:
    """Matrices and what every rank holds are added; the model is embedding, output layer, layers and the rest."""
    first, second = LayerParameters((Linear("a", 10),), 3), LayerParameters((Linear("b", 20),), 4)

    both = first + second

    assert (LayerParameters((Linear("a", 10), Linear("b", 20)), 7), 37) == (both, both.total)
    assert 100 + 200 + 37 + 13 == Parameters(embedding=100, head=200, layers=(first, second), other=13).total
