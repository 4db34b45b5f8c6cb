"""CacheSpec: sizes against numbers worked out by hand, and every refusal with the number that caused it."""

import numpy as np
import pytest

from kvviz.audit.arguments import one_of
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec

GOOD = {"num_layers": 3, "num_blocks": 5, "block_size": 16, "num_kv_heads": 8, "head_size": 128}
COUNTS = tuple(GOOD)


def spec(**changes) -> CacheSpec:
    return CacheSpec(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("mode", "tail", "data", "cell", "real", "content"),
    [
        ("fp8_per_token_head", True, 128, 132, 32_768, 33_792),
        ("fp8_per_token_head", False, 128, 128, 32_768, 32_768),
        ("int8_per_token_head", True, 128, 132, 32_768, 33_792),
        ("int4_per_token_head", True, 64, 68, 16_384, 17_408),
        ("int4_per_token_head", False, 64, 64, 16_384, 16_384),
        ("fp8", True, 128, 128, 32_768, 32_768),
        ("bfloat16", True, 256, 256, 65_536, 65_536),
    ],
)
def test_sizes_of_every_mode(mode, tail, data, cell, real, content):
    made = spec(kv_cache_dtype=mode, tail=tail)
    assert (made.data_bytes, made.cell_bytes) == (data, cell)
    assert (made.real_page_size_bytes, made.content_page_size_bytes, made.page_size_bytes) == (real, content, content)
    assert made.cells_per_page == 256
    assert (made.layer_bytes, made.buffer_bytes) == (5 * content, 15 * content)
    assert made.num_slots == 80


@pytest.mark.parametrize(
    ("mode", "per_token_head", "element", "scale", "place"),
    [
        ("fp8_per_token_head", True, 1, 4, 128),
        ("int8_per_token_head", True, 1, 4, 128),
        ("int4_per_token_head", True, 1, 4, 64),
        ("fp8", False, 1, 0, 128),
        ("bfloat16", False, 2, 0, 256),
    ],
)
def test_scale_and_element_of_every_mode(mode, per_token_head, element, scale, place):
    made = spec(kv_cache_dtype=mode)
    assert made.is_per_token_head is per_token_head
    assert (made.element_bytes, made.scale_bytes, made.scale_offset_bytes) == (element, scale, place)


def test_the_modes_of_released_vllm_are_here():
    assert set(MODES) >= {"bfloat16", "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"}


@pytest.mark.parametrize(
    ("tail", "cell", "page", "buffer"),
    [(False, 64, 4_096, 17_345_937_408), (True, 68, 4_352, 18_430_058_496)],
)
def test_the_buffer_of_issue_48412(tail, cell, page, buffer):
    """Shape (176452, 2, 24, 2, 16, 64) is B, H, L, K and V, N and cells of 64 bytes: no room for a scale."""
    made = CacheSpec(24, 176_452, 16, 2, 64, "fp8_per_token_head", tail=tail)
    assert (made.cell_bytes, made.page_size_bytes, made.buffer_bytes) == (cell, page, buffer)
    assert made.scale_offset_bytes == cell - 4
    assert made.real_page_size_bytes == 4_096


@pytest.mark.parametrize("padded", [33_792, 33_796, 40_960])
def test_a_padded_page_is_the_step_and_not_the_content(padded):
    made = spec(page_size_padded=padded)
    assert (made.content_page_size_bytes, made.page_size_bytes) == (33_792, padded)
    assert made.buffer_bytes == 15 * padded


@pytest.mark.parametrize("value", [0, -1, -7, True, False, 1.0, 2.5, "16", None, (4,)], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_integers(name, value):
    with pytest.raises(ValueError) as caught:
        spec(**{name: value})
    assert name in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -33_792, True, 33_792.0, "33792"], ids=repr)
def test_padding_is_a_positive_integer(value):
    with pytest.raises(ValueError) as caught:
        spec(page_size_padded=value)
    assert "page_size_padded" in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"kv_cache_dtype": "int4_per_token_head", "head_size": 65}, ["65", "multiple of 2"]),
        ({"kv_cache_dtype": "int4_per_token_head", "head_size": 68}, ["34", "68", "not a multiple of 4"]),
        ({"kv_cache_dtype": "fp8_per_token_head", "head_size": 66}, ["66", "not a multiple of 4"]),
        ({"kv_cache_dtype": "int8_per_token_head", "head_size": 33}, ["33", "not a multiple of 4"]),
        ({"kv_cache_dtype": "int8_per_token_head", "head_size": 4, "tail": False}, ["4 bytes", "without a tail"]),
        ({"kv_cache_dtype": "int4_per_token_head", "head_size": 8, "tail": False}, ["4 bytes", "without a tail"]),
        ({"page_size_padded": 33_791}, ["33791", "33792"]),
        ({"page_size_padded": 33_794}, ["33794", "4"]),
        ({"kv_cache_dtype": "bfloat16", "page_size_padded": 65_537}, ["65537", "2"]),
        ({"tail": 1}, ["tail", "1"]),
        ({"tail": None}, ["tail", "None"]),
        ({"tail": "no"}, ["tail", "no"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(changes, numbers):
    with pytest.raises(ValueError) as caught:
        spec(**changes)
    assert [number for number in numbers if number not in str(caught.value)] == []


def test_alignment_is_asked_only_where_there_are_scales():
    assert spec(kv_cache_dtype="fp8", head_size=33).cell_bytes == 33
    assert spec(kv_cache_dtype="bfloat16", head_size=33).cell_bytes == 66
    assert spec(kv_cache_dtype="fp8", head_size=33, page_size_padded=8_449).page_size_bytes == 8_449


@pytest.mark.parametrize(
    ("mode", "near"),
    [("fp8_per_token_heads", "fp8_per_token_head"), ("int8", "int8_per_token_head"), ("bf16", "bfloat16")],
)
def test_an_unknown_mode_gets_a_suggestion(mode, near):
    with pytest.raises(ValueError) as caught:
        spec(kv_cache_dtype=mode)
    said = str(caught.value)
    assert said.endswith(f"did you mean {near!r}?") and repr(mode) in said
    assert all(known in said for known in MODES)


@pytest.mark.parametrize("value", [None, 7, "zzz", []], ids=repr)
def test_nothing_near_gets_no_suggestion(value):
    with pytest.raises(ValueError) as caught:
        one_of("mode", value, ("fp8", "bfloat16"))
    assert str(caught.value) == f"mode {value!r} does not exist: it is one of fp8, bfloat16"


def test_a_spec_cannot_be_changed_and_compares_by_value():
    with pytest.raises(AttributeError):
        spec().head_size = 64
    assert spec() == spec() and hash(spec()) == hash(spec())
    assert spec() != spec(tail=False)


@pytest.mark.parametrize("number", [np.int8, np.int32, np.int64, np.uint16])
def test_a_numpy_integer_is_an_integer(number):
    made = spec(num_blocks=number(100), block_size=number(16), page_size_padded=np.int32(40_960))
    assert made == spec(num_blocks=100, page_size_padded=40_960)
    assert {type(value) for value in (made.num_blocks, made.block_size, made.page_size_padded)} == {int}


@pytest.mark.parametrize("value", [np.float64(4.0), np.bool_(True), np.array([4])], ids=repr)
def test_other_numpy_values_are_not_integers(value):
    with pytest.raises(ValueError, match="num_blocks must be an integer, not"):
        spec(num_blocks=value)


def test_a_mode_is_kept_by_its_name():
    assert spec(kv_cache_dtype=MODES["fp8"]) == spec(kv_cache_dtype="fp8")
    assert spec(kv_cache_dtype=MODES["fp8"]).kv_cache_dtype == "fp8"
