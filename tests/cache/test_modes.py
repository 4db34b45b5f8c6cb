"""Modes as records: the facts of each mode, the data for JavaScript, and names that do not exist."""

import json

import pytest
import torch

from kvviz.cache.modes import CODES, MODES, SCALE_BYTES, Mode, get_mode


def test_facts_of_every_mode():
    facts = {
        name: (mode.code_bits, mode.codes_per_byte, mode.element_bytes, mode.scale_bytes, mode.largest_code)
        for name, mode in MODES.items()
    }
    assert (
        facts.items()
        >= {
            "bfloat16": (16, 1, 2, 0, 0.0),
            "fp8": (8, 1, 1, 0, 448.0),
            "int8_per_token_head": (8, 1, 1, 4, 127.0),
            "fp8_per_token_head": (8, 1, 1, 4, 448.0),
            "int4_per_token_head": (4, 2, 1, 4, 15.0),
        }.items()
    )
    assert [mode.name for mode in MODES.values()] == list(MODES)
    assert get_mode("int4_per_token_head").rotated and not get_mode("fp8_per_token_head").rotated
    assert {mode.code for mode in MODES.values()} == set(CODES)


def test_names_of_scale_dtypes_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in SCALE_BYTES if name} == {"float32": 4, "float16": 2}
    assert CODES["e4m3"].largest == torch.finfo(torch.float8_e4m3fn).max
    assert CODES["int8"].largest == torch.iinfo(torch.int8).max


def test_data_of_a_mode_is_json():
    data = get_mode("int4_per_token_head").as_data()
    assert json.loads(json.dumps(data)) == data == {
        "name": "int4_per_token_head", "code": "int4", "values": [*range(16)], "codes_per_byte": 2, "scale_bytes": 4,
        "scale_dtype": "float32", "zero_point_mask": 15, "rotated": True,
    }  # fmt: skip
    assert get_mode("fp8_per_token_head").as_data()["values"].count(None) == 2  # the two codes of NaN
    assert get_mode("fp8").as_data()["zero_point_mask"] == get_mode("fp8").as_data()["scale_bytes"] == 0


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_a_mode_is_returned_as_it_is(mode):
    assert get_mode(mode) is get_mode(mode.name) is mode


@pytest.mark.parametrize(
    ("name", "near"),
    [("fp7_per_token_head", "fp8_per_token_head"), ("int4", "int4_per_token_head"), ("bf16", "bfloat16")],
)
def test_an_unknown_mode_names_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"kv_cache_dtype '{name}' does not exist.*did you mean '{near}'"):
        get_mode(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"code": "e9m9"}, "code 'e9m9' does not exist"), ({"scale_dtype": "float23"}, "did you mean 'float32'")],
)
def test_a_mode_of_unknown_parts_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Mode(**{"name": "new", "code": "int8", **change})
