"""The bytes of the LoRA slots that vLLM's own manager allocates for a model.

Runs in vLLM's own Python: `ENV/bin/python adapter_slots.py CASES.json` prints one JSON object a case. Models and slots
are on the meta device.
"""

from __future__ import annotations

from typing import Any

import registry_layers  # type: ignore[import-not-found]
import torch
from bare_layers import print_figures  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.models import registry

registry._LazyRegisteredModel.inspect_model_cls = (  # noqa: SLF001 - there is no public way
    lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())  # noqa: SLF001
)


def slots(case: dict[str, Any]) -> dict[str, Any]:
    """The bytes of all slots of a case."""
    settings, model = registry_layers.built(
        case["config"],
        enable_lora=True,
        max_loras=case["max_loras"],
        max_lora_rank=case["max_lora_rank"],
        lora_dtype=case["lora_dtype"],
    )
    with set_current_vllm_config(settings), torch.device("meta"):
        manager = LoRAModelManager(
            model, 8, 64, case["config"]["vocab_size"], settings.lora_config, torch.device("meta"), settings
        )
    held = [
        getattr(module, name)
        for module in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked")
        if hasattr(module, name)
    ]
    stacks = {id(one): one for each in held for one in (each if isinstance(each, tuple) else (each,))}
    return {"bytes": sum(stack.numel() * stack.element_size() for stack in stacks.values())}


if __name__ == "__main__":
    print_figures(slots)
