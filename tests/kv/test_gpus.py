"""GPU names and sizes."""

import pytest

from kvdiag.kv.errors import KvModelError
from kvdiag.kv.gpus import GPU_NAMES, gpu_bytes, parse_bytes


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
