"""What vLLM itself registers, and the cache layers that it builds for the default config of each class it can build.

Runs in vLLM's own Python: `ENV/bin/python registry_layers.py` prints the registered names on one line, then one JSON
object for each class: its config and its layers' specs. Models are built on the meta device: no weights, no kernels.
A class is left out if its config class lacks what its model reads, or if it needs a GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import import_utils

import_utils.is_torchvision_available()  # remembers that it is not there


class Named(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        """Return the name of what a vision processor reads."""
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(types.ModuleType):
    """A module with any class that is asked for."""

    __path__: list[str] = []  # noqa: RUF012 - a package has it so

    def __getattr__(self, name: str) -> Any:
        """Return an empty class."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, which images alone need."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for it and its parts."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision") else None

    def create_module(self, spec: Any) -> Any:
        """Return the empty module."""
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        """Run nothing."""


sys.meta_path.append(Finder())

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention.attention import Attention  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: E402
from vllm.triton_utils import triton  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layer_freq", "indexer_types")
PATTERNS = ("layers_block_type", "hybrid_override_pattern", "compress_ratios", "block_configs", "per_layer_config")
MOST_LAYERS = 8
FEWER = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2}


def model_types() -> dict[str, list[str]]:
    """The model types that transformers has for a class."""
    found: dict[str, list[str]] = {}
    for name, table in vars(modeling_auto).items():
        if name.startswith("MODEL") and name.endswith("MAPPING_NAMES"):
            for model_type, classes in table.items():
                for one in classes if isinstance(classes, tuple | list) else [classes]:
                    found.setdefault(one, []).append(model_type)
    return found


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The config with few layers and experts, in nested configs, too."""
    depth = config.get("num_hidden_layers")
    if isinstance(depth, int) and depth > MOST_LAYERS and not any(config.get(name) for name in PATTERNS):
        config["num_hidden_layers"] = MOST_LAYERS
        for name in LISTS:
            if isinstance(config.get(name), list):
                config[name] = config[name][:MOST_LAYERS]
    for name, most in FEWER.items():
        if isinstance(config.get(name), int):
            config[name] = min(most, config[name])
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            shrunk(value)
    return config


def default_config(name: str, types_of: dict[str, list[str]]) -> dict[str, Any] | None:
    """A class's config as its config class makes it from nothing; `None` without such a class."""
    for model_type in types_of.get(name, ()):
        for classes in (_CONFIG_REGISTRY, CONFIG_MAPPING):
            if model_type in classes:
                made = json.loads(classes[model_type]().to_json_string(use_diff=False))
                made |= {"model_type": model_type, "architectures": [name]}
                return shrunk(made)
    return None


def built(config: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The engine's settings, and the model that it builds for a config, with options of the engine."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_num_batched_tokens=300_000,
            **options,
        )
        settings = arguments.create_engine_config()
    with set_current_vllm_config(settings):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
            return settings, initialize_model(settings)


def specs(config: dict[str, Any], **options: Any) -> list[Any]:
    """The specs of the cache layers of that model."""
    settings, _ = built(config, **options)
    with set_current_vllm_config(settings):
        return [
            spec
            for layer in settings.compilation_config.static_forward_context.values()
            if isinstance(layer, AttentionLayerBase)
            and not (isinstance(layer, Attention) and layer.kv_sharing_target_layer_name)
            and (spec := layer.get_kv_cache_spec(settings)) is not None
        ]


def layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What decides the bytes and blocks of a config's layers."""
    return [described(spec) for spec in specs(config)]


def described(spec: Any) -> dict[str, Any]:
    """What decides a spec's bytes and blocks."""
    names = ("num_kv_heads", "head_size", "head_size_v", "sliding_window", "attention_chunk_size")
    return {"spec": type(spec).__name__} | {name: getattr(spec, name, None) for name in names}


def main() -> None:
    """Print the names, then the classes that can be built."""
    tables = {name: table for name, table in vars(registry).items() if name.endswith("_MODELS")}
    former = {**tables["_PREVIOUSLY_SUPPORTED_MODELS"], **tables["_OOT_SUPPORTED_MODELS"]}
    names = sorted(set(tables["_VLLM_MODELS"]) - set(former))
    sys.stdout.write(json.dumps(names) + "\n")
    # In a process of its own each class takes seconds to look at.
    registry._LazyRegisteredModel.inspect_model_cls = (  # noqa: SLF001 - there is no public way
        lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())  # noqa: SLF001
    )
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda *_: None
    types_of = model_types()
    for name in names:
        try:
            config = default_config(name, types_of)
            found = None if config is None else layers(json.loads(json.dumps(config)))
        except Exception as error:  # noqa: BLE001 - why a class cannot be built here is not the question
            sys.stderr.write(f"{name}: {type(error).__name__}\n")
            continue
        if found is not None:
            sys.stdout.write(json.dumps({"name": name, "config": config, "layers": found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
