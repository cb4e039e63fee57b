"""The test's end of plugins/meddle.py: words for every process of a server, and what they answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.fixtures.hostile import eventually
from tests.integration.vllm.engine import Engine


def environment(agent: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What a server needs to have both the agent and the plugins, of the agent's environment."""
    folder.mkdir()
    return {
        **agent,
        "VLLM_PLUGINS": "kvdiag_agent,meddle,leak_blocks",
        "KVDIAG_TEST_MEDDLE": str(folder),
        "KVDIAG_TEST_LEAKED_BLOCKS": str(folder / "leaked-blocks"),
        # Enables the API to pause the server.
        "VLLM_SERVER_DEV_MODE": "1",
    }


class Published(NamedTuple):
    """One publication: when it was made, by the clock that all processes share, and the processor time it took."""

    began_nanoseconds: int
    ended_nanoseconds: int
    busy_nanoseconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one process has noted: when each step of the model began, in a worker, and its agent's publications."""

    begun: tuple[int, ...]
    publications: tuple[Published, ...]


@dataclass
class Meddling:
    """Gives one word after another to a server whose agents publish in a folder.

    `processes` are the titles of those with an agent; a lone API server keeps the name of its program.
    """

    server: Engine
    folder: Path
    published: Path
    processes: Sequence[str] = ()
    _number: int = field(default=0, init=False)

    def tell(self, word: str) -> None:
        """Have every process do it, and wait until all have."""
        self._number += 1
        draft = self.folder / "word.new"
        draft.write_text(f"{self._number} {word}")
        draft.replace(self.folder / "word")
        assert eventually(lambda: all(answer["done"] == self._number for answer in self.answers().values()))

    @contextmanager
    def leaking(self, blocks_per_request: int) -> Iterator[None]:
        """Have the engine keep so many blocks of every request that ends in the block; afterwards they are released."""
        file = self.folder / "leaked-blocks"
        file.write_text(str(blocks_per_request))
        try:
            yield
        finally:
            file.unlink()

    def tried(self) -> dict[int, int]:
        """How often each process's agent has tried to publish."""
        return {pid: answer["tried"] for pid, answer in self.answers().items()}

    def wait_for_tries(self, more: int) -> None:
        """Wait until each process's agent has tried so many times more."""
        before = self.tried()
        assert eventually(lambda: all(count >= before[pid] + more for pid, count in self.tried().items()))

    def counted(self) -> list[Counted]:
        """The step times that each process has recorded since counting was started."""
        self.tell("tell_steps")
        told = [json.loads((self.folder / f"steps-{pid}.json").read_text()) for pid in self.answers()]
        return [
            Counted(begun=tuple(one["begun"]), publications=tuple(Published(*each) for each in one["publications"]))
            for one in told
        ]

    def answers(self) -> dict[int, dict[str, Any]]:
        """The newest answer of each living process."""
        living = self.server.pids()
        found = {pid: self.folder / f"answer-{pid}.json" for pid in living}
        return {pid: json.loads(path.read_text()) for pid, path in found.items() if path.exists()}


def published(folder: Path) -> dict[int, dict[str, Any]]:
    """Every publication of agents by its process."""
    told = [json.loads(path.read_text()) for path in folder.glob("agent-*.json")] if folder.is_dir() else []
    return {one["process"]["pid"]: one for one in told}
