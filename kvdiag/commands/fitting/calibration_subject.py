"""What `kvdiag fit` calibrates with: the report of a running server, or of the last start in a log."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from kvdiag.commands.connect import connect, without_credentials
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.engines import read_startup_log
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.live.sampling import DRIVER_SECONDS
from kvdiag.kv.calibration.engine_report import EngineReport, page_report
from kvdiag.kv.fit.gpu_catalogue import gpu_name
from kvdiag.kv.layout.kernel_blocks import CPU_BLOCK_TOKENS
from kvdiag.model import Device
from kvdiag.sources.model_files import ModelFiles
from kvdiag.sources.worker_thread import ReadTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSubject:
    """What is compared with: the engine's report, where it is from, its GPU and its model's files where known."""

    report: EngineReport
    origin: str
    gpu_total_bytes: int | None = None
    gpu_name: str | None = None
    files: ModelFiles | None = None
    checkpoint_bytes: int | None = None


def subject_of_log(path: Path) -> CalibrationSubject:
    """The last start in a log; `-` is standard input."""
    report = read_startup_log(path)
    return CalibrationSubject(report=report, origin="the log from stdin" if str(path) == "-" else f"log {path}")


async def subject_of_server(options: FitOptions) -> CalibrationSubject:
    """The running server at the URL of --calibrate."""
    url = options.calibrate or ""
    async with connect(url, options.access) as (_, server):
        facts = server.facts
        report = page_report(facts)
        device, certain = await _server_gpu(server)
        files = None
        if facts.model_config is not None:
            files = ModelFiles(origin=facts.model or "the server's model", config=json.loads(facts.model_config))
        if facts.pools and options.dcp > 1:
            # The endpoint reports the tokens of a block over all ranks that share a context.
            tokens = max(1, (report.settings.block_size_tokens or 1) // options.dcp)
            report = replace(report, settings=replace(report.settings, block_size_tokens=tokens))
        if not certain and report.ranks and report.settings.block_size_tokens == CPU_BLOCK_TOKENS:
            # Only platforms/cpu.py reports a pool in bytes with blocks of 128 tokens; no GPU does.
            device = None
            report = replace(report, settings=replace(report.settings, device="cpu"))
        return CalibrationSubject(
            report=report,
            origin=f"server {without_credentials(facts.url or url)}",
            gpu_total_bytes=None if device is None or device.memory is None else device.memory.total_bytes,
            gpu_name=None if device is None else gpu_name(device.name),
            files=files,
            checkpoint_bytes=facts.weights_bytes,
        )


async def _server_gpu(server: FoundServer) -> tuple[Device | None, bool]:
    """The GPU with the least memory that holds the server's processes; where those are not visible, what all GPUs here
    are, if they are alike. And whether the server's processes were found on it.
    """
    try:
        devices, _ = await server.nvml.ask(DRIVER_SECONDS * 5, processes=True)
    except ReadTimeout:
        return None, False
    visible = [device for device in devices or () if device.memory is not None]
    pids = set(server.facts.server_pids or ())
    own = [device for device in visible if pids & {process.pid for process in device.processes or ()}]
    least = min(own or visible, key=lambda device: device.memory.total_bytes if device.memory else 0, default=None)
    alike = len({(device.name, device.memory.total_bytes) for device in visible if device.memory}) == 1
    return (least if own or alike else None), bool(own)
