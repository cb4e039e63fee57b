"""Records how many parameters transformers' models have, in data/parameters.json for test_recorded_parameters.py.

Run by hand, with a Python that has torch and transformers: `python tests/unit/kv/weights/recorded_parameters.py`.
The models are small, of sizes that hardly divide one another, so that a mixed-up size shows; torch keeps them on its
meta device.
What a config leaves out is left to its class.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

OUT = Path(__file__).parents[1] / "data" / "parameters.json"
Config = dict[str, Any]

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|layer|blocks)\.(\d+)\.(.+)$")
# Which group a parameter of a layer belongs to, by its name there: the first that is found counts.
_GROUPS = (
    ("norm", r"(norm|ln_?)\w*\.(\d\.)?(weight|bias)$"),
    ("convolution", r"conv1d|conv\.conv\.|_conv\.|_conv1d"),
    ("decay", r"a_log$"),
    ("bias", r"bias$"),
    # Vectors, and scales of single heads or experts.
    ("scalars", r"self_attn\.(a$|dt)|\.d$|sinks|scal|alpha|beta|eps$|shared_expert_gate|residual|token_type"),
    ("streams", r"altup"),
    ("router", r"\.router\.|\.gate\.(weight|wg\.weight)$|\bgate\.weight$|router"),
    ("shared", r"shared_experts?\.|shared_mlp\."),
    ("experts", r"experts?\.|block_sparse_moe\.(input|output)_linear|fc[12]_latent_proj"),
    ("per_layer", r"per_layer|laurel"),
    ("state", r"mamba\.|linear_attn\.|conv\.(in|out)_proj|mixer\.(in|out|x|dt)_proj|^linear\."),
    ("kv", r"(attn|attention|mixer|self)\.(k_proj|v_proj|key|value)\.weight$"),
    ("attention", r"attn|attention|mixer\.(q|o)_proj"),
    ("dense", r"mlp|feed_forward|ffn|fc1|fc2|fc_in|fc_out|dense|intermediate|output|mixer\.(up|down)"),
)  # fmt: skip
_OUTSIDE = (
    ("bias", r"bias$|z_l_init"),
    ("norm", r"norm|ln_f"),
    ("encoder", r"encoder\.(layers|conv|embed)"),
    ("head", r"lm_head|embed_out"),
    ("pooler", r"^pooler"),
    ("streams", r"altup"),
    ("per_layer", r"per_layer"),
    ("positions", r"wpe|position"),
    ("token_types", r"token_type"),
    ("embedding", r"embed|wte"),
)
_CLASSES = {
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"), transformers.AutoModel),
}


def configs() -> dict[str, Config]:
    """The models that are recorded: names, each with what its config.json would say; a new one is added to the file."""
    models: dict[str, Any] = json.loads(OUT.read_text())["models"]
    return {name: model["config"] for name, model in models.items()}


def recorded(config: Config) -> dict[str, Any]:
    """The groups of one model: outside its layers, and in each of them."""
    # Some classes' own padding token lies beyond so small a vocabulary.
    fields = {"pad_token_id": 0} | {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(config["model_type"], **fields)
        model = _CLASSES.get(config["model_type"], transformers.AutoModelForCausalLM).from_config(made)
    outside: Counter[str] = Counter()
    layers: dict[tuple[str, int], Counter[str]] = {}
    for name, parameter in model.named_parameters():
        found = _LAYER.search(name)
        if name.startswith("pooler") or "model.encoder." in name or found is None:
            outside[_group(_OUTSIDE, name)] += parameter.numel()
        else:
            place = (name[: found.start(1)], int(found.group(1)))
            layers.setdefault(place, Counter())[_group(_GROUPS, found.group(2))] += parameter.numel()
    return {"outside": dict(outside), "layers": [dict(layers[place]) for place in sorted(layers)]}


def _group(groups: tuple[tuple[str, str], ...], name: str) -> str:
    group = next((group for group, expression in groups if re.search(expression, name.lower())), None)
    if group is None:
        raise ValueError(f"{name} belongs to no group")
    return group


def main() -> None:
    """Records every model."""
    transformers.logging.set_verbosity_error()
    models = {name: {"config": config, **recorded(config)} for name, config in configs().items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(model)}" for name, model in models.items()]
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    OUT.write_text(f'{{"versions": {versions}, "models": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
