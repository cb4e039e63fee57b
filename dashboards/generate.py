"""`python -m dashboards.generate` writes the boards beside this file; `--check` tells which are not as it would."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dashboards import diagnosis, fleet
from dashboards.grafana import Board, document

FOLDER = Path(__file__).parent
BOARDS: Mapping[str, Board] = MappingProxyType({"kvdiag.json": diagnosis.BOARD, "kvdiag-fleet.json": fleet.BOARD})


def text(board: Board) -> str:
    """The file of a board."""
    return json.dumps(document(board), indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write what has changed; with `--check` write nothing, and fail where something would be."""
    stale = [
        name
        for name, board in BOARDS.items()
        if not (path := FOLDER / name).exists() or path.read_text(encoding="utf-8") != text(board)
    ]
    for name in stale:
        if arguments == ["--check"]:
            sys.stderr.write(f"{name} is not what the generator makes: python -m dashboards.generate\n")
        else:
            (FOLDER / name).write_text(text(BOARDS[name]), encoding="utf-8")
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
