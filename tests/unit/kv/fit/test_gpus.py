"""GPU names and sizes."""

import json
import pkgutil

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.gpu_catalogue import (
    GPU_NAMES,
    compute_capability,
    gpu_bytes,
    gpu_name,
    parse_bytes,
    unsupported_levers,
)
from tests.unit.kv.refused import refused


@pytest.mark.parametrize(
    ("name", "expected"),
    [("80GB", 80_000_000_000), ("80 GiB", 80 << 30), ("0.5gib", 1 << 29), ("85899345920", 85_899_345_920)],
)
def test_sizes_in_place_of_a_name(name: str, expected: int) -> None:
    """GB means a thousand million bytes and GiB 2**30."""
    assert expected == gpu_bytes(name)


@pytest.mark.parametrize("name", ["H9000", "", "-5GB", "0GB", "80 apples", "9" * 30])
def test_what_is_neither_is_refused(name: str) -> None:
    """An unknown name is answered with the known ones."""
    with refused("gpu"):
        gpu_bytes(name)


def test_a_size_names_its_own_field() -> None:
    """A bad size of another option blames that option."""
    with refused("weights"):
        parse_bytes("lots", field="weights")


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
        ("a100", "a100"),
        ("4090", "rtx4090"),
        ("80GB", None),
        ("85899345920", None),
        ("a GPU of tomorrow", None),
        ("", None),
    ],
)
def test_two_names_of_a_gpu_are_one(text: str, expected: str | None) -> None:
    """What NVML calls it, what people type, and what is no name."""
    assert expected == gpu_name(text)


@pytest.mark.parametrize(
    ("name", "typed", "mib"),
    [
        ("NVIDIA A10", "a10", 23_028),
        ("NVIDIA A10G", "a10g", 23_028),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 40_960),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", 40_960),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 81_920),
        ("NVIDIA RTX A6000", "a6000", 49_140),
        ("NVIDIA B200", "b200", 183_359),
        ("NVIDIA GH200 480GB", "gh200", 97_871),
        ("NVIDIA GH200 96GB", "gh200-96gb", 97_871),
        ("NVIDIA H100 80GB HBM3", "h100-80gb", 81_559),
        ("NVIDIA H100", "h100", 81_559),
        ("NVIDIA H100 NVL", "h100_nvl", 95_830),
        ("NVIDIA H20", "h20", 97_871),
        ("NVIDIA H20-3e", "H20-3e", 143_771),
        ("NVIDIA H200", "H200", 143_771),
        ("NVIDIA L4", "L4", 23_034),
        ("NVIDIA L40S", "nvidia-l40s", 46_068),
        ("AMD Instinct MI300X", "MI300X", 196_592),
        ("NVIDIA GeForce RTX 3090", "3090", 24_576),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24_564),
        ("NVIDIA GeForce RTX 5090", "5090", 32_607),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000_Ada", 49_140),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 97_887),
        ("NVIDIA A40", "a40", 46_068),
        ("NVIDIA L40", "L40", 46_068),
        ("NVIDIA B300 SXM6", "b300", 275_040),
        ("NVIDIA B300 SXM6 AC", "b300", 275_040),
        ("NVIDIA GB200", "gb200", 189_471),
        ("NVIDIA GB300", "gb300", 284_208),
        ("NVIDIA GB10", "dgx-spark", 124_610),
        ("AMD Instinct MI325X", "mi325x", 262_128),
        ("AMD Instinct MI355X", "MI355X", 294_896),
        ("NVIDIA GeForce RTX 3080", "3080", 10_240),
        ("NVIDIA GeForce RTX 4080", "RTX 4080", 16_376),
        ("NVIDIA GeForce RTX 5080", "5080", 16_303),
        ("Tesla T4", "t4", 15_360),
        ("Tesla V100-SXM2-16GB", "v100-16gb", 16_384),
        ("Tesla V100-SXM2-32GB", "v100", 32_768),
    ],
)
def test_memory_as_the_driver_shows_it(name: str, typed: str, mib: int) -> None:
    """The total of nvidia-smi (rocm-smi), in MiB, by the driver's name and by what people type, of one family."""
    assert (mib << 20, mib << 20) == (gpu_bytes(typed), gpu_bytes(name))
    assert gpu_name(name) == gpu_name(typed) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("7b", 7),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("2k", 2000),
        ("3m", 3_000_000),
        ("3MiB", 3 << 20),
        ("1.5 GiB", 3 << 29),
        ("1.5gb", 1_500_000_000),
        ("2TB", 2_000_000_000_000),
        ("2TiB", 2 << 40),
        ("1.9", 1),
        ("1125899906842624", 1 << 50),
        ("1125899906842623", (1 << 50) - 1),
        ("1024 TiB", 1 << 50),
    ],
)
def test_units_of_sizes(text: str, expected: int) -> None:
    """Powers of 1,000, or of 1,024 with an i; bytes without a unit, to the last of them."""
    assert expected == parse_bytes(text, field="weights")


@pytest.mark.parametrize(
    "text",
    ["0" + " " * 40 + "b", "0.9", "1125899906842625", "1025TiB", "-1", "1e9", "x" * 41, "9" * 400 + "GB", "9" * 5000],
)
def test_sizes_that_are_none(text: str) -> None:
    """Nothing, more than a pebibyte, or no number; the value is shown cut short."""
    with pytest.raises(KvModelError) as caught:
        parse_bytes(text, field="weights")

    assert ("weights", False) == (caught.value.field, len(text) > 40 and text[:41] in str(caught.value))


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        ("t4", {"fp8-kv"}),
        ("Tesla V100-SXM2-16GB", {"fp8-kv", "fp8-weights"}),
        ("v100", {"fp8-kv", "fp8-weights"}),
        ("h100", set()),
        ("80GB", set()),
    ],
)
def test_levers_that_a_gpu_has_no_kernels_for(name: str, levers: set[str]) -> None:
    """8-bit caches need compute capability 8.0, and 8-bit weights 7.5."""
    assert levers == unsupported_levers(name)


def test_a_gpu_has_at_least_a_mebibyte() -> None:
    """A number without its unit is refused as one: a GPU cannot have 80 bytes."""
    assert 1 << 20 == gpu_bytes("1MiB")
    with refused("gpu"):
        gpu_bytes("1048575")
    with pytest.raises(KvModelError):
        gpu_bytes("0" * 41 + "80")
    with pytest.raises(KvModelError):
        gpu_bytes("h" * 41)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVIDIA A100X", None),
        ("NVIDIA A10M", None),
        ("NVIDIA H100NVL", None),
        ("NVIDIA L400", None),
        ("NVIDIA RTX 6000", None),
        ("nvidia nvidia t4", "t4"),
        ("x" * 78 + " t4", None),
    ],
)
def test_a_name_that_only_begins_like_another_is_another(text: str, expected: str | None) -> None:
    """A10M is no A10, L40 no L40S."""
    assert expected == gpu_name(text)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 64GB",
        "NVIDIA H100 72GB",
        "NVIDIA H100 89GB",
        "NVIDIA H100 NVL 85GB",
        "NVIDIA H200 157GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-40C",
        "GRID T4-8Q",
        "2x h100",
        "h100 l4",
        "not-h100",
    ],
)
def test_a_variant_with_other_memory_is_not_taken_for_it(name: str) -> None:
    """A part of a GPU, or another amount of memory, has no figure here."""
    with pytest.raises(KvModelError):
        gpu_bytes(name)


@pytest.mark.parametrize(("name", "size"), [("h100", 73), ("h100", 80), ("h100", 88), ("h200", 141), ("h200", 156)])
def test_a_size_in_a_name_may_be_a_tenth_off(name: str, size: int) -> None:
    """A name counts the memory in other units than NVML, and without what ECC and firmware keep."""
    assert gpu_bytes(name) == gpu_bytes(f"NVIDIA {name} {size}GB")


def test_a_name_is_looked_at_up_to_its_80th_character() -> None:
    """Drivers' names are half as long; an unknown word before it makes another GPU."""
    assert gpu_bytes("t4") == gpu_bytes("Tesla T4" + " " * 72 + "z")
    with pytest.raises(KvModelError):
        gpu_bytes("Tesla T4" + " " * 71 + "z")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("h100", 90), ("NVIDIA B200", 100), ("a100", 80), ("5090", 120), ("gb10", 121), ("mi300x", None), ("80GB", None)],
)
def test_the_generation_of_a_gpu(name: str, expected: int | None) -> None:
    """CUDA's compute capability; a size and AMD have none."""
    assert expected == compute_capability(name)


def test_every_nvidia_gpu_has_a_generation() -> None:
    """On which block sizes and cache formats depend."""
    assert {"mi300x", "mi325x", "mi355x"} == {name for name in GPU_NAMES if compute_capability(name) is None}


def test_only_figures_that_were_read_have_no_source() -> None:
    """An unread nvidia-smi is no source: the others say that it was published, or that nothing verifies them."""
    sources = json.loads(pkgutil.get_data("kvdiag.kv.fit", "gpus.json") or b"")["sources"]

    assert set(sources) <= set(GPU_NAMES)
    assert {"a40", "l40", "rtx3080", "rtx4080"} == {name for name, text in sources.items() if text == "not verified"}
    assert {"b300", "gb200", "gb300", "rtx5080"} == {
        name for name, text in sources.items() if text.startswith("published nvidia-smi output")
    }
