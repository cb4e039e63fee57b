"""GPU names and sizes."""

import pytest

from kvdiag.kv.errors import KvModelError
from kvdiag.kv.gpus import GPU_NAMES, gpu_bytes, gpu_name, parse_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100", 81_559 << 20),
        ("NVIDIA H100", 81_559 << 20),
        ("a100", 81_920 << 20),
        ("RTX 4090", 24_564 << 20),
        ("80GB", 80_000_000_000),
        ("80 GiB", 80 << 30),
        ("0.5gib", 1 << 29),
        ("85899345920", 85_899_345_920),
    ],
)
def test_names_and_sizes(name: str, expected: int) -> None:
    """A name gives NVML's total, GB means a thousand million bytes and GiB 2**30."""
    assert expected == gpu_bytes(name)


@pytest.mark.parametrize("name", ["H9000", "", "-5GB", "0GB", "80 apples", "9" * 30])
def test_what_is_neither_is_refused(name: str) -> None:
    """An unknown name is answered with the known ones."""
    with pytest.raises(KvModelError, match="h100") as caught:
        gpu_bytes(name)

    assert "gpu" == caught.value.field


def test_a_size_names_its_own_field() -> None:
    """A bad size of another option blames that option."""
    with pytest.raises(KvModelError) as caught:
        parse_bytes("lots", field="weights")

    assert "weights" == caught.value.field


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_known_gpu_has_memory(name: str) -> None:
    """Each name gives between 8 and 512 GiB."""
    assert 8 << 30 <= gpu_bytes(name) <= 512 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", "h100"),
        ("H100-80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("a100", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("80GB", None),
        ("85899345920", None),
        ("a GPU of tomorrow", None),
        ("", None),
    ],
)
def test_two_names_of_a_gpu_are_one(text: str, expected: str | None) -> None:
    """What NVML calls it, what people type, and what is no name."""
    assert expected == gpu_name(text)
