"""What was recorded of one server: from a trace, a recorder's folder or a Prometheus, as columns or as plots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from kvdiag.api.checked_arguments import checked
from kvdiag.api.option_values import option_values
from kvdiag.commands.diagnose import command, no_replica
from kvdiag.commands.options.prometheus_options import PrometheusAccess, PrometheusOptions
from kvdiag.diagnosis import diagnose
from kvdiag.errors import KvdiagError
from kvdiag.feeds.history.prometheus_feed import Window, read, survey
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.formatting import format_time, plural
from kvdiag.model import ENGINE_COUNTS, Facts, Sample, Timeline, without_mig_parents
from kvdiag.outputs.fleet_results import replica_name
from kvdiag.outputs.html import kit
from kvdiag.outputs.html.markup import element
from kvdiag.outputs.html.report_plots import draw
from kvdiag.sources.http import Unreadable

Column = tuple[str, str]
"""A figure with its unit, and whose it is: an engine, a GPU's UUID, a process."""

MAX_COLUMNS = 4096
"""A server that renames its engines at each sample would have one for every name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class History:
    """Samples of one server in ascending time, and what does not change over them.

    `name` is the replica's (namespace/pod, or its address), or the file's. `timeline` and `facts` are the values that
    kvdiag itself judges.
    """

    name: str
    timeline: Timeline
    facts: Facts

    def columns(self) -> tuple[tuple[float, ...], dict[Column, list[float | None]]]:
        """Unix seconds of all samples, and each figure at them; `None` where it was not reported.

        Raises:
            KvdiagError: there are more columns than a table can hold.
        """
        found: dict[Column, list[float | None]] = {}
        count = len(self.timeline.samples)
        for row, sample in enumerate(self.timeline.samples):
            for column, value in _figures(sample):
                found.setdefault(column, [None] * count)[row] = value
            if len(found) > MAX_COLUMNS:
                raise KvdiagError(f"{self.name} has more than {MAX_COLUMNS:,} figures: too many for a table")
        return tuple(one.at_seconds for one in self.timeline.samples), found

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: a row each sample by its time in UTC, columns of figure and owner.

        Raises:
            KvdiagError: pandas is not installed, or there are too many columns.
        """
        pandas = _imported("pandas")
        times, columns = self.columns()
        return pandas.DataFrame(
            list(zip(*columns.values(), strict=True)),
            index=pandas.to_datetime(times, unit="s", utc=True).rename("time"),
            columns=pandas.MultiIndex.from_tuples(columns, names=("figure", "of")),
            dtype=float,
        )

    def to_polars(self) -> Any:
        """A `polars.DataFrame`: a row each sample, its `time` in UTC, and a column `figure[of]` for each figure.

        Raises:
            KvdiagError: polars is not installed, or there are too many columns.
        """
        polars = _imported("polars")
        times, columns = self.columns()
        named: dict[str, Any] = {f"{figure}[{of}]": values for (figure, of), values in columns.items()}
        frame = polars.DataFrame({"time": times, **named}, schema_overrides=dict.fromkeys(named, polars.Float64))
        at = polars.from_epoch((polars.col("time") * 1e6).round().cast(polars.Int64), time_unit="us")
        return frame.with_columns(at.dt.replace_time_zone("UTC").alias("time"))

    def __repr__(self) -> str:
        samples = self.timeline.samples
        ends = (format_time(samples[place].at_seconds) for place in (0, -1)) if samples else ()
        return f"<History {self.name}: {plural(len(samples), 'sample')}{', ' if samples else ''}{' to '.join(ends)}>"

    def _repr_html_(self) -> str:
        return plot(self)._repr_html_()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Picture:
    """A page to look at: `page` is its HTML, whole and without scripts; `height` is of its frame, in pixels."""

    page: str
    height: int

    def __repr__(self) -> str:
        return f"<Picture: {plural(len(self.page), 'character')} of HTML>"

    def _repr_html_(self) -> str:
        # A frame of its own: the page's style sheet must not reach the notebook, nor the notebook's the page.
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe sandbox srcdoc="{escape(self.page)}" style="{style}"></iframe>'


@checked
def plot(history: History) -> Picture:
    """The plots of a report: device memory, pool, requests and host memory over time. A notebook shows them."""
    drawn = element("main", *draw(diagnose(history.timeline, history.facts), history.timeline))
    return Picture(page=kit.document("unknown", history.name, (drawn,), shown="plots"), height=760)


@checked
def load(path: str | Path) -> History:
    """What kvdiag wrote: a trace of `run --record`, gzip allowed, a folder of `serve --record-dir`, or a `bundle`.

    Raises:
        KvdiagError: it cannot be read, or is none of these.
    """
    timeline, facts = read_recorded(Path(path))
    return History(name=str(path), timeline=timeline, facts=facts)


@checked
def read_prometheus(url: str, match: str = "", window: str = "24h", **options: Any) -> list[History]:
    """Every replica that a Prometheus (Thanos, Mimir, VictoriaMetrics) has samples of, over a time that ends now.

    Args:
        url: of its API.
        match: a selector, such as `namespace="x"`.
        window: such as 90m, 24h or 7d.
        options: as of `kvdiag diagnose --prometheus`: `start`, `end`, `user`, `password_file`, `token_file`, `headers`,
            `ca_file`, `cert_file`, `key_file`, `insecure`, `timeout`; times may be `datetime`, headers a mapping.

    Raises:
        KvdiagError: there is no answer, no such API, no replica, or an option is not one of these.
    """
    own = {"prometheus": url, "match": match, "window": window}
    allowed = {one.name for one in fields(PrometheusOptions)} - set(own)
    values = option_values(command, options, allowed) | option_values(command, own, own)
    given = PrometheusOptions(**values)
    reading = _histories(given.access(), given.matchers(), given.span(time.time()))
    # A notebook's own loop is running: this one has a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, reading).result()


async def _histories(access: PrometheusAccess, match: str, window: Window) -> list[History]:
    try:
        async with access.source() as source:
            found = await survey(source, match, window)
            if not found.replicas:
                raise no_replica(access.url, match)
            return [
                History(name=replica_name(replica.key, replica.subject), timeline=timeline, facts=facts)
                async for replica, timeline, facts in read(source, found.replicas, window)
            ]
    except Unreadable as error:
        raise KvdiagError(f"{access.url.rstrip('/')}: {error}") from error


def _figures(sample: Sample) -> Iterator[tuple[Column, float | None]]:
    """Every figure of a sample that is a number over time."""
    for engine in sample.engines or ():
        yield ("kv_usage_ratio", engine.engine), engine.kv_usage_ratio
        for name in ENGINE_COUNTS:
            if (value := getattr(engine, name)) is not None:
                yield (name, engine.engine), value
    for device in without_mig_parents(sample.devices or ()):
        if device.memory is not None:
            yield ("device_used_bytes", device.uuid), device.memory.used_bytes
            yield ("device_total_bytes", device.uuid), device.memory.total_bytes
    for one in sample.allocators or ():
        whose = f"{one.device_uuid} {one.pid}"
        yield ("torch_allocated_bytes", whose), one.allocated_bytes
        yield ("torch_reserved_bytes", whose), one.reserved_bytes
    for process in sample.host or ():
        yield ("host_resident_bytes", process.who), process.resident_bytes
        if process.anonymous_bytes is not None:
            yield ("host_anonymous_bytes", process.who), process.anonymous_bytes


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise KvdiagError(f"{name} is not installed: pip install 'kvdiag[{name}]'") from error
