"""How a figure is written for a person: one way for each kind, used by every output.

Data (JSON, metrics) keeps numbers in base units; only text goes through here. Pure.
"""

from datetime import UTC, datetime

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
LAST_SECONDS = 253_402_300_799
"""9999-12-31T23:59:59Z, the end of Python's calendar: a trace or a daemon may report any time."""

_MIN_P_VALUE = 0.001

_TIMES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def _rounded(value: float, two_decimals_below: float) -> str:
    """With two decimals, one up to ten times that, else none."""
    size = abs(value)
    places = 2 if round(size, 2) < two_decimals_below else 1 if round(size, 1) < 10 * two_decimals_below else 0
    return f"{value:,.{places}f}"


def format_bytes(value: float) -> str:
    """Bytes in binary units and three significant digits: `168 MiB`, `1.25 GiB`, `512 B`, `-12.0 MiB`."""
    size = abs(value)
    for unit, divisor in UNITS:
        # What would be rounded to 1024 of the smaller unit is one of this.
        if round(1024 * size / divisor) >= 1024:  # noqa: PLR2004
            return f"{_rounded(value / divisor, 10.0)} {unit}"
    return f"{round(value)} B"


def format_holder(holder: str) -> str:
    """A process or GPU in a sentence: `VLLM::Worker 100` as `VLLM::Worker (pid 100)`, `GPU 0` unchanged."""
    name, _, number = holder.rpartition(" ")
    is_pid = name not in ("", "GPU") and number.isdecimal() and int(number[:8]) < 2**22  # higher ones are made up
    return f"{name} (pid {number})" if is_pid else holder


def format_rate(bytes_per_hour: float) -> str:
    """Growth in bytes an hour: `10.5 MiB/h`."""
    return f"{format_bytes(bytes_per_hour)}/h"


def format_count(value: float) -> str:
    """A number of things with thousands separators: `8,191`; a fraction keeps one decimal: `2.5`."""
    whole = round(value)
    return f"{whole:,}" if abs(value - whole) < 0.05 else f"{value:,.1f}"  # noqa: PLR2004 - shown as a whole number


def format_number(value: float) -> str:
    """A figure of up to four digits and two decimals: `16.05`, `2.5`, `123.5`; whole: `8,191`; below 0.1: `0.012`."""
    if abs(value) < 0.0995:  # noqa: PLR2004 - rounds to 0.1
        return f"{value:.2g}"
    text = _rounded(value, 100.0)
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(text: str) -> str:
    """A formatted figure with its sign: `+6.00 GiB`."""
    return text if text.startswith(("-", "<", ">")) else f"+{text}"


def plural(count: int, one: str, several: str | None = None) -> str:
    """A count with its noun: `1 block`, `8,191 blocks`, `2 processes`."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units: `850 ms`, `45 s`, `12 min`, `2 h 5 min`, `3 d 4 h`."""
    if abs(seconds) < 1:
        ms = seconds * 1000
        return f"{format_number(round(ms, 1) if abs(ms) < 10 else round(ms))} ms" if seconds else "0 s"  # noqa: PLR2004 - as above
    if abs(seconds) < 10 and abs(seconds - round(seconds)) >= 0.05:  # noqa: PLR2004 - a tenth of a second is shown below ten
        return f"{seconds:.1f} s"
    sign, left = ("-" if seconds < 0 else ""), round(abs(seconds))
    if left >= _TIMES[1][1]:
        left = 60 * round(left / 60)  # the last half minute of a day is the next one
    for place, (unit, size) in enumerate(_TIMES):
        if left >= size:
            if unit == "s":
                return f"{sign}{left} s"
            smaller, step = _TIMES[place + 1]
            parts = round(left / step)
            whole, rest = divmod(parts, size // step)
            return f"{sign}{whole} {unit} {rest} {smaller}" if rest else f"{sign}{whole} {unit}"
    return "0 s"


def format_ratio(ratio: float) -> str:
    """A share from 0 to 1 in percent: `92 %`; below ten percent with one decimal: `0.4 %`; `0 %` only for 0."""
    percent = 100 * ratio
    if 0 < abs(percent) < 0.05:  # noqa: PLR2004 - rounds to 0.0
        return "< 0.1 %" if percent > 0 else "> -0.1 %"
    return f"{percent:.1f} %" if 0 < abs(percent) < 9.95 else f"{percent:.0f} %"  # noqa: PLR2004 - rounds to 10.0


def format_p_value(p_value: float) -> str:
    """A p-value in three decimals; smaller ones are not distinguished: `0.012`, `< 0.001`."""
    return f"{p_value:.3f}" if p_value >= _MIN_P_VALUE else f"< {_MIN_P_VALUE}"


def one_line(text: str, instead: str = " ") -> str:
    """Text from outside as it may stand in a sentence: nothing in it ends the line or moves a terminal's cursor."""
    return text if text.isprintable() else "".join(one if one.isprintable() else instead for one in text)


def format_time(epoch_seconds: float) -> str:
    """A moment in UTC, ISO 8601, to the second: `2026-11-22T03:49:20Z`."""
    return datetime.fromtimestamp(min(epoch_seconds, LAST_SECONDS), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
