"""Model values to plain JSON values and back: nothing is lost, nothing is guessed."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdiag.model import Capabilities, Device, Engine, Facts, Gap, KvPool, Load, Mark, Process, Sample
from kvdiag.model.codec import from_plain, to_plain
from tests.unit.feeds.strategies import FACTS, MARKS, SAMPLES

VALUES: st.SearchStrategy[Facts | Sample | Mark] = st.one_of(FACTS, SAMPLES, MARKS)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES)
def test_every_value_comes_back(value: Facts | Sample | Mark) -> None:
    """A value written as JSON and read again is the same value."""
    text = json.dumps(to_plain(value), allow_nan=False)
    assert value == from_plain(type(value), json.loads(text))


def test_no_field_is_forgotten() -> None:
    """A device with unreadable memory and a process without reported memory are restored as well."""
    process = Process(pid=7, used_bytes=None)
    sample = Sample(
        at_seconds=1.0, devices=(Device(uuid="GPU-1", index=0, name="", memory=None, processes=(process,)),)
    )
    assert sample == from_plain(Sample, json.loads(json.dumps(to_plain(sample))))


def test_what_is_not_known_is_left_out() -> None:
    """A missing reading takes no room, and a false one does not count as missing."""
    sample = Sample(at_seconds=1.5, engines=(Engine(engine="0", requests_running=0, asleep=False),))
    actual = to_plain(sample)
    expected = {"at_seconds": 1.5, "engines": [{"engine": "0", "requests_running": 0, "asleep": False}], "gaps": []}
    assert expected == actual


SAMPLE: dict[str, Any] = {"at_seconds": 1.0}
POOL = {"engine": "0", "block_tokens": 16, "total_blocks": 100, "usable_blocks": 99, "usage_blocks": 99}


def test_default_capabilities_are_left_out() -> None:
    """A trace's header has them only where an engine lacks some, so that a new one changes no recorded trace."""
    assert "capabilities" not in to_plain(Facts())
    assert not to_plain(Facts(capabilities=Capabilities(waits=False)))["capabilities"]["waits"]


def test_none_may_also_be_written_out() -> None:
    """`null` for an optional value reads as a missing value."""
    assert Sample(at_seconds=1.0) == from_plain(Sample, {**SAMPLE, "engines": None, "load": None})


def test_whole_number_is_a_float_too() -> None:
    """JSON does not distinguish 5 from 5.0; a field that takes fractions takes both."""
    actual = from_plain(Sample, {"at_seconds": 5}).at_seconds
    assert (5.0, float) == (actual, type(actual))


@pytest.mark.parametrize(
    ("kind", "plain", "named"),
    [
        (Sample, [], "Sample must be an object"),
        (Sample, None, "Sample must be an object"),
        (Sample, "x", "Sample must be an object"),
        (Sample, {}, "'at_seconds'"),
        (Sample, {**SAMPLE, "colour": 1}, "Sample has no field 'colour'"),
        (Sample, {**SAMPLE, "x" * 100: 1}, f"Sample has no field '{'x' * 40}'"),
        (Sample, {"at_seconds": True}, "Sample.at_seconds"),
        (Sample, {"at_seconds": "1"}, "Sample.at_seconds"),
        (Sample, {"at_seconds": None}, "Sample.at_seconds"),
        (Sample, {"at_seconds": -1}, "Sample: at_seconds is -1.0"),
        (Sample, {"at_seconds": 10**400}, "Sample.at_seconds"),
        (Sample, {"at_seconds": float("inf")}, "Sample.at_seconds"),
        (Sample, {"at_seconds": float("nan")}, "Sample.at_seconds"),
        (Sample, {**SAMPLE, "engines": {}}, "Sample.engines"),
        (Sample, {**SAMPLE, "engines": [[]]}, "Engine must be an object"),
        (Sample, {**SAMPLE, "gaps": None}, "Sample.gaps"),
        (Sample, {**SAMPLE, "load": 3}, "Load must be an object"),
        (Load, {"requests": True}, "Load.requests"),
        (Load, {"requests": 1.0}, "Load.requests"),
        (Load, {"requests": 1, "resident_tokens": [2, False]}, "Load.resident_tokens"),
        (Load, {"requests": 1, "resident_tokens": [2, 3]}, "Load: 2 resident requests of 1 open"),
        (Engine, {"engine": "0", "asleep": 0}, "Engine.asleep"),
        (Engine, {"engine": 0}, "Engine.engine"),
        (Gap, {"source": "x", "kind": "gone", "reason": ""}, "Gap.kind is 'gone'"),
        (Gap, {"source": "x", "kind": ["absent"], "reason": ""}, "Gap.kind"),
        (Mark, {**SAMPLE, "step": "s", "cycle": 0, "phase": 0}, "Mark.phase is '0'"),
        (Process, {"pid": 2**40, "used_bytes": None}, "Process: pid is 1099511627776"),
        (KvPool, {**POOL, "usable_blocks": 200}, "KvPool: 200 usable"),
        (Facts, {"url": 5}, "Facts.url"),
        (Facts, {"server_pids": [2**40]}, "Facts: server_pids is 1099511627776"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: type[Any], plain: object, named: str) -> None:
    """A value that is missing, unknown, of another type or impossible is refused, and the error names it."""
    with pytest.raises(ValueError, match=r".") as caught:
        from_plain(kind, plain)
    assert named in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SAMPLE, *POOL, "engines"]), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(kind=st.sampled_from([Facts, Sample, Mark, KvPool, Engine, Device, Load]), plain=JSON)
def test_no_json_does_harm(kind: type[Any], plain: object) -> None:
    """Any JSON content is either read as the requested value, or refused with one kind of error."""
    try:
        actual = from_plain(kind, plain)
    except ValueError:
        return
    assert isinstance(actual, kind)


def test_fields_that_are_not_known_are_skipped_leniently() -> None:
    """Documents of another version are read as far as they are known; wrong types are refused all the same."""
    plain = {"at_seconds": 1.0, "moons": 4, "gaps": [{"source": "gpu", "kind": "absent", "reason": "", "moons": 1}]}
    expected = Sample(at_seconds=1.0, gaps=(Gap("gpu", "absent", ""),))
    assert expected == from_plain(Sample, plain, lenient=True)
    with pytest.raises(ValueError, match="moons"):
        from_plain(Sample, plain)
    with pytest.raises(ValueError, match="at_seconds"):
        from_plain(Sample, {"at_seconds": "1"}, lenient=True)
