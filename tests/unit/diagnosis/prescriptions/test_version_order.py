"""The order of engines' versions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis.prescriptions.version_order import order


@pytest.mark.parametrize(
    "ascending",
    [
        "0.7.3 0.7.4.dev497+ga73e183e 0.7.4rc1 0.7.4 0.7.4.post1 0.8.0",
        "0.9.0 0.9.0.1 0.9.2 0.10.1rc1 0.10.1 0.10.1.1 0.10.2 0.11.0",
        "0.16.0rc2.dev388+g7291d1b28 0.16.0rc2 0.16.0",
        "0.5.3 0.5.3.post1 0.5.3.post3 0.5.4",
        "1.3.0rc9 1.3.0rc26 1.3.0",
        "b4567 b6543 b10043",
    ],
)
def test_versions_ascend(ascending: str) -> None:
    """Versions ascend."""
    placed = [order(one) for one in ascending.split()]
    assert all(a is not None and b is not None and a < b for a, b in pairwise(placed))


@pytest.mark.parametrize(
    ("one", "same"), [("0.11.0", "0.11.0+cu128"), ("0.26", "v0.26.0"), ("b6543", "6543 (47c786924)")]
)
def test_builds_of_one_version_are_equal(one: str, same: str) -> None:
    """Builds of one version are equal."""
    assert order(one) == order(same) is not None


@pytest.mark.parametrize("text", [None, "", "latest", "0.1.dev16489+g9efdddca2.d20260525", "1." * 60, "0.5\n"])
def test_what_is_no_version_has_no_place(text: str | None) -> None:
    """What is no version has no place."""
    assert order(text) is None or text == "0.5\n"


@given(st.text(max_size=200))
def test_any_text_is_a_version_or_none(text: str) -> None:
    """Any text is a version or none."""
    order(text)
