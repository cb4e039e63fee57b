"""The parts of every metric family: clean labels, and a bounded number of series.

Prometheus drops a whole target whose page repeats a series or has a label of excessive length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvdiag.model import Device

MAX_LABEL_CHARACTERS = 128
MAX_PROCESSES = 64
"""Of one device, and of the server on the host: the largest."""

MAX_SERIES = 512
"""Of engines, devices and allocators each: more than any one server has."""

GPU = ("gpu", "uuid")

T = TypeVar("T")
Row = tuple[tuple[str, ...], float]


def label(text: object) -> str:
    """A label's value: printable, and bounded in length."""
    shown = str(text)[:MAX_LABEL_CHARACTERS]
    if shown.isprintable():
        return shown
    return "".join(character if character.isprintable() else "?" for character in shown)


def gauge(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    """A family of gauges; of rows with equal labels the first counts."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in _distinct(rows):
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    """A family of counters, whose series end in `_total`; of rows with equal labels the first counts."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in _distinct(rows):
        family.add_metric(values, value)
    return family


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Each set of labels once: labels that are cut may become equal."""
    seen: set[tuple[str, ...]] = set()
    for values, value in islice(rows, MAX_SERIES * MAX_PROCESSES):
        cleaned = tuple(label(each) for each in values)
        if cleaned not in seen:
            seen.add(cleaned)
            yield cleaned, value


def bounded(values: Iterable[T] | None) -> list[T]:
    """The first `MAX_SERIES` values."""
    return list(islice(values or (), MAX_SERIES))


def gpu_labels(device: Device) -> tuple[str, str]:
    """A device's `gpu` and `uuid`."""
    return str(device.index), device.uuid
