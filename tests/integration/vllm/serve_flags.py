"""Every flag of `vllm serve`, and every environment variable that vLLM reads where it sizes the KV cache.

Runs in vLLM's own Python: `ENV/bin/python serve_flags.py` prints one JSON object.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

SIZING = (
    "config",
    "distributed/utils.py",
    "engine/arg_utils.py",
    "model_executor/layers/attention",
    "model_executor/layers/mamba",
    "platforms/cpu.py",
    "platforms/cuda.py",
    "platforms/interface.py",
    "transformers_utils/model_arch_config_convertor.py",
    "utils/mem_utils.py",
    "v1/core",
    "v1/kv_cache_interface.py",
    "v1/kv_cache_layout.py",
    "v1/worker",
)
"""The code that decides layers, blocks and the memory for them."""

VARIABLE = re.compile(r"envs\.(VLLM_[A-Z0-9_]+)|environ(?:\.get)?[\[(]\s*[\"'](VLLM_[A-Z0-9_]+)")


def variables() -> list[str]:
    """The variables that this code reads."""
    root = Path(vllm.__file__).parent
    files = [
        file for name in SIZING for file in ([root / name] if (root / name).is_file() else root.glob(f"{name}/**/*.py"))
    ]
    found = {first or second for file in files for first, second in VARIABLE.findall(file.read_text(encoding="utf-8"))}
    return sorted(found)


def main() -> None:
    """Print the flags with the number of their values, and the variables."""
    parser = make_arg_parser(FlexibleArgumentParser())
    actions = [action for action in parser._actions if action.option_strings]  # noqa: SLF001 - there is no public way
    flags = {
        flag: None if action.nargs == "+" else 0 if action.nargs == 0 else 1
        for action in actions
        for flag in action.option_strings
    }
    sys.stdout.write(json.dumps({"flags": flags, "variables": variables()}) + "\n")


if __name__ == "__main__":
    main()
