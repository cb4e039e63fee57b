"""What Grafana's own types do not know of a board: `python grafana_schema.py BOARD` prints it as JSON.

It runs in an environment that has `grafana-foundation-sdk`, which is generated from the schema of each version of
Grafana. A board is read into these types and written again: a field that is lost is none that they have.
"""

# mypy: ignore-errors

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The paths of what is only in the first of two documents; places in lists are left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after[name], f"{path}/{name}") if name in after else [f"{path}/{name}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, path)
    elif before != after:
        yield path


def main() -> None:
    """Print the paths of each board that is named."""
    plugins.register_default_plugins()
    found = set()
    for name in sys.argv[1:]:
        board = json.loads(Path(name).read_text(encoding="utf-8"))
        read = dashboard.Dashboard.from_json(board)
        written = json.loads(json.dumps(read, cls=encoder.JSONEncoder))
        found |= {re.sub("^(/panels)+", "/panels", path) for path in lost(board, written)}
    sys.stdout.write(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
