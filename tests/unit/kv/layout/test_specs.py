"""Layer specs in the engine's own terms into pages."""

from typing import Any

import pytest

from kvdiag.kv.layout.page_specs import is_spec_document, parse_page_specs
from kvdiag.kv.layout.pages import PageKind, PageSpec
from tests.unit.kv.refused import refused

FULL: dict[str, Any] = {"spec": "FullAttentionSpec", "block_size": 16, "page_bytes": 65_536, "num_kv_heads": 8}
STATE: dict[str, Any] = {"spec": "MambaSpec", "block_size": 16, "page_bytes": 60_000}


def page(**changes: Any) -> PageSpec:
    """The page of one entry."""
    (only,) = parse_page_specs({"layers": [FULL | changes]})
    return only


@pytest.mark.parametrize(
    ("spec", "more", "kind"),
    [
        ("FullAttentionSpec", {}, PageKind.FULL),
        ("MLAAttentionSpec", {}, PageKind.MLA),
        ("SlidingWindowSpec", {"sliding_window": 1024}, PageKind.SLIDING),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 8192}, PageKind.CHUNKED),
        ("MambaSpec", {}, PageKind.STATE),
        ("CrossAttentionSpec", {}, PageKind.CROSS),
    ],
)
def test_every_spec_of_the_engine_has_a_page(spec: str, more: dict[str, int], kind: PageKind) -> None:
    """Each spec is found by its class name, with 65,536 bytes a block for any kind."""
    actual = page(spec=spec, **more)

    assert (kind, 16, 65_536) == (actual.kind, actual.block_size_tokens, actual.page_bytes)
    assert tuple(more.values()) == tuple(
        tokens for tokens in (actual.window_tokens, actual.chunk_tokens) if tokens is not None
    )


def test_a_page_is_divided_into_rows() -> None:
    """65,536 bytes / 8 heads / 16 tokens = 512; one head where the number is not reported."""
    expected = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=8, row_bytes=512, variant="128 64 bf16")

    assert expected == page(head_size=128, head_size_v=64, dtype="bf16")
    assert (1, 4096) == (page(num_kv_heads=None).heads, page(num_kv_heads=None).row_bytes)


@pytest.mark.parametrize("told", [True, False])
def test_what_context_parallel_ranks_share(told: bool) -> None:
    """Attention is shared by default, states only where the flag is set."""
    (state,), (shared,) = (parse_page_specs({"layers": [STATE | more]}) for more in ({}, {"dcp_sharded": told}))

    assert [True, False, told, told] == [
        page().dcp_sharded,
        state.dcp_sharded,
        page(dcp_sharded=told).dcp_sharded,
        shared.dcp_sharded,
    ]


def test_a_state_is_one_row() -> None:
    """With its drafts' and checkpoints' blocks; its shapes and dtypes decide with which it shares a table."""
    told = {"num_speculative_blocks": 3, "num_prefill_checkpoint_blocks": 2, "shapes": [[4]], "dtypes": ["bf16"]}
    expected = PageSpec(
        kind=PageKind.STATE,
        block_size_tokens=16,
        heads=1,
        row_bytes=60_000,
        variant="[[4]] ['bf16']",
        speculative_blocks=3,
        checkpoint_blocks=2,
        dcp_sharded=False,
    )

    (with_all, with_none) = parse_page_specs({"layers": [STATE | told, STATE]})

    assert expected == with_all
    assert (0, 0) == (with_none.speculative_blocks, with_none.checkpoint_blocks)


def test_an_entry_stands_for_as_many_layers_as_it_counts() -> None:
    """Once where it does not say."""
    pages = parse_page_specs({"layers": [FULL | {"count": 3}, STATE]})

    assert [PageKind.FULL] * 3 + [PageKind.STATE] == [each.kind for each in pages]
    assert 4096 == len(parse_page_specs({"layers": [FULL | {"count": 4095}, FULL]}))


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        (None, "layers"),
        ([], "layers"),
        ([FULL | {"count": 4096}, STATE], "layers"),
        ([FULL, FULL | {"spec": "NoSpec"}], "layers[1].spec"),
        ([FULL | {"spec": None}], "layers[0].spec"),
        ([FULL | {"page_bytes": 65_537}], "layers[0].page_bytes"),
        ([FULL | {"block_size": "16"}], "layers[0].block_size"),
        ([FULL | {"spec": "SlidingWindowSpec"}], "sliding_window"),
    ],
)
def test_what_is_no_spec_is_named(layers: list[object] | None, field: str) -> None:
    """By its place in the list and its field."""
    with refused(field):
        parse_page_specs({"layers": layers})


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"layers": [FULL, STATE]}, True),
        ({"layers": []}, False),
        ({"layers": [FULL, {"type": "attention"}]}, False),
        ({"layers": [FULL, "spec"]}, False),
        ({"layers": {"spec": 1}}, False),
        ({"model_type": "llama", "layers": 32}, False),
        ({}, False),
    ],
)
def test_specs_are_told_from_a_config(document: dict[str, object], expected: bool) -> None:
    """By a list of layers that all name a spec."""
    assert expected is is_spec_document(document)
