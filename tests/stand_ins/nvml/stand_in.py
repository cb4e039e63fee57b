"""The Python side of the NVML stand-in: compiles it, says what GPUs there are, and keeps saying it while a client runs.

`build()` makes a `libnvidia-ml.so.1` out of `stand_in.c`; `StandIn.show(State(...))` replaces what it reports, at once
and in one piece; `StandIn.environment()` is what a client process needs in order to load it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

LIBRARY_NAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("stand_in.c")
NVML_UNKNOWN_BYTES = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE of nvml.h, for an unsigned long long."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A compute process. `late` ones appear between a client's sizing call and the call that fetches the list."""

    pid: int
    used_bytes: int = NVML_UNKNOWN_BYTES
    name: str = ""
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A MIG device at `slot` of its GPU's numbering, which may have gaps."""

    slot: int
    uuid: str
    total_bytes: int
    free_bytes: int
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    reserved_bytes: int = 0
    processes: tuple[Running, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; any slices (or `mig`) mean that its MIG mode is on. Nothing is checked, so that nonsense can be shown."""

    uuid: str
    total_bytes: int
    free_bytes: int
    name: str = "NVIDIA H100 80GB HBM3"
    reserved_bytes: int = 0
    mig: bool = False
    processes: tuple[Running, ...] = ()
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A C function (`*` at its end stands for every ending) that returns `code`, for one device or for all."""

    function: str
    code: int
    uuid: str = "*"


@dataclass(frozen=True)
class Delay:
    """A C function that takes so long, or until a state without the delay is shown."""

    function: str
    seconds: float
    uuid: str = "*"


@dataclass(frozen=True, kw_only=True)
class State:
    """All that the driver says. Another `generation` is a driver that was reloaded: earlier handles are void.

    `process_stride_bytes` is the size of an entry of the v3 process list: 24 as nvml.h has it, 32 in early R535
    drivers (nvitop#79), 16 in one 550.127.08 (nvitop#226).
    """

    gpus: tuple[Gpu, ...] = ()
    failures: tuple[Failure, ...] = ()
    delays: tuple[Delay, ...] = ()
    driver: str = "580.159.04"
    generation: int = 1
    process_stride_bytes: int = 24

    def text(self, serial: int) -> str:
        """The state as `stand_in.c` reads it: a line per fact, fields parted by tabs, GPUs before slices."""
        lines: list[tuple[object, ...]] = [
            ("serial", serial),
            ("generation", self.generation),
            ("stride", self.process_stride_bytes),
            ("driver", self.driver),
        ]
        slices = [(number, part) for number, gpu in enumerate(self.gpus) for part in gpu.slices]
        for gpu in self.gpus:
            mig = int(gpu.mig or bool(gpu.slices))
            lines.append(("gpu", mig, gpu.uuid, gpu.name, gpu.total_bytes, gpu.free_bytes, gpu.reserved_bytes))
        lines += [
            ("slice", number, part.slot, part.uuid, part.name, part.total_bytes, part.free_bytes, part.reserved_bytes)
            for number, part in slices
        ]
        running = [gpu.processes for gpu in self.gpus] + [part.processes for _, part in slices]
        for place, processes in enumerate(running):
            lines += [("process", place, p.pid, p.used_bytes, int(p.late), p.name) for p in processes]
        lines += [("fail", failure.function, failure.uuid, failure.code) for failure in self.failures]
        lines += [("delay", delay.function, delay.uuid, round(delay.seconds * 1000)) for delay in self.delays]
        return "".join("\t".join(map(str, line)) + "\n" for line in lines)


@dataclass
class StandIn:
    """A compiled library and the file that it reads, in a folder of their own."""

    library: Path
    state_file: Path
    _serial: int = field(default=0, init=False)

    def show(self, state: State) -> None:
        """From now on the driver says `state`; a client's next call sees all of it or nothing of it."""
        self._serial += 1
        draft = self.state_file.with_suffix(".draft")
        # Names may be bytes that are no text, as those of real processes may.
        draft.write_text(state.text(self._serial), encoding="utf-8", errors="surrogateescape")
        draft.replace(self.state_file)

    def environment(self) -> dict[str, str]:
        """The environment of a process that finds this library where it looks for NVIDIA's."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]),
            "NVML_STAND_IN_STATE": str(self.state_file),
        }


def compiler() -> str | None:
    """The C compiler, where this machine has one."""
    return shutil.which("cc")


def build(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Compile the library into `folder`; a client does not find the functions named in `without`.

    Names that nvidia-ml-py looks up and `stand_in.c` does not implement answer "not supported", as a real driver does
    for most of them on most cards; a library without them makes nvitop log a traceback for each.
    """
    implemented = set(re.findall(r"^NVML\((\w+)\)", SOURCE.read_text(), re.MULTILINE)) | {"nvmlErrorString"}
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 3; }}\n" for name in sorted(_looked_up() - implemented)))
    exports = folder / "exports.map"
    exports.write_text(f"{{ global: nvml*; local: {' '.join(f'{name};' for name in without)} *; }};\n")
    library = folder / LIBRARY_NAME
    subprocess.run(
        [
            *(compiler() or "cc", "-shared", "-fPIC", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"),
            *(f"-Wl,-soname,{LIBRARY_NAME}", f"-Wl,--version-script={exports}"),
            *("-o", str(library), str(SOURCE), str(stubs)),
        ],
        check=True,
    )
    return library


def _looked_up() -> set[str]:
    """Every C function that the installed nvidia-ml-py refers to."""
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise FileNotFoundError("nvidia-ml-py is not installed beside the tests")
    return set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(found.origin).read_text()))
