"""The least and the most of every whole number that a config may hold, for each family that reads it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.layout.page_specs import parse_page_specs
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import declared_quantization
from tests.unit.kv import hybrids
from tests.unit.kv.families.test_families import everything
from tests.unit.kv.observed import reads_of_fields
from tests.unit.kv.recordings import recorded_models

MORE: dict[str, Any] = {
    "vocab_size": 211, "intermediate_size": 86, "index_topk": 8, "index_head_dim": 18, "num_nextn_predict_layers": 1,
    "attention_k_eq_v": True, "attention_other_setting": {"attention_type": "full_attention"}, "num_experts": 5,
    "moe_intermediate_size": 34, "use_sliding_window": True, "ngram_vocab_size_ratio": 7, "emb_split_num": 2,
    "emb_neighbor_num": 3, "vision_config": {"embed_dim": 40, "depth": 5}, "moe_num_experts": 5,
}  # fmt: skip
PATTERNS = {"no_rope_layers": [1] * 9, "sliding_windows": [8] * 9}
MANY = 12
SPECS = ("SlidingWindowSpec", "MambaSpec")
QUANTIZED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "dynamic": {"+:q": {"bits": 8}}},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
]


def configs() -> list[dict[str, Any]]:
    """Every family's fields, and what each of them leaves out elsewhere."""
    whole = [{**everything(name), **MORE} for name in FAMILIES]
    patterned = [{**config, **PATTERNS} for config in whole]
    recorded = [model["config"] for model in recorded_models().values()]
    return [*whole, *patterned, *recorded, *hybrids.CONFIGS.values()]


def test_every_size_has_its_limits(golden: Callable[[str, str], None]) -> None:
    """A number beyond them is refused by its name (test_fields.py), so that no config costs more than a moment."""
    found: dict[tuple[str, ...], set[str]] = {}
    reader = ""

    def note(fields: Fields, names: tuple[str, ...], given: dict[str, Any]) -> None:
        if names:
            key = (fields.path(names[0]), f"{given['low']:,} to {given['high']:,}")
            found.setdefault(key, set()).add(reader)

    with reads_of_fields(note, "maybe_integer", "integers"):
        for config in configs():
            reader = str(config.get("model_type"))
            with suppress(KvModelError):
                count_parameters(config, parse_architecture(config))
        reader = "page specs"
        parse_page_specs(
            {"layers": [{"spec": kind, "block_size": 1, "page_bytes": 1, "sliding_window": 1} for kind in SPECS]}
        )
        for quantization in QUANTIZED:
            reader = str(quantization["quant_method"])
            declared_quantization({"quantization_config": quantization})

    lines = [
        f"{' '.join(key)}: {' '.join(sorted(readers)) if len(readers) <= MANY else 'many'}"
        for key, readers in sorted(found.items())
    ]
    golden("fit/config_limits.txt", "\n".join(lines) + "\n")
