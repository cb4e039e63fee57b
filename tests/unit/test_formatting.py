"""How figures are written."""

from collections.abc import Callable

import pytest

from kvdiag.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_holder,
    format_number,
    format_p_value,
    format_rate,
    format_ratio,
    format_time,
    plural,
)

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, -0.2, "0 B"),
        (format_duration, 86_399, "1 d"),
        (format_bytes, 512, "512 B"),
        (format_bytes, 168 * MIB, "168 MiB"),
        (format_bytes, 1.25 * GIB, "1.25 GiB"),
        (format_bytes, 22.98 * GIB, "23.0 GiB"),
        (format_bytes, 1023.9 * MIB, "1.00 GiB"),
        (format_bytes, 1000 * MIB, "1,000 MiB"),
        (format_bytes, -12 * MIB, "-12.0 MiB"),
        (format_bytes, 3 * 2**40, "3.00 TiB"),
        (format_rate, 10.5 * MIB, "10.5 MiB/h"),
        (format_count, 8191, "8,191"),
        (format_count, 2.5, "2.5"),
        (format_count, 2.04, "2"),
        (format_number, 16.049, "16.05"),
        (format_number, 123.04, "123"),
        (format_number, 12_345.6, "12,346"),
        (format_number, 0.0123, "0.012"),
        (format_number, 0, "0"),
        (format_holder, "VLLM::Worker 100", "VLLM::Worker (pid 100)"),
        (format_holder, "worker 3 4194304", "worker 3 4194304"),
        (format_holder, "worker " + "9" * 5000, "worker " + "9" * 5000),
        (format_holder, "GPU 0", "GPU 0"),
        (format_holder, "the pool", "the pool"),
        (format_duration, 0, "0 s"),
        (format_duration, 0.85, "850 ms"),
        (format_duration, 0.0025, "2.5 ms"),
        (format_duration, 2.5, "2.5 s"),
        (format_duration, 45, "45 s"),
        (format_duration, 90, "1 min 30 s"),
        (format_duration, 7500, "2 h 5 min"),
        (format_duration, 7199.6, "2 h"),
        (format_duration, 3 * 86_400 + 4 * 3_600, "3 d 4 h"),
        (format_ratio, 0.92, "92 %"),
        (format_ratio, 0.004, "0.4 %"),
        (format_ratio, 0, "0 %"),
        (format_ratio, 0.0004, "< 0.1 %"),
        (format_ratio, -0.0004, "> -0.1 %"),
        (format_p_value, 0.0125, "0.013"),
        (format_p_value, 0.0004, "< 0.001"),
        (format_time, 0, "1970-01-01T00:00:00Z"),
    ],
)
def test_each_kind_of_figure_has_one_form(write: Callable[[object], str], value: object, text: str) -> None:
    """Three significant digits, binary units, thousands separators, the two largest units of time."""
    assert text == write(value)


@pytest.mark.parametrize(("count", "text"), [(1, "1 process"), (0, "0 processes"), (8191, "8,191 processes")])
def test_a_count_agrees_with_its_noun(count: int, text: str) -> None:
    """Singular for one alone."""
    assert text == plural(count, "process", "processes")
