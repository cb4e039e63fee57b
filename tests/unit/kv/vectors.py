"""Reading the vector files: integers that vLLM 0.32's own code gave for layer specs."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def vectors() -> list[dict[str, Any]]:
    """All vectors, capacities and refusals."""
    found: list[dict[str, Any]] = json.loads((DATA / "vllm032_vectors.json").read_text())
    return found
