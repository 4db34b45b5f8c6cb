"""Test tiled_attention directly, in the interpreter and on a GPU: against the reference, with one and more splits."""

import itertools

import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels.attention_tiles import serves, tiled_attention
from kvviz.kernels.checks import cache_halves
from kvviz.kernels.runtime import device
from kvviz.kernels.write import write_kv
from tests.kernels.reference import attention_reference, read_reference
from tests.kernels.test_attention import int32
from tests.kernels.test_write import tokens, views

DEVICE = device()
TOLERANCE = {"bfloat16": 5e-5}
"""Allowed error, relative to the largest output. Other modes: 5e-6, because they keep 22 bits of a query and not 16."""


def attended(cache, query, tables, lengths, counts=(1, 1), num_splits=None):
    k_cells, v_cells = cache_halves(cache.kv_caches[-1], mode := cache.spec.kv_cache_dtype)
    assert serves(query, k_cells, v_cells, mode)
    scales = tuple(views(cache)[-1].values()) or (None, None)
    starts = int32([0, *itertools.accumulate(counts[: len(lengths)])])
    return tiled_attention(
        query, k_cells, v_cells, int32(tables), int32(lengths), starts, mode, *scales,
        softmax_scale=query.shape[-1] ** -0.5, max_query_len=max(counts), max_seq_len=max(lengths),
        num_splits=num_splits,
    )  # fmt: skip


def two_sequences(mode, layout, lengths=(70, 9), head_size=64, num_heads=2, group=3, block_size=8, counts=(1, 1)):
    """Return a cache with two sequences in scattered blocks, queries for the last tokens, and the right result."""
    count = sum(-(-length // block_size) for length in lengths)
    cache = allocate(CacheSpec(2, count, block_size, num_heads, head_size, mode), layout, DEVICE)
    free, tables, wants = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist(), [], []
    query = torch.randn(sum(counts[: len(lengths)]), num_heads * group, head_size, generator=seeded(3)).to(DEVICE)
    for number, (length, own) in enumerate(zip(lengths, query.split(counts[: len(lengths)]), strict=True)):
        table = [free.pop() for _ in range(-(-length // block_size))]
        slot = torch.tensor(
            [table[i // block_size] * block_size + i % block_size for i in range(length)], device=DEVICE
        )
        key, value = tokens(length, num_heads, head_size, seed=number)
        write_kv(key, value, cache.kv_caches[1], slot, mode, **views(cache)[1])
        key, value = read_reference(cache.kv_caches[1], slot, mode, head_size, *views(cache)[1].values())
        wants.append(attention_reference(own, key, value, length))
        tables.append(table)
    wide = max(map(len, tables))
    return cache, query, [table + [-1] * (wide - len(table)) for table in tables], lengths, counts, torch.cat(wants)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("layout", ["NHD", "cross-layer HND", "LBHNC", "BHLNC"])
@pytest.mark.parametrize("mode", MODES)
def test_matches_the_reference_in_layouts(mode, layout):
    *given, want = two_sequences(mode, layout)
    assert error(attended(*given), want) < TOLERANCE.get(mode, 5e-6)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 70])
@pytest.mark.parametrize("mode", MODES)
def test_splits_change_the_sum_only_by_rounding(mode, num_splits):
    """The second sequence is shorter than the first split, so programs of its other splits have no tokens."""
    *given, want = two_sequences(mode, "NHD")
    assert error(attended(*given, num_splits=num_splits), want) < TOLERANCE.get(mode, 5e-6)


@pytest.mark.parametrize(("head_size", "group", "block_size"), [(64, 1, 16), (96, 2, 4), (128, 9, 32), (256, 4, 48)])
@pytest.mark.parametrize("mode", MODES)
def test_head_sizes_groups_and_block_sizes(mode, head_size, group, block_size):
    *given, want = two_sequences(mode, "BLNHC", (50, 33), head_size, 2, group, block_size)
    assert error(attended(*given, num_splits=2), want) < TOLERANCE.get(mode, 5e-6)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.scale_dtype == "float32"])
def test_scales_of_any_size(mode):
    """One context has V scales from 1e-20 to 1e20, the large ones last."""
    *given, _ = two_sequences(mode, "NHD", (70,))
    cache, query, (table,), *_ = given
    v_scale = views(cache)[1]["v_scale_cache"]
    slot = torch.tensor([table[i // 8] * 8 + i % 8 for i in range(70)], device=DEVICE)
    words = v_scale[slot // 8, slot % 8]
    larger = words * torch.logspace(-20, 20, 70, device=DEVICE)[:, None]
    if MODES[mode].has_zero_point:
        larger = (larger.view(torch.int32) & -16 | words.view(torch.int32) & 15).view(torch.float32)
    v_scale[slot // 8, slot % 8] = larger
    key, value = read_reference(cache.kv_caches[1], slot, mode, 64, *views(cache)[1].values())
    assert error(attended(*given, num_splits=2), attention_reference(query, key, value, 70)) < 5e-6


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("counts", [(70, 9), (5, 1), (1, 9), (33, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_whole_prompts_and_parts_of_prompts(mode, counts, num_splits):
    """The queries are the whole prompt, or its last tokens; a query sees no token after its own position."""
    *given, want = two_sequences(mode, "BLNHC", counts=counts)
    assert error(attended(*given, num_splits=num_splits), want) < TOLERANCE.get(mode, 5e-6)


@pytest.mark.parametrize("group", [1, 2, 8, 32])
def test_prefill_of_any_group(group):
    *given, want = two_sequences("fp8_per_token_head", "NHD", (40, 33), group=group, counts=(40, 7))
    assert error(attended(*given), want) < 5e-6


@pytest.mark.parametrize("name", ["k_scale_cache", "v_scale_cache"])
def test_a_poisoned_cell_reaches_only_the_query_heads_of_its_kv_head(name):
    cache, query, tables, lengths, counts, _ = two_sequences("int8_per_token_head", "NHD")
    views(cache)[1][name][tables[0][3], 2, 1] = float("nan")
    bad = attended(cache, query, tables, lengths, counts, 2).isnan()
    assert bad[0, 3:].all() and not bad[0, :3].any() and not bad[1].any()


def test_bytes_after_the_end_of_a_sequence_do_not_change_its_result():
    """The unused slots of a last block may hold NaN codes of an earlier request."""
    *given, want = two_sequences("fp8_per_token_head", "NHD", (70, 9))
    cache, _, tables, *_ = given
    for table, used in ((tables[0][8], 6), (tables[1][1], 1)):
        cache.kv_caches[1][table, :, used:] = 0x7F
    assert torch.isfinite(attended(*given)).all() and error(attended(*given), want) < 5e-6


@pytest.mark.parametrize("head_size", [16, 32])
@pytest.mark.parametrize("mode", MODES)
def test_small_heads_are_served(mode, head_size):
    """A cell has fewer words than a tensor core needs, so the kernel adds columns of zeros."""
    *given, want = two_sequences(mode, "NHD", head_size=head_size)
    assert error(attended(*given), want) < TOLERANCE.get(mode, 5e-6)


def test_odd_addresses_are_not_served():
    query = torch.zeros(1, 4, 32, device=DEVICE)
    odd = torch.zeros(4000, dtype=torch.uint8, device=DEVICE)[1:].as_strided((2, 8, 2, 36), (576, 72, 36, 1))
    assert not serves(query, odd, odd, "fp8_per_token_head")


@pytest.mark.parametrize("num_splits", [1, 3])
def test_query_rows_without_a_sequence_become_zero(num_splits):
    """A batch can be padded: here the query has two rows more than query_start_loc names."""
    cache, query, tables, lengths, counts, want = two_sequences("int8_per_token_head", "NHD")
    padded = torch.cat((query, torch.ones_like(query)))
    got = attended(cache, padded, tables, lengths, counts, num_splits)
    assert error(got[:2], want) < 5e-6 and not got[2:].any()


def test_a_long_context_keeps_the_accuracy():
    """The sum over 2,000 tokens has the same error as a short sum, because the codes are centred around 0."""
    *given, want = two_sequences("int4_per_token_head", "NHD", (2000, 9))
    assert error(attended(*given), want) < 2e-5
