"""`kvdiag agent profile` on a real vLLM under load: memory that one of its processes keeps, and from where."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.cli import kvdiag
from tests.integration.vllm.meddling import Meddling
from tests.integration.vllm.traffic import other_traffic

pytestmark = pytest.mark.real_vllm
SECONDS = 8.0
MIB = 2**20


def profiled(meddling: Meddling, word: str) -> Mapping[str, Any]:
    """The document of a profile of a server that does so much as `word` says, by the kind of process."""
    server = meddling.server
    meddling.tell(word)
    try:
        with other_traffic(server):
            access = ("--url", server.url, "--agent-dir", str(meddling.published))
            result = kvdiag("agent", "profile", *access, "--seconds", str(SECONDS), "--output", "json")
    finally:
        meddling.tell("keep_nothing")
    assert 0 == result.code, result.stderr
    return result.document


def by_process(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The profile of the engine core and of the API server, which alone has no title of vLLM's."""
    return {"engine" if "Engine" in one["title"] else "api": one for one in document["processes"]}


KEEPERS = (
    ("keep_in_engine", "engine", "api"),
    pytest.param("keep_in_api_server", "api", "engine", marks=pytest.mark.long),
)


@pytest.mark.parametrize(("word", "keeper", "other"), KEEPERS)
def test_line_that_keeps_buffers_is_named(meddling: Meddling, word: str, keeper: str, other: str) -> None:
    """In the process that keeps them, with file and line and nine tenths of its growth; the other one does not grow."""
    document = profiled(meddling, word)
    found = by_process(document)
    source = Path(__file__).parent / "plugins" / "meddle.py"
    line = next(place for place, text in enumerate(source.read_text().splitlines(), 1) if "_kept.append" in text)
    largest = found[keeper]["stacks"][0]
    assert ("named", line, "meddle.py") == (
        found[keeper]["answer"],
        largest["frames"][0]["line"],
        Path(largest["frames"][0]["file"]).name,
    )
    assert largest["bytes"] >= 0.9 * found[keeper]["process_growth_bytes"] > 10 * MIB
    assert "named" != found[other]["answer"]
    assert document["processes"][0]["load"]["requests"] > 0


@pytest.mark.long
def test_memory_below_python_is_native(meddling: Meddling) -> None:
    """Where ctypes calls malloc in the engine core, no line of Python is blamed."""
    found = by_process(profiled(meddling, "keep_natively_in_engine"))
    assert "native" == found["engine"]["answer"]
    assert found["engine"]["process_growth_bytes"] > 10 * MIB


@pytest.mark.long
def test_soak_that_finds_a_leak_names_its_line(meddling: Meddling) -> None:
    """The process that grew is profiled under the same load, also where the soak is too short to be sure."""
    meddling.tell("keep_per_request")
    access = ("--url", meddling.server.url, "--agent-dir", str(meddling.published))
    try:
        result = kvdiag("run", *access, "--soak", "5m", "--soak-cycle", "2", "--profile", "--output", "json")
    finally:
        meddling.tell("keep_nothing")
    (profile,) = result.document["profiles"]
    frame = profile["stacks"][0]["frames"][0]
    assert ("named", "meddle.py") == (profile["answer"], Path(frame["file"]).name)
