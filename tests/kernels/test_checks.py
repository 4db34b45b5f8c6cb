"""Test what the launchers refuse: they raise a ValueError with the numbers, and no byte of the cache changes."""

import numpy as np
import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.runtime import device
from kvviz.kernels.write import write_kv

DEVICE = device()
FP8 = "fp8_per_token_head"
SENTINEL = 0xA5
T, H, D, B, N = 3, 2, 32, 4, 8


def zeros(*shape, dtype=torch.float32, where=None):
    return torch.zeros(shape, dtype=dtype, device=where or DEVICE)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def slots(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def cache_and_views(mode: str, layout: str = "NHD"):
    """Return a cache filled with SENTINEL, and the arguments that both launchers share."""
    cache = allocate(CacheSpec(1, B, N, H, D, mode), layout, DEVICE, fill=SENTINEL)
    views = {"kv_cache": cache.kv_caches[0], "kv_cache_dtype": mode}
    if cache.spec.is_per_token_head:
        views |= dict(zip(("k_scale_cache", "v_scale_cache"), cache.carve_scales()[0], strict=True))
    return cache, views


def writing(mode: str = FP8):
    """Return a cache, and arguments with which ``write_kv`` writes three tokens into it."""
    cache, views = cache_and_views(mode)
    return cache, {"key": zeros(T, H, D) + 1, "value": zeros(T, H, D) - 1, "slot_mapping": slots(0, 9, 31), **views}


def attending(mode: str = FP8):
    """Return a cache, and arguments of ``paged_attention`` for two sequences: 9 and 8 tokens, 1 and 2 queries."""
    cache, views = cache_and_views(mode)
    sequences = {"seq_lens": int32(9, 8), "query_start_loc": int32(0, 1, 3)}
    return cache, {"query": zeros(T, 2 * H, D), "block_table": int32([2, 1], [3, -1]), **sequences, **views}


def refusal(launch, cache, arguments) -> str:
    with pytest.raises(ValueError) as caught:
        launch(**arguments)
    assert int((cache.storages[0] != SENTINEL).sum()) == 0
    return str(caught.value)


WRONG_WRITES = {
    "value of another length": ({"value": zeros(2, H, D)}, ["(3, 2, 32)", "(2, 2, 32)"]),
    "value of another head size": ({"value": zeros(T, H, 16)}, ["(3, 2, 32)", "(3, 2, 16)"]),
    "heads and channels in one axis": (
        {"key": zeros(T, H * D), "value": zeros(T, H * D)},
        ["key has shape (3, 64)", "3 axes", "(T, H, D)"],
    ),
    "an axis too many": ({"key": zeros(1, T, H, D), "value": zeros(1, T, H, D)}, ["(1, 3, 2, 32)"]),
    "too many heads": ({"key": zeros(T, 3, D), "value": zeros(T, 3, D)}, ["3 KV heads", "the cache has 2"]),
    "head size too large": ({"key": zeros(T, H, 64), "value": zeros(T, H, 64)}, ["64", "64 or 68 bytes", "have 36"]),
    "head size too small": ({"key": zeros(T, H, 30), "value": zeros(T, H, 30)}, ["30 or 34 bytes", "have 36"]),
    "integers": ({"key": zeros(T, H, D).int(), "value": zeros(T, H, D).int()}, ["torch.int32", "torch.bfloat16"]),
    "doubles": ({"key": zeros(T, H, D).double(), "value": zeros(T, H, D).double()}, ["torch.float64"]),
    "two dtypes": ({"value": zeros(T, H, D).half()}, ["torch.float32", "torch.float16"]),
    "every second channel": (
        {"key": zeros(T, H, 2 * D)[..., ::2], "value": zeros(T, H, 2 * D)[..., ::2]},
        ["(128, 64, 2)", "innermost stride must be 1"],
    ),
    "two orders": ({"value": zeros(H, T, D).transpose(0, 1)}, ["(64, 32, 1)", "(32, 96, 1)"]),
    "a slot behind the last": ({"slot_mapping": slots(0, 32, 1)}, ["slot 32", "4 blocks", "0 to 31"]),
    "a slot far away": ({"slot_mapping": slots(1 << 40, 0, 1)}, [str(1 << 40), "0 to 31"]),
    "too few slots": ({"slot_mapping": slots(0, 1)}, ["3 tokens", "(3,)", "(2,)"]),
    "too many slots": ({"slot_mapping": slots(0, 1, 2, 3)}, ["(3,)", "(4,)"]),
    "slots in two axes": ({"slot_mapping": slots([0, 1, 2])}, ["(3,)", "(1, 3)"]),
    "slots of 32 bits": ({"slot_mapping": slots(0, 1, 2, dtype=torch.int32)}, ["torch.int64", "torch.int32"]),
    "every second slot": ({"slot_mapping": slots(0, 1, 2, 3, 4, 5)[::2]}, ["slot_mapping has stride 2", "contiguous"]),
    "key elsewhere": ({"key": zeros(T, H, D, where="meta")}, ["key is on meta", str(DEVICE)]),
    "value elsewhere": ({"value": zeros(T, H, D, where="meta")}, ["value is on meta", str(DEVICE)]),
    "slots elsewhere": (
        {"slot_mapping": zeros(T, dtype=torch.int64, where="meta")},
        ["slot_mapping is on meta", str(DEVICE)],
    ),
}

WRONG_VIEWS = {
    "bytes two apart": (
        lambda views: {"kv_cache": zeros(B, 2, N, H, 72, dtype=torch.uint8)[..., ::2]},
        ["innermost stride is 2"],
    ),
    "no KV view": (lambda views: {"kv_cache": zeros(B, 3, N, H, 36, dtype=torch.uint8)}, ["(4, 3, 8, 2, 36)"]),
    "a bfloat16 cache": (
        lambda views: {"kv_cache": zeros(B, 2, N, H, 18, dtype=torch.bfloat16)},
        [FP8, "torch.uint8", "torch.bfloat16"],
    ),
    "an unknown mode": (lambda views: {"kv_cache_dtype": "fp9"}, ["fp9", "did you mean 'fp8'"]),
    "another mode's cells": (
        lambda views: {"kv_cache_dtype": "int4_per_token_head"},
        ["16 or 20 bytes", "have 36"],
    ),
    "no scale views": (lambda views: {"k_scale_cache": None, "v_scale_cache": None}, [FP8, "needs k_scale_cache"]),
    "no V scale view": (lambda views: {"v_scale_cache": None}, [FP8, "v_scale_cache"]),
    "no K scale view": (lambda views: {"k_scale_cache": None}, [FP8, "k_scale_cache"]),
    "a K scale view with a block too few": (
        lambda views: {"k_scale_cache": views["k_scale_cache"][:3]},
        ["k_scale_cache", "(4, 8, 2)", "(3, 8, 2)"],
    ),
    "a V scale view with heads before tokens": (
        lambda views: {"v_scale_cache": views["v_scale_cache"].transpose(1, 2)},
        ["v_scale_cache", "(4, 8, 2)", "(4, 2, 8)"],
    ),
    "scale words as integers": (
        lambda views: {"v_scale_cache": views["v_scale_cache"].view(torch.int32)},
        ["v_scale_cache", "torch.int32"],
    ),
    "scale views that step apart": (
        lambda views: {"v_scale_cache": zeros(B, N, H)},
        ["(288, 18, 9)", "(16, 2, 1)"],
    ),
    "scale views elsewhere": (
        lambda views: {"k_scale_cache": zeros(B, N, H, where="meta"), "v_scale_cache": zeros(B, N, H, where="meta")},
        ["k_scale_cache is on meta", str(DEVICE)],
    ),
    "a cache elsewhere": (
        lambda views: {"kv_cache": zeros(B, 2, N, H, 36, dtype=torch.uint8, where="meta")},
        ["kv_cache is a meta tensor"],
    ),
}

WRONG_QUERIES = {
    "5 query heads": ({"query": zeros(T, 5, D)}, ["5 query heads", "multiple of the 2 KV heads"]),
    "1 query head": ({"query": zeros(T, 1, D)}, ["1 query heads", "multiple of the 2 KV heads"]),
    "two axes": ({"query": zeros(T, 4 * D)}, ["(3, 128)", "(T, Hq, D)"]),
    "integers": ({"query": zeros(T, 4, D).int()}, ["torch.int32"]),
    "head size": ({"query": zeros(T, 4, 64)}, ["64 or 68 bytes", "have 36"]),
    "every second channel": ({"query": zeros(T, 4, 2 * D)[..., ::2]}, ["innermost stride of query is 2"]),
    "one head for all": ({"query": zeros(T, 1, D).expand(T, 4, D)}, ["(3, 4, 32)", "(32, 0, 1)"]),
    "one token for all": ({"query": zeros(1, 4, D).expand(T, 4, D)}, ["(3, 4, 32)", "(0, 32, 1)"]),
    "a sliding window": ({"query": zeros(9 * D).as_strided((T, 4, D), (D, D, 1))}, ["(32, 32, 1)"]),
    "query elsewhere": ({"query": zeros(T, 4, D, where="meta")}, ["query is on meta", str(DEVICE)]),
    "no queries": (
        {"query": zeros(0, 4, D), "query_start_loc": int32(0, 0, 0)},
        ["query has 0 rows", "block_table has 2 rows"],
    ),
    "no sequences": (
        {
            "query": zeros(0, 4, D),
            "block_table": zeros(0, 2, dtype=torch.int32),
            "seq_lens": int32(),
            "query_start_loc": int32(0),
        },
        ["query has 0 rows", "block_table has 0 rows"],
    ),
    "a block behind the last": ({"block_table": int32([2, 4], [3, -1])}, ["sequence 0", "block 4", "0 to 3"]),
    "a negative block": ({"block_table": int32([2, 1], [-1, 0])}, ["sequence 1", "block -1", "0 to 3"]),
    "a table too short": (
        {"block_table": int32([2], [3])},
        ["9 tokens", "needs 2 blocks", "has 1:", "(2, 2) or wider"],
    ),
    "one row too few": (
        {"block_table": int32([2, 1])},
        ["seq_lens has shape (2,)", "(1, 2)", "seq_lens of shape (1,)"],
    ),
    "one length too many": (
        {"seq_lens": int32(9, 8, 1)},
        ["seq_lens has shape (3,)", "(2, 2)", "seq_lens of shape (2,)"],
    ),
    "one start too few": (
        {"query_start_loc": int32(0, 3)},
        ["query_start_loc has shape (2,)", "query_start_loc of shape (3,)"],
    ),
    "queries that no sequence owns": ({"query_start_loc": int32(0, 1, 2)}, ["ends with 2", "end with 3"]),
    "queries behind the last": ({"query_start_loc": int32(0, 1, 4)}, ["ends with 4", "end with 3"]),
    "the first query left out": ({"query_start_loc": int32(1, 2, 3)}, ["starts with 1", "start with 0"]),
    "starts that go back": ({"query_start_loc": int32(0, 4, 3)}, ["from 4 back to 3", "sequence 1"]),
    "more queries than tokens": ({"seq_lens": int32(9, 1)}, ["sequence 1", "2 queries", "only 1 tokens"]),
    "a negative length": ({"seq_lens": int32(-9, 8)}, ["sequence 0", "-9 tokens"]),
    "a table of 64 bits": ({"block_table": int32([2, 1], [3, 0]).long()}, ["block_table", "torch.int64"]),
    "lengths of 64 bits": ({"seq_lens": int32(9, 8).long()}, ["seq_lens", "torch.int64"]),
    "starts as floats": ({"query_start_loc": zeros(3)}, ["query_start_loc", "torch.float32"]),
    "a flat table": ({"block_table": int32(2, 1)}, ["block_table", "(2,)"]),
    "lengths in two axes": ({"seq_lens": int32([9, 8])}, ["seq_lens", "(1, 2)"]),
    "every second column": (
        {"block_table": int32([2, 9, 1, 9], [3, 9, 0, 9])[:, ::2]},
        ["innermost stride of block_table is 2"],
    ),
    "a table by columns": ({"block_table": int32([2, 3], [1, 0]).T}, ["innermost stride of block_table is 2"]),
    "every second length": ({"seq_lens": int32(9, 0, 8, 0)[::2]}, ["innermost stride of seq_lens is 2"]),
    "every second start": (
        {"query_start_loc": int32(0, 9, 1, 9, 3, 9)[::2]},
        ["innermost stride of query_start_loc is 2"],
    ),
    "a table elsewhere": (
        {"block_table": zeros(2, 2, dtype=torch.int32, where="meta")},
        ["block_table is on meta", str(DEVICE)],
    ),
    "lengths elsewhere": (
        {"seq_lens": zeros(2, dtype=torch.int32, where="meta")},
        ["seq_lens is on meta", str(DEVICE)],
    ),
}


def missing(message: str, words: list[str]) -> list[str]:
    return [word for word in words if word not in message]


def test_right_arguments_are_served():
    """The other tests of this file change one of these arguments."""
    cache, arguments = writing()
    write_kv(**arguments)
    assert int((cache.storages[0] != SENTINEL).sum()) > 0
    _, arguments = attending()
    assert tuple(paged_attention(**arguments).shape) == (T, 2 * H, D)


@pytest.mark.parametrize("case", WRONG_WRITES)
def test_a_wrong_write(case):
    changes, numbers = WRONG_WRITES[case]
    cache, arguments = writing()
    assert missing(refusal(write_kv, cache, {**arguments, **changes}), numbers) == []


@pytest.mark.parametrize("case", WRONG_QUERIES)
def test_a_wrong_query(case):
    changes, numbers = WRONG_QUERIES[case]
    cache, arguments = attending()
    assert missing(refusal(paged_attention, cache, {**arguments, **changes}), numbers) == []


@pytest.mark.parametrize("launch, made", [(write_kv, writing), (paged_attention, attending)], ids=["write", "attend"])
@pytest.mark.parametrize("case", WRONG_VIEWS)
def test_a_wrong_view(case, launch, made):
    change, numbers = WRONG_VIEWS[case]
    cache, arguments = made()
    assert missing(refusal(launch, cache, {**arguments, **change(arguments)}), numbers) == []


@pytest.mark.parametrize("launch, made", [(write_kv, writing), (paged_attention, attending)], ids=["write", "attend"])
@pytest.mark.parametrize("given", [("k_scale_cache", "v_scale_cache"), ("k_scale_cache",), ("v_scale_cache",)])
@pytest.mark.parametrize("mode", ["bfloat16", "fp8"])
def test_scale_views_in_a_mode_without_scales(mode, given, launch, made):
    cache, arguments = made(mode)
    message = refusal(launch, cache, arguments | {name: zeros(B, N, H) for name in given})
    assert missing(message, [f"mode {mode} has no scales"]) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_the_wrong_dtype(mode):
    right = torch.bfloat16 if mode == "bfloat16" else torch.uint8
    for dtype in {torch.bfloat16, torch.uint8, torch.int8, torch.float8_e4m3fn} - {right}:
        cache, arguments = writing(mode)
        message = refusal(write_kv, cache, arguments | {"kv_cache": zeros(B, 2, N, H, D, dtype=dtype)})
        assert missing(message, [mode, str(right), str(dtype)]) == []


def test_int4_needs_an_even_head_size():
    cache, arguments = writing("int4_per_token_head")
    odd = {"key": zeros(T, H, 33), "value": zeros(T, H, 33)}
    assert missing(refusal(write_kv, cache, arguments | odd), ["head_size is 33", "multiple of 2"]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_negative_slots_write_nothing(mode, layout):
    cache, views = cache_and_views(mode, layout)
    write_kv(zeros(T, H, D) + 1, zeros(T, H, D) + 2, slot_mapping=slots(-1, -7, -(1 << 40)), **views)
    assert int((cache.storages[0] != SENTINEL).sum()) == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_write_nothing(mode):
    cache, views = cache_and_views(mode)
    write_kv(zeros(0, H, D), zeros(0, H, D), slot_mapping=slots(), **views)
    assert int((cache.storages[0] != SENTINEL).sum()) == 0


def test_queries_of_any_order_without_overlap_are_served():
    """Slices of a fused projection, and heads outside tokens: the strides are not dense, but no elements overlap."""
    _, arguments = attending()
    drawn = torch.randn(T, 2 * H, D, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    fused = zeros(T, 3 * 2 * H, D)[:, 2 * H : 4 * H]
    fused.copy_(drawn)
    turned = zeros(2 * H, T, D).transpose(0, 1).copy_(drawn)
    write_kv(drawn[:, :H], drawn[:, H:], slot_mapping=slots(16, 8, 24), **cache_views(arguments))
    want = paged_attention(**{**arguments, "query": drawn})
    assert fused.stride() != drawn.stride() != turned.stride()
    for query in (fused, turned):
        assert torch.equal(paged_attention(**{**arguments, "query": query}), want)


def cache_views(arguments: dict) -> dict:
    names = ("kv_cache", "kv_cache_dtype", "k_scale_cache", "v_scale_cache")
    return {name: arguments[name] for name in names}


@pytest.mark.parametrize("launch, made", [(write_kv, writing), (paged_attention, attending)], ids=["write", "attend"])
def test_meta_tensors_are_refused_in_one_sentence(launch, made):
    _, arguments = made()
    meta = {name: given.to("meta") if torch.is_tensor(given) else given for name, given in arguments.items()}
    with pytest.raises(ValueError) as caught:
        launch(**meta)
    said = "kv_cache is a meta tensor, which has no memory: allocate kv_cache on the CPU or on a GPU"
    assert str(caught.value) == said


@pytest.mark.parametrize("kind", [int, np.int64, np.int32])
def test_lengths_may_be_numpy_integers(kind):
    _, arguments = attending()
    write_kv(**{**writing()[1], **cache_views(arguments)})
    got = paged_attention(**arguments, max_query_len=kind(2), max_seq_len=kind(9))
    assert torch.equal(got, paged_attention(**arguments))


@pytest.mark.parametrize("length", [0, -1, 1.5, True, "9"])
def test_lengths_that_cannot_be(length):
    cache, arguments = attending()
    message = refusal(paged_attention, cache, {**arguments, "max_query_len": 1, "max_seq_len": length})
    assert message == f"max_seq_len must be an integer of at least 1, not {length!r}"
