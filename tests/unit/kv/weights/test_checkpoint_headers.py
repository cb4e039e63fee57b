"""Weights from checkpoint headers: sizes of every number format, what ranks and stages hold, headers that lie."""

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.weights.checkpoint import (
    CheckpointTensor,
    read_headers,
    weights_from_config,
    weights_from_tensors,
)
from kvdiag.kv.weights.linear_layers import LayerParameters, Linear, Parameters
from kvdiag.kv.weights.quantization import Quantization, WeightFormat, usual_quantization
from tests.unit.kv.refused import refused

GOOD = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}


def tensors(**stored_bytes: int) -> tuple[CheckpointTensor, ...]:
    """Tensors of so many bytes each; a name's dots are written as two underscores."""
    return tuple(
        CheckpointTensor(name=name.replace("__", "."), stored_bytes=size) for name, size in stored_bytes.items()
    )


class Long(Mapping[str, object]):
    """A header of 1,048,576 tensors, which are read and refused where there are no more."""

    def __getitem__(self, name: str) -> object:
        return {**GOOD, "dtype": "BF17"}

    def __iter__(self) -> Iterator[str]:
        return repeat("x", len(self))

    def __len__(self) -> int:
        return 1 << 20


@pytest.mark.parametrize(
    ("bits", "dtypes"),
    [
        (64, ["F64", "I64", "U64", "C64"]),
        (32, ["F32", "I32", "U32"]),
        (16, ["F16", "BF16", "I16", "U16"]),
        (8, ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"]),
        (6, ["F6_E2M3", "F6_E3M2"]),
        (4, ["F4"]),
    ],
)
def test_every_number_format_has_its_width(bits: int, dtypes: list[str]) -> None:
    """24 numbers of each (safetensors/src/tensor.rs::Dtype::bitsize)."""
    for dtype in dtypes:
        (tensor,) = read_headers([{"x": {"dtype": dtype, "shape": [4, 6], "data_offsets": [100, 100 + 3 * bits]}}])

        assert 3 * bits == tensor.stored_bytes, dtype


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shape": None}, "x.shape"),
        ({"shape": [-1, 2]}, "x.shape"),
        ({"shape": "2x2"}, "x.shape"),
        ({"shape": [1] * 9}, "x.shape"),
        ({"shape": [1] * 9, "dtype": "BF17"}, "x.shape"),
        ({"shape": [2**40 + 1]}, "x.shape"),
        ({"dtype": "BF17"}, "x.dtype"),
        ({"shape": [1] * 8, "dtype": "BF17"}, "x.dtype"),
        ({"dtype": None}, "x.dtype"),
        ({"data_offsets": []}, "x.data_offsets"),
        ({"data_offsets": [0, 9]}, "x.data_offsets"),
        ({"data_offsets": [8, 8]}, "x.data_offsets"),
        ({"data_offsets": [2**50 - 7, 2**50 + 1]}, "x.data_offsets"),
    ],
)
def test_a_tensor_that_cannot_be_names_its_field(change: dict[str, Any], field: str) -> None:
    """Shape, type and place must agree; a tensor has at most eight dimensions."""
    with refused(field):
        read_headers([{"x": {**GOOD, **change}}])
    (most,) = read_headers([{"x": {"dtype": "BF16", "shape": [1] * 7 + [4], "data_offsets": [2**50 - 8, 2**50]}}])
    assert 8 == most.stored_bytes
    (large,) = read_headers([{"x": {"dtype": "U8", "shape": [2**40]}}])
    assert 2**40 == large.stored_bytes


@pytest.mark.parametrize("change", [{"dtype": "BF17"}, {"data_offsets": [0, 9]}])
def test_a_long_name_is_cut(change: dict[str, Any]) -> None:
    """120 letters of it are shown."""
    with refused("m" * 120):
        read_headers([{"m" * 300: {**GOOD, **change}}])


def test_headers_are_bounded() -> None:
    """A checkpoint of several files has at most 1,048,576 tensors, and at least one."""
    with refused("safetensors"):
        read_headers([{"first": GOOD}, Long()])
    with refused("x.dtype"):
        read_headers([Long()])

    headers: list[list[dict[str, Any]]] = [[{"__metadata__": {}}, {}], [{"x": "not an object"}]]
    for empty in headers:
        with pytest.raises(KvModelError) as caught:
            read_headers(empty)
        assert caught.value.field in ("safetensors", "x")


def test_stages_hold_their_layers_and_the_ends_of_the_model() -> None:
    """The embedding and a vision tower's layers are on the first stage, the output layer and the last norm on the last,
    and so is a layer beyond all, such as one that drafts.
    """
    found = tensors(
        model__embed_tokens__weight=1,
        visual__blocks__5__attn__weight=10,
        vision_tower__layers__5__attn__weight=100,
        model__layers__0__mlp__weight=1000,
        model__layers__1__mlp__weight=10_000,
        transformer__h__2__mlp__weight=100_000,
        model__layers__9__mlp__weight=1_000_000,
        model__norm__weight=10_000_000,
        lm_head__weight=100_000_000,
    )

    assert [1111, 10_000, 111_100_000] == list(weights_from_tensors(found, tensor_parallel=1, stage_ends=[1, 2, 3]))


def test_a_tied_output_layer_is_the_embedding_on_the_last_stage() -> None:
    """What a checkpoint stores of it is not loaded; the embedding is on both ends, or once where there is one stage."""
    found = tensors(lm_head__weight=100, model__embed_tokens__weight=40, model__layers__0__mlp__weight=8)

    assert [48 // 2, 0, 40 // 2] == list(
        weights_from_tensors(found, tensor_parallel=2, stage_ends=[1, 2, 3], tied=True)
    )
    assert [48] == list(weights_from_tensors(found, tensor_parallel=1, stage_ends=[3], tied=True))
    assert [48, 100] == list(weights_from_tensors(found, tensor_parallel=1, stage_ends=[1, 2]))


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "expected"),
    [
        # 120 bytes of K are divided by the KV heads that there are, 120 of Q by the ranks, a norm's are everywhere.
        (2, 1, 120 + 120 + 7),
        (2, 2, 60 + 60 + 7),
        (2, 4, 60 + 30 + 7),
        (8, 4, 30 + 30 + 7),
        (0, 4, 120 + 30 + 7),
        (None, 4, 120 + 30 + 7),
    ],
)
def test_ranks_share_k_and_v_as_far_as_there_are_heads(kv_heads: int | None, ranks: int, expected: int) -> None:
    """Where nothing is known of the heads, there is one."""
    found = tensors(
        model__layers__0__self_attn__k_proj__weight=120,
        model__layers__0__self_attn__q_proj__weight=120,
        model__layers__0__input_layernorm__weight=7,
    )
    known: dict[str, Any] = {} if kv_heads is None else {"kv_heads": kv_heads}

    assert [expected] == list(weights_from_tensors(found, tensor_parallel=ranks, stage_ends=[1], **known))


MODEL = Parameters(
    embedding=1000,
    head=0,
    layers=(
        LayerParameters((Linear("mlp.down_proj", 800),), plain=3),
        LayerParameters((Linear("self_attn.k_proj", 600, most_parts=2),), plain=5),
        LayerParameters(plain=7),
    ),
    other=11,
)
BF16 = usual_quantization(WeightFormat.BF16)


@pytest.mark.parametrize(
    ("head", "ranks", "ends", "expected"),
    [
        (0, 1, [3], [1000 + 800 + 600 + 15 + 11]),
        # Four ranks: a quarter of the embedding and the block, half of K, all norms and the rest.
        (0, 4, [3], [250 + 200 + 300 + 15 + 11]),
        # Three stages: the tied output layer is the embedding once more on the last.
        (0, 4, [1, 2, 3], [250 + 200 + 3 + 11, 300 + 5, 250 + 7]),
        (2000, 4, [1, 2, 3], [250 + 200 + 3 + 11, 300 + 5, 500 + 7]),
        (2000, 4, [3], [250 + 200 + 300 + 15 + 11 + 500]),
    ],
)
def test_ranks_and_stages_divide_a_model(head: int, ranks: int, ends: list[int], expected: list[int]) -> None:
    """Matrices and vocabularies are divided, K by its heads, and what is plain is on every rank; 16 bits each."""
    model = Parameters(embedding=MODEL.embedding, head=head, layers=MODEL.layers, other=MODEL.other)

    found = weights_from_config(model, quantization=BF16, tensor_parallel=ranks, stage_ends=ends)

    assert [2 * one for one in expected] == list(found)


def test_each_part_has_its_bits() -> None:
    """Linear layers of 4 bits, plain ones of 32 and an output layer of 8 in one model; bytes are rounded up."""
    model = Parameters(embedding=1000, head=2000, layers=MODEL.layers, other=11)
    quantization = Quantization(linear_bits=4, plain_bits=32, head_bits=8)

    found = weights_from_config(model, quantization=quantization, tensor_parallel=1, stage_ends=[3])

    assert [4 * (1000 + 15 + 11) + 2000 + 1400 // 2] == list(found)
    # 2000 / 7 + 1600 / 7 + 600 + 52 = 1166.3
    assert [1167] == list(weights_from_config(MODEL, quantization=BF16, tensor_parallel=7, stage_ends=[3]))


def test_padding_counts_only_where_the_kernel_pads() -> None:
    """MXFP4's experts grow to what the kernel takes, and never shrink."""
    grown = Linear("mlp.experts.0.down_proj", 64, padded_parameters=128)
    whole = Linear("mlp.experts.0.gate_proj", 64)
    model = Parameters(embedding=0, head=0, layers=(LayerParameters((grown, whole)),))

    padded, plain = (
        weights_from_config(
            model, quantization=Quantization(linear_bits=4, padded_experts=pads), tensor_parallel=1, stage_ends=[1]
        )
        for pads in (True, False)
    )

    assert ((96,), (64,)) == (padded, plain)
