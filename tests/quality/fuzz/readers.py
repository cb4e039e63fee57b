"""Everything that reads what others wrote, as functions of bytes: each reads them, or refuses them in the one way."""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvdiag import baseline_comparison as comparison
from kvdiag.commands import main
from kvdiag.commands.options.common import Duration, Size
from kvdiag.diagnosis.request_failures import parse_oom
from kvdiag.engines import ENGINES, llamacpp
from kvdiag.engines.llamacpp.cell_bytes import caches, is_mixed
from kvdiag.engines.llamacpp.command_line import Cells, Options, parse_options
from kvdiag.engines.llamacpp.slots import server_page, slots_of, slots_page, weights_bytes
from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.sglang.client import generates_none, parse_loads, parse_server_info
from kvdiag.errors import KvdiagError
from kvdiag.feeds.postmortem_inputs import recognise
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.kv.calibration.profiles import parse_profiles
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.page_specs import parse_page_specs
from kvdiag.kv.pools.gguf_header import CutShortError, GgufHeader, parse_gguf_header
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from kvdiag.kv.weights.module_names import parse_module_names
from kvdiag.kv.weights.quantization import parse_weight_format
from kvdiag.model.codec import from_plain
from kvdiag.oom.log import read_failures
from kvdiag.oom.message import ANCHORS, parse_shortage
from kvdiag.server.request import BadRequestError, parse_request
from kvdiag.server.web_config import read_web_config
from kvdiag.sources import prometheus_answers
from kvdiag.sources.agents import agent_profiles, agent_publication, black_boxes
from kvdiag.sources.daemon_client import DaemonReading
from kvdiag.sources.http import Unreadable
from kvdiag.sources.model_files import read_model
from kvdiag.sources.served_model import model_file
from tests.builders.metrics_pages import parse_page

Reader = Callable[[bytes], None]

USAGE = 3


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _json(data: bytes) -> Any:
    """What a JSON text holds; a ValueError, as all that call it have, for what is none."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError from error


def _object(data: bytes) -> dict[str, Any]:
    found = _json(data)
    if not isinstance(found, dict):
        raise ValueError  # noqa: TRY004  what is no object never comes so far
    return found


def _page(data: bytes) -> None:
    try:
        page = parse_page(_text(data))
    except ValueError:
        return
    for engine in ENGINES:
        engine.capabilities(page)
        engine.parse_engines(page)
        engine.parse_pools(page, "0.32.0", ())
        engine.parse_pools(page, None, (_text(data),))
        engine.parse_lengths(page)
        engine.parse_caches(page)
        engine.kv_connector(page, (_text(data),))
        engine.parallel_ranks((_text(data),))


def _engine_answer(data: bytes) -> None:
    """What SGLang's own endpoints answer."""
    try:
        answer = _json(data)
    except ValueError:
        return
    parse_loads(answer)
    parse_server_info(answer)
    generates_none(answer)


def _log(data: bytes) -> None:
    text = _text(data)
    for engine in ENGINES:
        engine.parse_settings(text.splitlines())
        engine.failed_pool_bytes(text)
        engine.parallel_ranks(text.splitlines())
        engine.kv_connector((), text.splitlines())
        with contextlib.suppress(KvdiagError):
            listed = engine.parse_startup_log(text).model_settings
            cells_of_gguf(GgufHeader(values=listed or {}, lengths={}, tensor_bytes={}, formats={}))
    read_failures(text)
    parse_oom(text)
    for kind in sorted({kind for kind, _ in ANCHORS}):
        parse_shortage(kind, text)


def _slots(data: bytes) -> None:
    options = parse_options([f"llama-server {_text(data)}"])
    try:
        found = _json(data)
    except ValueError:
        return
    page = {**server_page(found, found, options), **slots_page(slots_of(found))}
    llamacpp.ENGINE.parse_engines(page)
    llamacpp.ENGINE.parse_pools(page, None, [f"llama-server {_text(data)}"])
    llamacpp.ENGINE.parse_caches(page)
    weights_bytes(found)
    # The path of its model is the server's word, too.
    model_file(_text(data), (os.getpid(),))


def _config(data: bytes) -> None:
    with contextlib.suppress(ValueError, KvdiagError):
        parse_architecture(_object(data))


def _gguf(data: bytes) -> None:
    with contextlib.suppress(KvdiagError, CutShortError):
        model = cells_of_gguf(parse_gguf_header(data))
        if (found := caches(model, Options(), Cells(total=4096, usable=4096), slots=4)) is not None:
            is_mixed(found)


def _specs(data: bytes) -> None:
    with contextlib.suppress(ValueError, KvdiagError):
        parse_page_specs(_object(data))


def _profiles(data: bytes) -> None:
    with contextlib.suppress(ValueError, KvdiagError):
        parse_profiles(_json(data))


def _baseline(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        comparison.parse(_json(data))


def _publication(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        agent_publication.parse(data)


def _profile(data: bytes) -> None:
    process = agent_publication.Publication(
        pid=100, start_ticks=7, title="engine", sequence=0, period_seconds=1.0, monotonic_seconds=0.0
    )
    with contextlib.suppress(ValueError):
        agent_profiles.read_profile(
            _object(data), agent_profiles.Asked(publication=process, identifier="a1", kind="host")
        )


def _box(data: bytes) -> None:
    with contextlib.suppress(ValueError, KvdiagError):
        black_boxes.parse(data)


def _daemon(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        from_plain(DaemonReading, _object(data), lenient=True)


def _request(data: bytes) -> None:
    with contextlib.suppress(BadRequestError):
        parse_request(data)


def _history(data: bytes) -> None:
    """The body of an answer of Prometheus."""
    answer = prometheus_answers.decoded_answer(data, "x")
    if answer is None:
        return
    with contextlib.suppress(Unreadable):
        prometheus_answers.add_samples(answer, 0.0, 1e9, prometheus_answers.History())
    prometheus_answers.answer_warnings(answer)
    str(prometheus_answers.query_error(400, "/", answer))


def _file(data: bytes, name: str, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvdiag-fuzz-") as folder, contextlib.suppress(KvdiagError):
        path = Path(folder) / name
        path.write_bytes(data)
        read(path)


def _trace(data: bytes) -> None:
    _file(data, "trace.jsonl", read_trace)


def _segments(data: bytes) -> None:
    _file(data, "kvdiag-00000001.jsonl.gz", lambda path: read_segments(path.parent))


def _remains(data: bytes) -> None:
    _file(data, "remains", recognise)


def _web_config(data: bytes) -> None:
    _file(data, "web.yml", lambda path: read_web_config(path).tls())


def _settings_file(data: bytes) -> None:
    def read(path: Path) -> None:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            code = main(["--config", str(path), "explain", "no.such.verdict"])
        if code != USAGE:
            raise AssertionError(code)

    _file(data, "kvdiag.toml", read)


def _model(data: bytes) -> None:
    _file(data, "config.json", lambda path: read_model(str(path.parent), offline=True))


def _options(data: bytes) -> None:
    text = _text(data)
    for option in (Size(4 * 2**20), Duration(60.0, 7200.0)):
        with contextlib.suppress(click.BadParameter):
            option.convert(text, None, None)
    with contextlib.suppress(KvdiagError):
        parse_module_names(text.splitlines(), field="it")
    with contextlib.suppress(KvdiagError):
        parse_weight_format(text)
    parse_version(text)


READERS: Mapping[str, Reader] = {
    "baseline": _baseline,
    "black_box": _box,
    "config": _config,
    "daemon": _daemon,
    "gguf": _gguf,
    "history": _history,
    "log": _log,
    "model": _model,
    "options": _options,
    "page": _page,
    "engine": _engine_answer,
    "profiles": _profiles,
    "publication": _publication,
    "profile": _profile,
    "remains": _remains,
    "request": _request,
    "segments": _segments,
    "settings_file": _settings_file,
    "slots": _slots,
    "specs": _specs,
    "trace": _trace,
    "web_config": _web_config,
}
"""Each by the name of its folder in the corpus."""
