"""`kvdiag fit` of an encoder, which keeps no KV cache."""

import json
from pathlib import Path

import pytest

from kvdiag.commands import main
from tests.unit.commands.fit.fitting import answer, refusal


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """The config of bert-base."""
    path = tmp_path / "config.json"
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    path.write_text(json.dumps(config))
    return str(path)


def test_an_encoder_is_judged_by_its_weights(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """BERT keeps no KV cache: its 109 million weights and the overheads decide, and the cache's figures are null."""
    code, document = answer(capsys, bert, "--gpu", "80GB", "--no-profile")
    small, refused = answer(capsys, bert, "--gpu", "1GiB", "--no-profile")

    budget = document["budgets"][0]
    cache = ("max_requests", "max_context_tokens", "num_blocks", "blocks_per_request", "capacity_tokens")
    assert (0, False, [None] * 5, None) == (
        code,
        document["keeps_kv_cache"],
        [document[name] for name in cache],
        document["block_waste_ratio"],
    )
    assert (2, True) == (small, refused["headroom_bytes"] < 0)
    assert budget["weights_bytes"] == pytest.approx(2 * 109.5e6, rel=0.01)


def test_an_encoder_says_in_one_line_that_it_keeps_nothing(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """The text has one line about the cache, and neither blocks nor a longest context; stages are no obstacle."""
    code = main(["fit", bert, "--gpu", "80GB", "--no-profile", "--pp", "2"])
    text = capsys.readouterr().out

    assert (0, 1) == (code, text.count("none: only weights"))
    assert not [word for word in ("blocks", "concurrency", "max context", "KV pool") if word in text]


def test_an_encoder_has_neither_pool_nor_grid(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """Asking what a pool holds of it is refused, and so is a grid."""
    assert "has no KV cache" in refusal(capsys, bert, "--kv-pool-bytes", "2000000")
    assert "--grid" in refusal(capsys, bert, "--grid")
