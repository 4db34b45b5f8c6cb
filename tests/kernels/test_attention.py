"""Test paged_attention against a float32 reference over the dequantised cache, for every mode and layout."""

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.runtime import device
from kvviz.kernels.write import write_kv
from tests.kernels.reference import attention_reference, read_reference
from tests.kernels.test_write import tokens, views

DEVICE = device()


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def filled(mode, layout, context=21, head_size=64, num_heads=3, tail=True):
    """Make a cache of two layers; the second layer has ``context`` tokens in scattered blocks."""
    spec = CacheSpec(2, 5, 8, num_heads, head_size, mode, tail=tail)
    cache = allocate(spec, layout, DEVICE)
    table = [3, 0, 4]
    slot = torch.tensor([table[i // 8] * 8 + i % 8 for i in range(context)], device=DEVICE)
    key, value = tokens(context, num_heads, head_size, dtype=torch.float32)
    write_kv(key, value, cache.kv_caches[1], slot, mode, **views(cache)[1])
    return cache, table, slot


def attend(cache, query, table, context):
    return paged_attention(
        query, cache.kv_caches[1], int32([table]), int32([context]), int32([0, len(query)]),
        cache.spec.kv_cache_dtype, **views(cache)[1],
    )  # fmt: skip


@pytest.mark.parametrize("num_queries", [1, 21])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_matches_the_dequantised_cache(mode, layout, num_queries):
    cache, table, slot = filled(mode, layout)
    query = torch.randn(num_queries, 9, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    key, value = read_reference(cache.kv_caches[1], slot, mode, 64, *views(cache)[1].values())
    want = attention_reference(query, key, value, 21)
    assert (attend(cache, query, table, 21) - want).abs().max() < 2e-2


@pytest.mark.parametrize(
    "pair", [("NHD", "cross-layer NHD"), ("HND", "cross-layer HND"), ("LBNHC", "BLNHC"), ("LBHNC", "BHLNC")]
)
@pytest.mark.parametrize("mode", MODES)
def test_per_layer_and_cross_layer_are_bit_equal(mode, pair):
    query = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    outputs = [attend(cache, query, table, 21) for cache, table, _ in (filled(mode, layout) for layout in pair)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("head_size", [80, 96, 112, 128])
@pytest.mark.parametrize("mode", MODES)
def test_head_sizes(mode, head_size):
    cache, table, slot = filled(mode, "BLNHC", head_size=head_size)
    query = torch.randn(4, 6, head_size, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    key, value = read_reference(cache.kv_caches[1], slot, mode, head_size, *views(cache)[1].values())
    assert (attend(cache, query, table, 21) - attention_reference(query, key, value, 21)).abs().max() < 2e-2


def test_several_sequences_in_one_launch():
    mode = "fp8_per_token_head"
    spec = CacheSpec(1, 40, 8, 2, 64, mode)
    cache = allocate(spec, "BLNHC", DEVICE)
    lengths, queries, tables, wants, rows = [150, 9, 33], [1, 9, 20], [], [], []
    free = iter(torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist())
    for number, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        table = [next(free) for _ in range(-(-length // 8))]
        tables.append(table + [-1] * (20 - len(table)))
        slot = torch.tensor([table[i // 8] * 8 + i % 8 for i in range(length)], device=DEVICE)
        key, value = tokens(length, 2, 64, seed=number)
        write_kv(key, value, cache.kv_caches[0], slot, mode, **views(cache)[0])
        rows.append(torch.randn(count, 4, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE))
        key, value = read_reference(cache.kv_caches[0], slot, mode, 64, *views(cache)[0].values())
        wants.append(attention_reference(rows[-1], key, value, length))
    got = paged_attention(
        torch.cat(rows),
        cache.kv_caches[0],
        int32(tables),
        int32(lengths),
        int32([0, 1, 10, 30]),
        mode,
        **views(cache)[0],
    )
    assert (got - torch.cat(wants)).abs().max() < 2e-2


def test_known_lengths_save_the_checks_and_change_no_result():
    cache, table, _ = filled("int8_per_token_head", "NHD")
    query, ends = torch.ones(2, 9, 64, device=DEVICE), int32([0, 2])
    arguments = (int32([21]), ends, cache.spec.kv_cache_dtype, *views(cache)[1].values())
    known = {"max_query_len": 2, "max_seq_len": 21}
    got = paged_attention(query, cache.kv_caches[1], int32([table]), *arguments, **known)
    assert torch.equal(got, attend(cache, query, table, 21))
    padded = int32([[*table, 99]])
    assert torch.equal(got, paged_attention(query, cache.kv_caches[1], padded, *arguments, **known))
    with pytest.raises(ValueError, match="block_table has block 99 for sequence 0"):
        paged_attention(query, cache.kv_caches[1], int32([[99, *table]]), *arguments, max_seq_len=21)


def test_a_poisoned_cell_reaches_the_output():
    cache, table, slot = filled("int8_per_token_head", "NHD")
    views(cache)[1]["k_scale_cache"][3, 2, 1] = float("nan")
    query = torch.ones(1, 9, 64, device=DEVICE)
    bad = attend(cache, query, table, 21).isnan().all(-1)[0]
    assert bad.tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_a_prompt_longer_than_one_program_can_hold():
    """Triton allows 2**20 elements in a tensor, so several programs share the queries."""
    spec = CacheSpec(1, 26, 16, 3, 64, "int8_per_token_head")
    cache = allocate(spec, "NHD", DEVICE)
    key, value = tokens(400, 3, 64)
    write_kv(key, value, cache.kv_caches[0], torch.arange(400, device=DEVICE), spec.kv_cache_dtype, **views(cache)[0])
    query = torch.randn(400, 9, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    table, ends = int32([list(range(26))]), int32([0, 400])
    got = paged_attention(query, cache.kv_caches[0], table, ends[1:], ends, spec.kv_cache_dtype, **views(cache)[0])
    key, value = read_reference(
        cache.kv_caches[0], torch.arange(400, device=DEVICE), spec.kv_cache_dtype, 64, *views(cache)[0].values()
    )
    assert (got - attention_reference(query, key, value, 400)).abs().max() < 2e-2


def test_scores_of_any_size_are_masked():
    """Masked scores must be minus infinity: a large negative number is not small enough for these scores."""
    cache = allocate(CacheSpec(1, 1, 4, 1, 16, "bfloat16"), "NHD", DEVICE)
    key, value = torch.full((4, 1, 16), 1e31, device=DEVICE), torch.arange(1.0, 5.0, device=DEVICE)
    value = value[:, None, None].expand(4, 1, 16).contiguous()
    write_kv(key, value, cache.kv_caches[0], torch.arange(4, device=DEVICE), "bfloat16")
    query, ends = -torch.ones(4, 1, 16, device=DEVICE), int32([0, 4])
    got = paged_attention(query, cache.kv_caches[0], int32([[0]]), ends[1:], ends, "bfloat16")
    assert torch.allclose(got[:, 0, 0].cpu(), torch.tensor([1.0, 1.5, 2.0, 2.5]))
