"""What `make fuzz` found is read again, and anything in its place: nothing but the promised refusals come out."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quality.fuzz.readers import READERS
from tests.quality.fuzz.seeds import seeds

CORPUS = Path(__file__).with_name("corpus")
FOUND = [path for path in sorted(CORPUS.glob("*/*")) if path.is_file()]
MAX_BYTES = 300_000


def escaped(name: str, data: bytes) -> Exception | None:
    """What comes out of a reader besides its refusal."""
    try:
        READERS[name](data)
    except Exception as error:  # noqa: BLE001 - every escaped error is shown
        return error
    return None


@pytest.mark.parametrize("name", READERS)
def test_what_was_found_is_read_or_refused(name: str) -> None:
    """Each file of the corpus of each reader."""
    found = [path.read_bytes() for path in FOUND if path.parent.name == name]
    assert found
    assert [None] * len(found) == [escaped(name, data) for data in found]


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_spoilt_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """A file of the corpus with any bytes in any place, or cut anywhere."""
    whole = data.draw(st.sampled_from([path for path in FOUND if path.parent.name == name])).read_bytes()
    begin, length = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 64))
    put = data.draw(st.binary(max_size=32) | st.sampled_from([b'"', b"[" * 5000, b"1e999", b"-1", b"NaN", b"\\ud800"]))
    rest = whole[begin + length :] if data.draw(st.booleans()) else b""
    assert escaped(name, whole[:begin] + put + rest) is None


def test_the_corpus_is_small() -> None:
    """It is for every run of the tests."""
    assert sum(path.stat().st_size for path in FOUND) < MAX_BYTES
    assert {path.parent.name for path in FOUND} == READERS.keys() == {name for name, _ in seeds()}
