"""Reading an untrusted config: every type and range at its edge, and errors that name the field by its full path."""

from collections.abc import Callable
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from tests.unit.kv.refused import refused

MOST = 1 << 24
Read = Callable[[Fields], object]


def refusal(values: dict[str, object], read: Read, *, under: str = "") -> KvModelError:
    """The error that a value gives."""
    with pytest.raises(KvModelError) as caught:
        read(Fields(values, under))
    return caught.value


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (MOST, MOST), (32.0, 32), (None, None), ("absent", None)],
    ids=["least", "most", "a float that is whole", "null", "absent"],
)
def test_whole_numbers(value: object, expected: int | None) -> None:
    """JSON writes 32.0 for 32 at times; null is as good as absent."""
    fields = Fields({} if value == "absent" else {"layers": value})

    assert expected == fields.maybe_integer("layers")
    assert (7 if expected is None else expected) == fields.integer("layers", default=7)


def test_the_first_name_that_is_there_counts() -> None:
    """Null does not; 0 does, where it is allowed."""
    fields = Fields({"n_layer": None, "num_layers": 0, "depth": 4})

    assert [0, 4, None] == [
        fields.maybe_integer("n_layer", "num_layers", "depth", low=0),
        fields.integer("n_layer", "depth"),
        fields.maybe_integer("n_layer", "layers"),
    ]


@pytest.mark.parametrize(("value", "expected"), [(None, 0.5), (0, 0.0), (1, 1.0), (0.25, 0.25)])
def test_numbers_with_a_fraction(value: object, expected: float) -> None:
    """Both ends are allowed, and the answer is a float."""
    actual = Fields({"ratio": value}).number("ratio", default=0.5, low=0.0, high=1.0)

    assert (expected, float) == (actual, type(actual))


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
    fields = Fields(values)
    child = fields.child("child")

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
    "integer": lambda fields: fields.integer("it", "that"),
    "ratio": lambda fields: fields.number("it", default=0.5, low=0, high=1),
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
    ("reader", "value"), [("sequence", [0] * 4096), ("two at most", (0, 0)), ("small integers", [2, 3])]
)
def test_lists_may_be_as_long_as_allowed(reader: str, value: list[int]) -> None:
    """And their numbers as small and as large; a tuple is a list."""
    assert list(value) == list(READERS[reader](Fields({"it": value})))  # type: ignore[call-overload]


def test_nested_objects_have_paths() -> None:
    """Of objects, and of objects in lists."""
    fields = Fields({"a": {"b": [{"c": "x"}, {"c": 5}]}})
    nested = fields.child("a")
    assert nested is not None
    entries = nested.children("b")
    assert entries is not None

    assert ["a.b[0].c", "a.b[1].c"] == [entry.path("c") for entry in entries]
    assert "x" == entries[0].text("c")


@pytest.mark.parametrize(("name", "shown"), [("a\nb", r"'a\nb'"), ("größe", "größe")])
def test_names_are_printable(name: str, shown: str) -> None:
    """A name with control characters is escaped."""
    assert f"top.{shown}" == Fields({}, "top").path(name)


def test_what_is_missing_is_filled_in() -> None:
    """Defaults give way to what is there, unless they override it; the path stays."""
    fields = Fields({"a": 1, "b": None}, "top")
    filled, overridden = fields.filled({"a": 2, "c": 3}), fields.filled({"a": 2}, override=True)

    assert [(1, 3, "top.a"), (2, None, "top.a")] == [
        (each.raw("a"), each.raw("c"), each.path("a")) for each in (filled, overridden)
    ]
    assert [True, False, False] == [fields.has(name) for name in ("a", "b", "c")]
    assert ("a", "b") == fields.names()


REFUSED: list[tuple[str, object]] = [
    *(("integer", value) for value in (0, MOST + 1, 10**31, -(10**31), 10**30, 1.5, float("nan"), True, "32", [1, 2])),
    *(("integer", value) for value in ({"a": 1}, "é\n", "x" * 38, "x" * 39, None)),
    *(("ratio", value) for value in (-0.001, 1.001, True, "0.5", float("nan"))),
    ("flag", 1),
    ("text", 5),
    ("sequence", "ab"),
    ("sequence", [0] * 4097),
    ("two at most", [0] * 3),
    ("strings", ["a", 1]),
    ("one string", ["a", "b"]),
    *(("integers", [value]) for value in (True, 1.0, -1, MOST + 1)),
    *(("small integers", [value]) for value in (1, 4)),
    ("child", []),
    ("children", {}),
    ("children", [{}, 5]),
]


def test_values_that_cannot_be_read_are_named_by_path_and_shown_short(golden: Callable[[str, str], None]) -> None:
    """Each error is one line with the field's full path, and says what the value must be."""
    errors = [refusal({"it": value}, READERS[reader], under="top") for reader, value in REFUSED]

    assert {"top.it", "top.it[1]"} == {error.field for error in errors}
    assert all(len(str(error)) < 200 for error in errors)
    golden("fit/config_errors.txt", "\n".join(str(error) for error in errors) + "\n")


def test_objects_may_be_nested_eight_deep() -> None:
    """The ninth below the top is refused by its path."""
    values: dict[str, Any] = {}
    for _ in range(10):
        values = {"a": values}
    fields = Fields(values)
    for _ in range(8):
        child = fields.child("a")
        assert child is not None
        fields = child

    with refused(".".join("a" * 9)):
        fields.child("a")
