"""The agents' folder as a whole: what its files have together is bounded, since it is read every second."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdiag.sources import agents
from tests.unit.sources.agent_files import NAME, read, write


def test_files_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself may be of the size that is allowed; each that is left unread is a gap."""
    size = write(tmp_path).stat().st_size
    for number in (1, 2):
        write(tmp_path, "{" + " " * size, f"agent-9999999-{number}.json")
    monkeypatch.setattr(agents, "MAX_READ_BYTES", size + 1)

    found, gaps = read(tmp_path)

    assert found is not None
    assert ["agent-9999999-1.json: not read", "agent-9999999-2.json: not read"] == sorted(
        gap.removeprefix("failed: ").rpartition(": the files")[0] for gap in gaps if NAME not in gap
    )
