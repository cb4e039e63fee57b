import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from rich.console import Group

import kvdiag.outputs.documents
from kvdiag.diagnosis.fleet import ReplicaSummary, compare
from kvdiag.diagnosis.fleet.fleet_verdicts import MEANINGS
from kvdiag.outputs.documents.fleet_document import compared as values
from kvdiag.outputs.terminal.fleet_text import COURSES, versions
from tests.unit.diagnosis.fleet.replicas import fleet_of, made
from tests.unit.outputs.texts import HOSTILE, piped

FOLDER = Path(kvdiag.outputs.documents.__path__[0])

UPGRADE = [
    *fleet_of(12, "device", 0.4, version="0.31.0"),
    *fleet_of(12, "device", 20.0, version="0.32.0"),
    *[made({"torch_live": 3.0 * (place % 3 - 1)}, f"c{place}", version="0.33.0", hours=8.0) for place in range(4)],
]


def shown(summaries: list[ReplicaSummary]) -> str:
    """What a pipe gets."""
    return piped(Group(*versions(compare(summaries))))


SCHEMAS = {name: json.loads((FOLDER / name).read_text()) for name in ("diagnosis.schema.json", "fleet.schema.json")}
VALIDATOR = Draft202012Validator(
    {**SCHEMAS["fleet.schema.json"], "$ref": "#/$defs/fleet"},
    registry=Registry().with_resources((name, Resource.from_contents(one)) for name, one in SCHEMAS.items()),
)


def test_text_says_what_grows_in_which_version(golden: Callable[[str, str], None]) -> None:
    """The text of an upgrade that brought a leak, down to its finding, a line at most 80 characters wide."""
    actual = shown(UPGRADE)
    assert max(map(len, actual.splitlines())) <= 80
    golden("terminal/versions.txt", actual)


def test_text_of_one_replica_has_no_versions() -> None:
    """There is nothing to compare."""
    assert "" == shown(fleet_of(1, "device", 20.0))


def test_names_of_versions_and_models_do_no_harm() -> None:
    """An image's tag comes from outside: no escape sequence of it reaches a terminal."""
    actual = shown(fleet_of(8, "device", 20.0, version=HOSTILE, model=HOSTILE))
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(actual)
    assert "[bold red]" in actual


def test_long_tables_are_cut() -> None:
    """Of sixty versions the tables show twenty rows each, what grows first, and count the rest."""
    many = [
        one
        for number in range(60)
        for one in fleet_of(6, "device", 300.0 if number == 59 else 0.0, version=f"0.{number}.0")
    ]
    actual = shown(many)
    growing = actual.partition("\nGrowth per hour")[2].partition("\nGrowth per hour")[0]
    assert "0.59.0" in growing.splitlines()[2]
    assert "and 40 more" in growing


@pytest.mark.parametrize(
    "summaries",
    [UPGRADE, [], fleet_of(3, "torch_live", 1.0), fleet_of(30, "kv_held_idle", 5e-6), fleet_of(1, "device", 0.0)],
    ids=["upgrade", "nobody", "three", "blocks", "one"],
)
def test_values_meet_their_schema(summaries: list[ReplicaSummary]) -> None:
    """For any comparison, the values meet the committed schema after a JSON round trip."""
    counts = {"replicas": len(summaries), "by_worst": dict.fromkeys(("fault", "suspect", "unknown", "ok"), 0)}
    written = json.loads(json.dumps({**counts, **values(compare(summaries))}, allow_nan=False))
    assert [] == list(VALIDATOR.iter_errors(written))


def test_every_object_of_the_schema_is_closed() -> None:
    """No field that the schema does not name, and each that it names must be there; a subject's labels are anyone's."""
    schema = SCHEMAS["fleet.schema.json"]
    assert [] == list(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema))
    objects = [one for one in schema["$defs"].values() if one.get("type") == "object"]
    assert len(objects) >= 8
    for one in objects:
        assert one["additionalProperties"] is False
        assert set(one["required"]) == set(one["properties"])


def test_the_schema_knows_every_component() -> None:
    """Components and courses of the code are those of the schema."""
    defined = SCHEMAS["fleet.schema.json"]["$defs"]
    assert list(MEANINGS) == defined["component"]["enum"]
    assert set(COURSES) == set(defined["version_growth"]["properties"]["course"]["enum"])
