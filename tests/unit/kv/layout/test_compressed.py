"""DeepSeek-V4: blocks of a request in published start-up logs, the formats, and what the config must say."""

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.capacity import CacheLayout
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import PageKind
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.dataset import GIB, config_of, rows
from tests.unit.kv.refused import refused

FLASH = config_of("DeepSeek-V4-Flash")
SHARED = {
    "model_type": "deepseek_v41", "num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 4096,
    "head_dim": 512, "index_head_dim": 128, "sliding_window": 128, "compress_ratios": [0, 1, 2, 2],
    "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 3],
}  # fmt: skip


def laid_out(config: dict[str, object], **settings: object) -> tuple[Architecture, Deployment, CacheLayout]:
    """A model in its usual format."""
    architecture = parse_architecture(config)
    deployment = Deployment(**{"kv_dtype": "fp8", **settings})  # type: ignore[arg-type]
    return architecture, deployment, deployed_layout(architecture, deployment)


@pytest.mark.parametrize("row", [row for row in rows() if row["id"] in ("v019", "v070")], ids=lambda row: row["id"])
def test_the_bytes_that_a_refused_start_needed_are_those_of_its_blocks(row: dict[str, float]) -> None:
    """Versions 0.22 and 0.27 refused with "X GiB KV cache is needed". Their block, 22 x 47,808 bytes (one page of every
    size for each of a group's layers), is inferred from these printed GiB: it was not read in their source.
    """
    batched = row["max_num_batched_tokens"] or 8_192  # The default on this GPU.
    architecture, deployment, layout = laid_out(FLASH, max_num_batched_tokens=batched)
    blocks = layout.admission_blocks(int(row["max_model_len"]), deployment.request_terms(architecture))
    sizes = {page.page_bytes for group in layout.groups for page in group.pages if page.kind is PageKind.MLA}
    window_layers = max(len(group.layers) for group in layout.groups if group.page.block_size_tokens == 64)

    assert round(blocks * window_layers * sum(sizes) / GIB, 2) == row["needed_kv_gib"]


def test_a_block_is_as_large_as_the_widest_group() -> None:
    """Version 0.32 packs the pages of a group side by side: compressed rows and indexers decide."""
    _, _, layout = laid_out(FLASH)

    assert (21 * (37_440 + 8_640) + 20 * 1_728,) == layout.bytes_per_block


def test_rows_are_those_of_the_gpu() -> None:
    """V4.1 keeps 584 bytes a row on Hopper and 528 on data-centre Blackwell, where NVFP4 makes the compressed 288."""
    pages = {
        settings: {page.row_bytes for group in layout.groups for page in group.pages if page.kind is not PageKind.RING}
        for settings in ((90, "fp8"), (100, "fp8"), (103, "nvfp4_ds_mla"))
        for layout in [laid_out(SHARED, compute_capability=settings[0], kv_dtype=settings[1])[2]]
    }

    assert pages == {(90, "fp8"): {584, 132}, (100, "fp8"): {528, 132}, (103, "nvfp4_ds_mla"): {528, 288, 132}}


@pytest.mark.parametrize(
    ("config", "settings", "field"),
    [
        (FLASH, {"kv_dtype": "bfloat16"}, "kv_dtype"),
        (SHARED, {"kv_dtype": "nvfp4_ds_mla"}, "kv_dtype"),
        ({**SHARED, "compress_ratios": [0, 4, 2, 2]}, {}, "compress_ratios"),
        ({**SHARED, "compress_ratios": [0, 1, 2]}, {}, "compress_ratios"),
        ({**SHARED, "kv_source_layer_ids": []}, {}, "kv_source_layer_ids"),
        ({**FLASH, "compress_ratios_count": None}, {}, "compress_ratios"),
    ],
    ids=["16 bits", "nvfp4 on Hopper", "unknown ratio", "too few ratios", "no source", "no ratios"],
)
def test_what_the_kernels_do_not_take_is_refused(
    config: dict[str, object], settings: dict[str, object], field: str
) -> None:
    """The error names the field."""
    with refused(field):
        laid_out(config, **settings)


def test_weights_that_are_not_modelled_are_refused() -> None:
    """A count from the config would leave out most of them."""
    with refused("weights"):
        count_parameters(FLASH, parse_architecture(FLASH))
