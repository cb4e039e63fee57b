"""The longest request that vLLM itself accepts of a model's config, and the one that it serves by default.

Runs in vLLM's own Python: `ENV/bin/python context_limits.py CASES.json` prints one JSON object a case: the length
without --max-model-len, and whether each length of the case is accepted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig


def length(folder: str, overrides: dict[str, Any], **settings: Any) -> int | None:
    """The engine's length with some settings; `None` where it refuses them."""
    try:
        config = ModelConfig(folder, skip_tokenizer_init=True, hf_overrides=overrides, **settings)
    except ValueError as error:
        if "greater than the derived max_model_len" not in str(error):
            raise
        return None
    found: int = config.max_model_len
    return found


def told(case: dict[str, Any]) -> dict[str, Any]:
    """The engine's answers for one case."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"config.json": case["config"], **case["beside"]}.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        common = {"disable_sliding_window": case["disable_sliding_window"], "overrides": case["overrides"]}
        return {
            "default": length(folder, **common),
            "accepted": [length(folder, max_model_len=one, **common) == one for one in case["lengths"]],
        }


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.stdout.write(json.dumps(told(one)) + "\n")
        sys.stdout.flush()
