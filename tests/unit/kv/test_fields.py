"""Reading an untrusted config: every type and range at its edge, and errors that name the field by its full path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.model_error import KvModelError

MOST = 1 << 24
Read = Callable[[Fields], object]


def refusal(values: dict[str, object], read: Read, *, under: str = "") -> tuple[str, str | None]:
    """The message and the field of the error."""
    with pytest.raises(KvModelError) as caught:
        read(Fields(values, under))
    return caught.value.message, caught.value.field


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (MOST, MOST), (32.0, 32), (None, None), ("absent", None)],
    ids=["least", "most", "a float that is whole", "null", "absent"],
)
def test_whole_numbers(value: object, expected: int | None) -> None:
    """JSON writes 32.0 for 32 at times; null is as good as absent."""
    # GIVEN
    fields = Fields({} if value == "absent" else {"layers": value})

    # THEN
    assert expected == fields.maybe_integer("layers")
    assert (7 if expected is None else expected) == fields.integer("layers", default=7)


def test_the_first_name_that_is_there_counts() -> None:
    """Null does not; 0 does, where it is allowed."""
    # GIVEN
    fields = Fields({"n_layer": None, "num_layers": 0, "depth": 4})

    # THEN
    assert [0, 4, None] == [
        fields.maybe_integer("n_layer", "num_layers", "depth", low=0),
        fields.integer("n_layer", "depth"),
        fields.maybe_integer("n_layer", "layers"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "is 0; it must lie between 1 and 16777216"),
        (MOST + 1, "is 16777217; it must lie between 1 and 16777216"),
        (10**31, "is a number of more than 30 digits; it must lie between 1 and 16777216"),
        (-(10**31), "is a number of more than 30 digits; it must lie between 1 and 16777216"),
        (10**30, f"is {10**30}; it must lie between 1 and 16777216"),
        (1.5, "is 1.5, not a whole number"),
        (float("nan"), "is nan, not a whole number"),
        (True, "is True, not a whole number"),
        ("32", "is '32', not a whole number"),
        ([1, 2], "is a list of 2, not a whole number"),
        ({"a": 1}, "is an object, not a whole number"),
        ("é\n", r"is '\xe9\n', not a whole number"),
        ("x" * 38, f"is '{'x' * 38}', not a whole number"),
        ("x" * 39, f"is '{'x' * 39}…, not a whole number"),
    ],
)
def test_what_is_no_such_number_is_shown(value: object, shown: str) -> None:
    """In one short line, escaped; a number in quotes is no number."""
    assert (f"layers {shown}", "layers") == refusal({"layers": value}, lambda fields: fields.maybe_integer("layers"))


def test_a_number_that_must_be_there() -> None:
    """All the names it may have, and the first for a field."""
    expected = "config has no text.a or text.b; the KV cost cannot be told without it"

    assert (expected, "text.a") == refusal({}, lambda fields: fields.integer("a", "b"), under="text")


@pytest.mark.parametrize(("value", "expected"), [(None, 0.5), (0, 0.0), (1, 1.0), (0.25, 0.25)])
def test_numbers_with_a_fraction(value: object, expected: float) -> None:
    """Both ends are allowed, and the answer is a float."""
    # WHEN
    actual = Fields({"ratio": value}).number("ratio", default=0.5, low=0.0, high=1.0)

    # THEN
    assert (expected, float) == (actual, type(actual))


@pytest.mark.parametrize("value", [-0.001, 1.001, True, "0.5", float("nan")])
def test_a_fraction_beyond_its_ends(value: object) -> None:
    """True is no number."""
    message, field = refusal({"ratio": value}, lambda fields: fields.number("ratio", default=0.5, low=0, high=1))

    assert ("ratio", True) == (field, message.endswith("; it must be a number between 0 and 1"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, None, None, None, None, None, None)),
        (
            {
                "flag": False,
                "text": "",
                "list": [],
                "strings": ["a"],
                "integers": [0, MOST],
                "child": {},
                "children": [],
            },
            (False, "", [], ("a",), (0, MOST), (), ()),
        ),
    ],
    ids=["absent", "there"],
)
def test_other_types(values: dict[str, object], expected: tuple[object, ...]) -> None:
    """What is absent is its default or None, what is empty is not."""
    # GIVEN
    fields = Fields(values)
    child = fields.child("child")

    # THEN
    assert expected == (
        fields.flag("flag", default=True),
        fields.text("text"),
        fields.sequence("list"),
        fields.strings("strings"),
        fields.integers("integers"),
        None if child is None else child.names(),
        fields.children("children"),
    )


READERS: dict[str, Read] = {
    "flag": lambda fields: fields.flag("it", default=False),
    "text": lambda fields: fields.text("it"),
    "sequence": lambda fields: fields.sequence("it"),
    "two at most": lambda fields: fields.sequence("it", most=2),
    "strings": lambda fields: fields.strings("it"),
    "one string": lambda fields: fields.strings("it", most=1),
    "integers": lambda fields: fields.integers("it"),
    "small integers": lambda fields: fields.integers("it", low=2, high=3),
    "child": lambda fields: fields.child("it"),
    "children": lambda fields: fields.children("it"),
}


@pytest.mark.parametrize(
    ("reader", "value", "message"),
    [
        ("flag", 1, "top.it is 1, not true or false"),
        ("text", 5, "top.it is 5, not a string"),
        ("sequence", "ab", "top.it is 'ab', not a list"),
        ("sequence", [0] * 4097, "top.it has 4097 entries; at most 4096 are read"),
        ("two at most", [0] * 3, "top.it has 3 entries; at most 2 are read"),
        ("strings", ["a", 1], "top.it holds 1, not strings only"),
        ("one string", ["a", "b"], "top.it has 2 entries; at most 1 are read"),
        ("integers", [1, True], "top.it holds True, not whole numbers between 0 and 16777216"),
        ("integers", [1.0], "top.it holds 1.0, not whole numbers between 0 and 16777216"),
        ("integers", [-1], "top.it holds -1, not whole numbers between 0 and 16777216"),
        ("integers", [MOST + 1], "top.it holds 16777217, not whole numbers between 0 and 16777216"),
        ("small integers", [1], "top.it holds 1, not whole numbers between 2 and 3"),
        ("small integers", [4], "top.it holds 4, not whole numbers between 2 and 3"),
        ("child", [], "top.it is a list of 0, not an object"),
        ("children", {}, "top.it is an object, not a list"),
    ],
)
def test_other_types_refuse_what_is_none_of_them(reader: str, value: object, message: str) -> None:
    """By the field's full path."""
    assert (message, "top.it") == refusal({"it": value}, READERS[reader], under="top")


@pytest.mark.parametrize(
    ("reader", "value"), [("sequence", [0] * 4096), ("two at most", (0, 0)), ("small integers", [2, 3])]
)
def test_lists_may_be_as_long_as_allowed(reader: str, value: list[int]) -> None:
    """And their numbers as small and as large; a tuple is a list."""
    assert list(value) == list(READERS[reader](Fields({"it": value})))  # type: ignore[call-overload]


def test_an_entry_that_is_no_object_is_named_by_its_place() -> None:
    """Counted from 0."""
    assert ("top.it[1] is 5, not an object", "top.it[1]") == refusal({"it": [{}, 5]}, READERS["children"], under="top")


def test_nested_objects_have_paths() -> None:
    """Of objects, and of objects in lists."""
    # GIVEN
    fields = Fields({"a": {"b": [{"c": "x"}, {"c": 5}]}})
    nested = fields.child("a")
    assert nested is not None
    entries = nested.children("b")
    assert entries is not None

    # THEN
    assert ["a.b[0].c", "a.b[1].c"] == [entry.path("c") for entry in entries]
    assert "x" == entries[0].text("c")


def test_how_deep_objects_may_lie() -> None:
    """Eight inside each other below the top; the ninth is refused by its path."""
    # GIVEN
    values: dict[str, Any] = {}
    for _ in range(10):
        values = {"a": values}
    fields = Fields(values)
    for _ in range(8):
        child = fields.child("a")
        assert child is not None
        fields = child

    # THEN
    with pytest.raises(KvModelError, match="nested more than 8 deep") as caught:
        fields.child("a")
    assert ".".join("a" * 9) == caught.value.field


@pytest.mark.parametrize(("name", "shown"), [("a\nb", r"'a\nb'"), ("größe", "größe")])
def test_names_are_printable(name: str, shown: str) -> None:
    """A name with control characters is escaped."""
    assert f"top.{shown}" == Fields({}, "top").path(name)


def test_what_is_missing_is_filled_in() -> None:
    """Defaults give way to what is there, unless they override it; the path stays."""
    # GIVEN
    fields = Fields({"a": 1, "b": None}, "top")
    filled, overridden = fields.filled({"a": 2, "c": 3}), fields.filled({"a": 2}, override=True)

    # THEN
    assert [(1, 3, "top.a"), (2, None, "top.a")] == [
        (each.raw("a"), each.raw("c"), each.path("a")) for each in (filled, overridden)
    ]
    assert [True, False, False] == [fields.has(name) for name in ("a", "b", "c")]
    assert ("a", "b") == fields.names()
