"""The published JSON Schema accepts and rejects the same files as the reader, judged by the library jsonschema."""

import json
from copy import deepcopy
from dataclasses import MISSING, fields
from typing import get_args

import pytest
from jsonschema import Draft202012Validator

from kvviz.audit.case_book import cases
from kvviz.audit.claims import Claim
from kvviz.audit.packed import PACKED
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import CLAIMS, DTYPES, ViewsFileError, dump, load
from kvviz.audit.views_schema import SCHEMA

VALIDATOR = Draft202012Validator(SCHEMA)
VIEW_VALUES = {"text": "scale", "integer": 4, "array": ["block"], "boolean": True}
VIEW_OPTIONAL = {
    name: VIEW_VALUES[rule.get("type") or rule["$ref"].rpartition("/")[2]]
    for name, rule in SCHEMA["$defs"]["view"]["properties"].items()
    if name not in SCHEMA["$defs"]["view"]["required"]
}
"""A value for each optional field of a view, by the type in the schema. A new field is tested without a change here."""
CLAIM_VALUES = {
    "views": ["a", "b"], "content": ["a"], "neighbours": ["b"], "readings": ["a", "b"], "declared": "a", "name": "ids",
    "address_type": "int32", "at_bytes": 4, "count": 2, "ratio": 1, "stride_bytes": None, "boundary_bytes": 16,
    "required": True, "strides": False, "blocks_per_id": [1, 2], "extents_per_block": 2, "blocks_per_extent": 1,
    "table": [0, -1], "part": ["a", "b"],
}  # fmt: skip


def full_file() -> dict:
    """A file that gives every field of every record, and one claim of each kind."""
    view = {"storage": "s", "dtype": "uint8", "shape": [2], "stride": [4]}
    views = [{"name": "a"} | view | VIEW_OPTIONAL, {"name": "b"} | view | {"dtype": {"itemsize": 2}}]
    claims = [
        {"kind": kind} | {part.name: CLAIM_VALUES.get(part.name, "b") for part in fields(claim)}
        for kind, claim in CLAIMS.items()
    ]
    storages = [{"name": "s", "nbytes": 64, "address": 4, "address_modulus": 64}]
    file = {"format": "kvviz-views", "version": 1, "storages": storages, "views": views}
    return deepcopy(file | {"claims": claims})


def places(value, way=()):
    """Every place in nested lists and objects."""
    if way:
        yield way
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*way, key))


def changed(way: tuple, value) -> dict:
    """The full file with one value replaced, or removed if ``value`` is ``...``."""
    file = full_file()
    target = file
    for step in way[:-1]:
        target = target[step]
    if value is ...:
        del target[way[-1]]
    else:
        target[way[-1]] = value
    return file


def accepted_by_reader(file: dict) -> bool:
    try:
        load(json.dumps(file))
    except ViewsFileError:
        return False
    return True


def test_the_schema_is_valid_and_its_files_are():
    Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(full_file())
    assert load(json.dumps(full_file())).claims and VALIDATOR.is_valid(json.loads(dump(load(json.dumps(full_file())))))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_files_of_the_case_book_fit_the_schema(case):
    for field in ("views_file", "fixed_views_file"):
        if field in case:
            VALIDATOR.validate(case[field])
            assert accepted_by_reader(case[field])


@pytest.mark.parametrize("way", list(places(full_file())), ids=lambda way: ".".join(map(str, way)))
def test_a_wrong_value_in_any_place_is_rejected_by_both(way):
    """Values that no field allows: of another type, too large, too long, unprintable, an object with unknown fields."""
    for value in (1.5, 1 << 62, -(1 << 62), "x" * 201, "\x1b", {"unknown": 1}, {}, [[]], ["a"] * 5001):
        file = changed(way, value)
        schema, reader = VALIDATOR.is_valid(file), accepted_by_reader(file)
        assert not schema and not reader, (way, value, schema, reader)


@pytest.mark.parametrize("way", [way for way in places(full_file()) if isinstance(way[-1], str)], ids=str)
def test_both_agree_on_which_fields_may_be_missing(way):
    file, name = changed(way, ...), way[-1]
    optional = name in ("claims", "address", "address_modulus") or (way[0] == "views" and name in VIEW_OPTIONAL)
    if way[0] == "claims" and len(way) == 3 and name != "kind":
        claim = CLAIMS[full_file()["claims"][way[1]]["kind"]]
        optional = next(part for part in fields(claim) if part.name == name).default is not MISSING
    assert VALIDATOR.is_valid(file) == accepted_by_reader(file) == optional


@pytest.mark.parametrize("value", [None, "", 0, -1, True, "b"])
def test_both_agree_on_values_that_some_fields_allow(value):
    for way in places(full_file()):
        file = changed(way, value)
        if VALIDATOR.is_valid(file) != accepted_by_reader(file):  # the schema cannot compare names and lengths
            assert value == "b" and VALIDATOR.is_valid(file)


def test_kinds_fields_and_types_are_those_of_the_code():
    kinds = [rule["$ref"].rpartition("/")[2] for rule in SCHEMA["properties"]["claims"]["items"]["oneOf"]]
    assert kinds == [*CLAIMS] and len(kinds) == len(get_args(Claim))
    for kind, claim in CLAIMS.items():
        rule = SCHEMA["$defs"][kind]
        assert [*rule["properties"]] == ["kind", *(part.name for part in fields(claim))]
        assert rule["required"] == ["kind", *(part.name for part in fields(claim) if part.default is MISSING)]
    assert SCHEMA["$defs"]["type_name"]["enum"] == [*DTYPES, *PACKED]
    given = {*SCHEMA["$defs"]["view"]["properties"]} - {"dtype"} | {"itemsize", "values"}
    assert given == {part.name for part in fields(View)}
    assert [*SCHEMA["$defs"]["storage"]["properties"]] == [part.name for part in fields(Storage)]


def test_every_optional_field_of_a_view_is_read_and_written():
    file = load(json.dumps(full_file()))
    written = json.loads(dump(file))["views"][0]
    assert {name: written[name] for name in VIEW_OPTIONAL} == VIEW_OPTIONAL
    assert len(VIEW_OPTIONAL) >= 3 and load(dump(file)) == file
