"""What a server answers does not say where kvdiag looks: only a folder that its own process uses is read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts
from kvdiag.sources.host import program, read
from kvdiag.sources.served_model import model_config, model_folder
from tests.fixtures.hostile import LONG_SECONDS, reply_json
from tests.unit.commands.bad_input.refusals import MODEL, SERVER
from tests.unit.feeds.live.test_facts import gathered
from tests.unit.sources.host_programs import WAIT, listening

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
AUTH = "c2VjcmV0LW9mLXRoZS11c2Vy"

HOLDER = f"""
import json, mmap, os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
how, path = sys.argv[1], sys.argv[2]
if how == "open":
    held = open(path + "/model.safetensors", "rb")
elif how == "mapped":
    with open(path + "/model.safetensors", "rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(json.dumps({{"port": listener.getsockname()[1], "pids": [os.getpid()]}}), flush=True)
{WAIT}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's."""
    path = tmp_path / "a model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("open", "{}"), True),
        (("mapped", "{}"), True),
        (("named", "-", "--model", "{}"), True),
        (("named", "-", "--model={}/"), True),
        (("nothing", "-"), False),
        (("nothing", "-", "{}/sub"), False),
        (("nothing", "-", "x{}"), False),
    ],
)
def test_only_a_folder_that_the_server_uses_is_followed(
    folder: Path, arguments: tuple[str, ...], expected: bool
) -> None:
    """One of its processes was started with it, or has a file of it open or mapped."""
    # A server whose command has another name of the folder, where it is to have it open alone
    link = folder.parent / "other-name"
    link.symlink_to(folder)
    given = [one.format(link if arguments[0] in ("open", "mapped") else folder) for one in arguments]
    with listening(HOLDER, *given) as server:
        found = model_folder(str(folder), server.pids)
    assert (str(folder) if expected else None) == found


@pytest.mark.parametrize(
    "root", [None, "", "meta-llama/Llama-3.1-8B", "/models/not/here", "/\0", "/" + "x" * 5000, "/etc/passwd"]
)
def test_what_is_no_folder_is_not_followed(root: str | None) -> None:
    """A model name that is not a folder on this host gives None."""
    assert model_folder(root, (os.getpid(),)) is None


def of_folder(root: Path) -> Facts:
    """The facts of a server that names this folder as its model's."""
    return gathered(answers={**SERVER, "/v1/models": reply_json({"data": [{**MODEL, "root": str(root)}]})})


@pytest.mark.parametrize("held", [False, True], ids=["elsewhere", "open in the server"])
@pytest.mark.parametrize(
    "document",
    [{"auths": {"https://index.docker.io/v1/": {"auth": AUTH}}}, {**CONFIG, "auths": {"x": {"auth": AUTH}}}],
    ids=["no config", "a config and more"],
)
def test_secrets_of_the_user_are_not_recorded(tmp_path: Path, document: Any, held: bool) -> None:
    """A server that names ~/.docker as its model's folder gets nothing of it into a trace."""
    secret = tmp_path / ".docker"
    secret.mkdir(mode=0o700)
    (secret / "config.json").write_text(json.dumps(document))
    (secret / "config.json").chmod(0o600)

    if held:
        with (secret / "config.json").open("rb"):
            facts = of_folder(secret)
    else:
        facts = of_folder(secret)
    with TraceWriter(tmp_path / "trace.jsonl", facts):
        pass

    assert AUTH not in (tmp_path / "trace.jsonl").read_text()
    assert (held and "architectures" in document) == (facts.model_config is not None)


def test_the_models_config_is_read_where_the_server_has_it_open(folder: Path) -> None:
    """As before."""
    with (folder / "model.safetensors").open("rb"):
        facts = of_folder(folder)
    assert (CONFIG, 100) == (json.loads(facts.model_config or ""), facts.weights_bytes)


def test_a_config_that_is_a_link_out_of_its_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    """Who writes the model's folder says no more than the server where kvdiag looks."""
    (tmp_path / "other").mkdir()
    (folder / "config.json").rename(tmp_path / "other" / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "other" / "config.json")
    assert model_config(str(folder)) is None


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    """The files of a hub snapshot are links into the blobs folder, and are read."""
    model = tmp_path / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "1234").mkdir(parents=True)
    (model / "blobs" / "d34db33f").write_text(json.dumps(CONFIG))
    (model / "snapshots" / "1234" / "config.json").symlink_to("../../blobs/d34db33f")
    assert CONFIG == json.loads(model_config(str(model / "snapshots" / "1234")) or "")


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("VLLM::EngineCore_DP0", "VLLM::EngineCore_DP0"),
        ("vllm serve --api-key sk-1234", "vllm"),
        ("/usr/bin/python3 -m server --token=sk-1234", "/usr/bin/python3"),
        ("TOKEN=sk-1234 python", "TOKEN"),
        ("python\0--api-key\0sk-1234", "python"),
        ("", ""),
        ("x" * 100, "x" * 64),
    ],
)
def test_of_a_title_only_the_program_is_kept(title: str, expected: str) -> None:
    """Its first word, without what is assigned in it."""
    assert expected == program(title)


def test_a_process_that_shows_its_command_as_its_title_does_not_have_it_recorded() -> None:
    """As setproctitle does: psutil takes the whole title for a name where the kernel cut it off."""
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None); libc.prctl(15, sys.argv[0].encode()[:15], 0, 0, 0); "
        "print(flush=True); sys.stdin.read()"
    )
    title = "vllm serve m --api-key sk-1234"
    with subprocess.Popen(
        [title, "-c", f"import sys; sys.argv[0] = {title!r}\n{code}"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert "sk-1234" in psutil.Process(process.pid).name()

        found, _ = read((process.pid,))
        process.communicate(timeout=LONG_SECONDS)

    assert ["vllm"] == [one.name for one in found or ()]
