"""The image: its Dockerfile keeps the rules, and its commands, played here in a folder, make a kvdiag that serves.

Images cannot be built where tests run; what the instructions say can be done all the same: files are copied as COPY
says, RUN's commands are run, and the entry point is started as the image's user.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvdiag.commands.options.serve_options import LISTEN
from tests.fixtures.hostile import eventually
from tests.fixtures.require import require
from tests.integration.deploy.manifests import DEPLOY, ROOT
from tests.unit.sim.client import Client

DOCKERFILE = DEPLOY / "Dockerfile"
USER = 65532


class Instruction(NamedTuple):
    """One of the Dockerfile, continuation lines joined."""

    name: str
    words: str


def instructions() -> list[Instruction]:
    """All of them, in order."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage."""
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction.name == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def words(stage: list[Instruction], name: str) -> list[str]:
    """What the instructions of a name say."""
    return [instruction.words for instruction in stage if instruction.name == name]


def environment(stage: list[Instruction]) -> dict[str, str]:
    """What ENV sets."""
    pairs = [pair for line in words(stage, "ENV") for pair in shlex.split(line)]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def test_bases_are_pinned_and_equal() -> None:
    """One base for both stages, whose Python the virtual environment refers to: a full version, by its digest."""
    bases = {words(stage, "FROM")[0].split(" AS ")[0] for stage in stages()}
    [default] = words(instructions(), "ARG")

    assert {"${PYTHON_IMAGE}"} == bases
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", default)


def test_the_image_is_small_and_closed() -> None:
    """Two stages, of which the last installs nothing, and ends as a user who is not root, by number."""
    first, last = stages()

    assert f"{USER}:{USER}" == words(last, "USER")[0]
    assert not re.search(r"\b(apt|pip|curl|wget|uv)\b", " ".join(words(last, "RUN")))
    assert ["--from=build"] == [copy.split()[0] for copy in words(last, "COPY")]
    assert not any(words(stage, "ADD") for stage in (first, last))
    assert not any(re.search(r"https?://|\bsudo\b|chmod 777", line) for _, line in instructions())


def test_versions_are_locked() -> None:
    """Nothing is resolved while an image is built, and nothing installed whose hash is not in the repository."""
    pip, sync, build, install = (set(run.split()) for run in words(stages()[0], "RUN"))

    assert {"pip", "--require-hashes", "tools.txt"} <= pip
    assert {"sync", "--frozen", "--no-dev"} <= sync
    assert {"build", "--require-hashes", "--build-constraints", "tools.txt"} <= build
    assert {"--no-deps", "--no-index"} <= install


def test_tools_are_those_of_the_lock_file() -> None:
    """uv, hatchling and what they need, each with the version and all the hashes that `uv.lock` has."""
    lock = {one["name"]: one for one in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    tools = re.findall(
        r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=\S+)+)", (DEPLOY / "tools.txt").read_text(), re.MULTILINE
    )

    assert {"hatchling", "uv"} <= {name for name, _, _ in tools}
    for name, version, hashes in tools:
        files = [lock[name]["sdist"], *lock[name]["wheels"]]
        assert (lock[name]["version"], {one["hash"] for one in files}) == (
            version,
            set(re.findall(r"--hash=(\S+)", hashes)),
        )


def test_the_makefile_installs_nothing_without_a_hash() -> None:
    """Pip and uv check hashes, or install the wheel that was just built."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()

    installs = [line for line in lines if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "$(PYZ).d/*.whl" in line for line in installs)
    assert not any("--no-hashes" in line for line in lines)


def test_the_bill_of_materials_is_what_the_image_installs(tmp_path: Path) -> None:
    """`make sbom`: CycloneDX with every package that kvdiag needs, its version and the hashes of its files."""
    file = tmp_path / "kvdiag.cdx.json"
    subprocess.run(["make", "--no-print-directory", "sbom", f"SBOM={file}"], cwd=ROOT, check=True, timeout=120)
    bill = json.loads(file.read_text(encoding="utf-8"))
    runtime = {re.split(r"[<>=\[]", one)[0] for one in _project()["dependencies"]}

    assert "CycloneDX" == bill["bomFormat"]
    assert _project()["version"] == bill["metadata"]["component"]["version"]
    listed = {one["name"]: one for one in bill["components"]}
    assert runtime | {"bcrypt", "pyyaml"} <= set(listed)
    assert not {"pytest", "mypy"} & set(listed)
    assert all(file["hashes"] for one in listed.values() for file in one["externalReferences"])


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_nvml_is_all_it_asks_for() -> None:
    """Of the driver NVML alone, and no GPU unless a deployment says so."""
    told = environment(stages()[-1])

    assert "utility" == told["NVIDIA_DRIVER_CAPABILITIES"]
    assert "NVIDIA_VISIBLE_DEVICES" not in told
    assert [LISTEN.rpartition(":")[2]] == words(stages()[-1], "EXPOSE")


def test_what_is_copied_is_not_ignored() -> None:
    """The build sees the files that COPY names, all of which exist, and none of the rest."""
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = {source for copy in words(stages()[0], "COPY") for source in copy.split()[:-1]}

    assert "*" == rules[0]
    assert copied == {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A folder with what the build stage leaves in /opt/kvdiag, readable by everybody."""
    folder = Path(tempfile.mkdtemp(prefix="kvdiag-image-"))
    try:
        folder.chmod(0o755)
        source, made = folder / "src", folder / "opt" / "kvdiag"
        source.mkdir()
        stage = stages()[0]
        # The lock file's versions come from the cache that the tests' own environment was made from.
        env = {**os.environ, **environment(stage), "UV_PROJECT_ENVIRONMENT": str(made), "VIRTUAL_ENV": str(made)}
        for name, line in stage:
            if name == "COPY":
                *sources, where = line.split()
                for one in sources:
                    _copy(ROOT / one, source / where)
            elif name == "RUN" and line.startswith("uv "):
                command = [str(Path(sys.executable).with_name("uv")), *shlex.split(line.replace("--no-cache", ""))[1:]]
                # `uv pip` installs into VIRTUAL_ENV, but into UV_PYTHON's environment if that is set.
                python = {} if "pip" in command else {"UV_PYTHON": sys.executable}
                done = subprocess.run(
                    command, cwd=source, env=env | python, capture_output=True, text=True, check=False
                )
                require(done.returncode == 0, f"what the image is built from ({done.stderr.strip()[-200:]})")
        yield made
    finally:
        shutil.rmtree(folder)


def _copy(source: Path, where: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, where, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, where)


def _as_the_user(command: list[str], *, volume: Path | None = None) -> list[str]:
    """The command as the image's user; with a volume, all else is read-only, as far as this machine lets us."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return command
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", *command]
    # A mount namespace of its own, in which the volume is a separate mount from the root.
    unshared = ["unshare", "--mount", "sh", "-c"]
    closed = f"mount --bind {volume} {volume} && mount -o remount,ro,bind / && exec "
    if volume is None or subprocess.run([*unshared, closed + "true"], capture_output=True, check=False).returncode:
        return user
    return [*unshared, closed + shlex.join(user)]


@pytest.mark.xdist_group("image")
def test_the_image_serves(image: Path) -> None:
    """As its user, on a read-only root, without a server or GPU, it serves and records; SIGTERM ends it in order."""
    # GIVEN a volume as Kubernetes makes one of an fsGroup
    last = stages()[-1]
    [entry] = json.loads(words(last, "ENTRYPOINT")[0])
    program = str(image / Path(entry).relative_to("/opt/kvdiag"))
    before = _content(image)
    env = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    records = image.parents[1] / "records"
    records.mkdir()
    if os.geteuid() == 0:
        os.chown(records, 0, USER)
    records.chmod(0o2777)

    # WHEN
    told = [*json.loads(words(last, "CMD")[0]), "--listen", "127.0.0.1:0", "--record-dir", str(records)]
    command = _as_the_user([program, *told], volume=records)
    with subprocess.Popen(command, cwd="/", env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            client = Client(json.loads(process.stderr.readline())["address"])
            status, page = client.get("/metrics")

            # THEN
            assert 200 == status == client.get("/-/healthy")[0]
            assert "kvdiag_build_info" in page
            assert eventually(lambda: any(records.iterdir()))
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert 0 == process.returncode
    assert before == _content(image)


@pytest.mark.xdist_group("image")
def test_the_image_installs_the_agent(image: Path) -> None:
    """As an init container, the image's user installs the agent into a volume that it owns."""
    # GIVEN a new volume, with the owner that the image gives it
    folder = image.parents[1] / "volume"
    folder.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(folder, USER, USER)

    # WHEN
    done = subprocess.run(
        _as_the_user([str(image / "bin" / "kvdiag"), "agent", "install", str(folder)]),
        cwd="/",
        env={"HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )

    # THEN
    assert (0, f"KVDIAG_AGENT_DIR={folder}/published\nPYTHONPATH={folder}\n") == (done.returncode, done.stdout)
    assert (folder / "kvdiag_agent" / "__init__.py").exists()


def _content(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
