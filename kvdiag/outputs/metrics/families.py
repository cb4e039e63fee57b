"""The parts of every metric family: its name and labels from `metrics.json`, clean values, a bounded number of series.

`metrics.json` is the contract with the rules and dashboards: type, labels and help of every metric of the page. A
metric with `of` is a `field` of what has that name among the `Figures`; the others are figures themselves.
Prometheus drops a whole target whose page repeats a series or has a label of excessive length.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdiag.formatting import one_line
from kvdiag.model import Device

MAX_LABEL_CHARACTERS = 128
MAX_PROCESSES = 64
"""Of one device, and of the server on the host: the largest."""

MAX_SERIES = 512
"""Of engines, devices and allocators each: more than any one server has."""

T = TypeVar("T")
Labels = tuple[str, ...]
Row = tuple[Labels, float]
Figures = dict[str, Iterable[tuple[Labels, Any]]]
"""By name: labels with their value, or with the object that has several values; `None` has no series."""


@cache
def contract() -> dict[str, Any]:
    """`metrics.json`: every metric by its name, in the order of the page."""
    found: dict[str, Any] = json.loads(files("kvdiag.outputs.metrics").joinpath("metrics.json").read_text("utf-8"))
    return found


def label(text: object) -> str:
    """A label's value: printable, and bounded in length."""
    return one_line(str(text)[:MAX_LABEL_CHARACTERS], "?")


def family(name: str, figures: Figures, of: Mapping[str, Any] | None = None) -> Metric:
    """A family of `metrics.json`, or another contract, `name` without `kvdiag_`; of equal labels the first counts."""
    known = (contract() if of is None else of)[name]
    rows = figures[known.get("of", name)]
    if "of" in known:
        rows = [(labels, getattr(owner, known["field"])) for labels, owner in rows if owner is not None]
    kind = CounterMetricFamily if known["type"] == "counter" else GaugeMetricFamily
    made = kind(f"kvdiag_{name}", known["help"], labels=known["labels"])
    for values, value in _distinct((labels, float(value)) for labels, value in rows if value is not None):
        made.add_metric(values, value)
    return made


def one_of(chosen: str | None, known: Iterable[str]) -> list[Row]:
    """A series for each known state: 1 for the chosen one, 0 for the others; none if nothing is chosen."""
    return [] if chosen is None else [((one,), float(one == chosen)) for one in known]


def single(value: float | None) -> list[tuple[Labels, float | None]]:
    """A series without labels; none without a value."""
    return [((), value)]


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Each set of labels once: labels that are cut may become equal."""
    known: set[Labels] = set()
    for values, value in islice(rows, MAX_SERIES * MAX_PROCESSES):
        cleaned = tuple(label(each) for each in values)
        if cleaned not in known:
            known.add(cleaned)
            yield cleaned, value


def bounded(values: Iterable[T] | None) -> list[T]:
    """The first `MAX_SERIES` values."""
    return list(islice(values or (), MAX_SERIES))


def gpu_labels(device: Device) -> tuple[str, str]:
    """A device's `gpu` and `uuid`."""
    return str(device.index), device.uuid
