"""Test write_kv against the golden bytes, against the torch reference, and in a buffer filled with a sentinel."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvviz.cache.buffers import allocate
from kvviz.cache.codes import rotation_signs
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.kernels.runtime import device
from kvviz.kernels.write import Program, write_kv
from tests.golden import CACHE_BYTES
from tests.kernels.reference import write_reference

DEVICE = device()
SCALED = tuple(name for name, mode in MODES.items() if mode.is_per_token_head)


def views(cache, carve="strides"):
    """Return the keyword arguments for the scale views of each layer."""
    if not cache.spec.is_per_token_head:
        return [{} for _ in cache.kv_caches]
    return [{"k_scale_cache": k, "v_scale_cache": v} for k, v in cache.carve_scales(carve)]


def tokens(count, heads, head_size, seed=0, dtype=torch.bfloat16, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(count, heads, head_size, generator=generator) * spread for _ in range(2))
    return key.to(dtype).to(DEVICE), value.to(dtype).to(DEVICE)


def slots(*numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("heads, head_size", [(2, 64), (4, 128)])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_golden_bytes(mode, heads, head_size):
    golden = load_file(CACHE_BYTES)
    key, value, slot = (golden[f"in.{name}.{heads}.{head_size}"].to(DEVICE) for name in ("k", "v", "slot"))
    cache = allocate(CacheSpec(1, 4, 16, heads, head_size, mode), "LBNHC", DEVICE)
    write_kv(key, value, cache.kv_caches[0], slot, mode, **views(cache)[0])
    ours = cache.kv_caches[0].permute(0, 2, 1, 3).cpu().unflatten(-1, (2, -1))
    theirs = golden[f"out.{mode}.{heads}.{head_size}"].unflatten(-1, (2, -1))
    data = cache.spec.data_bytes
    changed = (ours[..., :data] != theirs[..., :data]).float().mean().item()
    words, golden_words = (t[..., data:].contiguous().view(torch.float32) for t in (ours, theirs))
    written = golden_words != 0
    assert torch.equal(words != 0, written)
    error = ((words - golden_words).abs() / golden_words.abs())[written].max().item()
    if not MODES[mode].has_zero_point:
        assert changed <= 1e-3 and error <= 1.2e-7
        return
    assert changed <= 4e-3
    shifted = (words.view(torch.int32) >> 4) - (golden_words.view(torch.int32) >> 4)
    zero_points = (words.view(torch.int32) & 15) - (golden_words.view(torch.int32) & 15)
    assert shifted.abs().max() <= 1 and (shifted != 0).float().mean() <= 0.07
    assert (zero_points != 0).sum() <= 1 and zero_points.abs().max() <= 1


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_layout_holds_the_reference_bytes(mode, layout, tail):
    """Views carved from the shape are tested with a tail only. Without it, the programs of a launch race on a GPU."""
    spec = CacheSpec(3, 4, 8, 3, 64, mode, tail=tail)
    carve = "shape" if LAYOUTS[layout].packing == "split" and tail else "strides"
    slot, program = slots(5, 12, 13, -1, 31, 0, 22), Program(1, 1) if tail else Program()
    got, want = allocate(spec, layout, DEVICE, fill=0xA5), allocate(spec, layout, "cpu", fill=0xA5)
    for layer, kv in enumerate(got.kv_caches):
        key, value = tokens(7, 3, 64, seed=layer)
        write_kv(key, value, kv, slot, mode, **views(got, carve)[layer], program=program)
        scales = views(want, carve)[layer].values()
        write_reference(key.cpu(), value.cpu(), want.kv_caches[layer], slot.cpu(), mode, *scales)
    for ours, theirs in zip(got.storages, want.storages, strict=True):
        assert int((ours.cpu() != theirs).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_head_sizes_and_input_dtypes(mode, head_size, dtype):
    spec = CacheSpec(1, 3, 16, 2, head_size, mode)
    key, value = tokens(20, 2, head_size, seed=head_size, dtype=dtype)
    slot = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:20].to(DEVICE)
    got, want = allocate(spec, "BLNHC", DEVICE), allocate(spec, "BLNHC")
    write_kv(key, value, got.kv_caches[0], slot, mode, **views(got)[0])
    write_reference(key.cpu(), value.cpu(), want.kv_caches[0], slot.cpu(), mode, *views(want)[0].values())
    assert int((got.storages[0].cpu() != want.storages[0]).sum()) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "program",
    [
        Program(1, 1), Program(1, 3), Program(3, 2), Program(4, 1), Program(64, 8), Program(1, 1, wide=128, warps=4),
        Program(wide=16, warps=2), Program(wide=8, aligned=False), Program(2, instructions=False),
    ],
)  # fmt: skip
def test_the_shape_of_a_launch_does_not_change_the_bytes(program, mode):
    spec = CacheSpec(1, 2, 8, 3, 64, mode)
    key, value = tokens(9, 3, 64)
    slot = slots(*range(4, 13))
    caches = [allocate(spec, "HND", DEVICE) for _ in range(2)]
    for cache, shape in zip(caches, (Program(), program), strict=True):
        write_kv(key, value, cache.kv_caches[0], slot, mode, **views(cache)[0], program=shape)
    assert torch.equal(caches[0].storages[0], caches[1].storages[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["cross-layer NHD", "BHLNC", "LBHNC"])
def test_only_the_cells_of_the_slots_change(mode, layout):
    """Write into a buffer of 0x00 and one of 0xFF: all bytes of the slots' cells change, and no other bytes."""
    spec = CacheSpec(2, 3, 4, 2, 32, mode)
    slot = slots(1, 6, 11)
    key, value = tokens(3, 2, 32)
    reached = []
    for fill in (0x00, 0xFF):
        cache = allocate(spec, layout, DEVICE, fill=fill, one_storage=True)
        write_kv(key, value, cache.kv_caches[1], slot, mode, **views(cache)[1])
        reached.append(cache.storages[0].cpu() != fill)
    want = torch.zeros(spec.buffer_bytes, dtype=torch.bool)
    for view in cache.owners():
        if view.name.startswith("layer 1 "):
            for number in slot.tolist():
                starts = view.starts[number // 4, number % 4]
                want[torch.from_numpy(view.bytes_of(starts).ravel())] = True
    assert torch.equal(reached[0] | reached[1], want)
    assert int(want.sum()) == 3 * 2 * 2 * spec.cell_bytes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", MODES)
def test_a_cell_that_is_not_finite_is_poisoned_alone(mode, bad):
    spec = CacheSpec(1, 1, 4, 2, 64, mode)
    key, value = tokens(3, 2, 64)
    key[1, 0, 5] = bad
    got, want = allocate(spec, "NHD", DEVICE), allocate(spec, "NHD")
    write_kv(key, value, got.kv_caches[0], slots(0, 1, 2), mode, **views(got)[0])
    write_reference(key.cpu(), value.cpu(), want.kv_caches[0], slots(0, 1, 2).cpu(), mode, *views(want)[0].values())
    assert torch.equal(got.storages[0].cpu(), want.storages[0])
    if spec.is_per_token_head:
        k_scale = views(got)[0]["k_scale_cache"]
        assert k_scale[0, 1, 0].isnan() and int(k_scale.isnan().sum()) == 1


def test_a_rotation_that_overflows_in_float16_poisons_its_cell_alone():
    """The largest rotated number is 64 * 1,100 in the first cell, and 64 * 1,000 in the second cell."""
    key = torch.stack([rotation_signs(64) * size for size in (1100, 1000)]).half().view(2, 1, 64).to(DEVICE)
    cache = allocate(CacheSpec(1, 1, 2, 1, 64, "int4_per_token_head"), "NHD", DEVICE)
    write_kv(key, key, cache.kv_caches[0], slots(0, 1), "int4_per_token_head", **views(cache)[0])
    assert views(cache)[0]["k_scale_cache"][0, :, 0].isnan().tolist() == [True, False]


def test_extreme_values_agree_with_the_reference():
    edges = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, 0.5, -0.5, 1.5, 2.5, 126.5, 127.0, 448.0, 3e38, 1e-7, 1e-6]
    )
    key = torch.stack([edges * step for step in (1.0, 1e-4, 1e-8, 1.0)]).reshape(4, 1, 16).to(DEVICE)
    for mode in MODES:
        spec = CacheSpec(1, 1, 4, 1, 16, mode)
        got, want = allocate(spec, "NHD", DEVICE), allocate(spec, "NHD")
        write_kv(key, -key, got.kv_caches[0], slots(0, 1, 2, 3), mode, **views(got)[0])
        write_reference(key.cpu(), -key.cpu(), want.kv_caches[0], torch.arange(4), mode, *views(want)[0].values())
        assert torch.equal(got.storages[0].cpu(), want.storages[0]), mode


def test_more_tokens_than_one_program_can_hold():
    spec = CacheSpec(1, 188, 16, 3, 64, "int8_per_token_head")
    key, value = tokens(3000, 3, 64)
    caches = [allocate(spec, "NHD", DEVICE) for _ in range(2)]
    every = torch.arange(3000, device=DEVICE)
    write_kv(key, value, caches[0].kv_caches[0], every, spec.kv_cache_dtype, **views(caches[0])[0])
    for part in every.split(500):
        write_kv(key[part], value[part], caches[1].kv_caches[0], part, spec.kv_cache_dtype, **views(caches[1])[0])
    assert torch.equal(caches[0].storages[0], caches[1].storages[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tokens": -1}, "program.tokens is -1, but it must be an integer of at least 1"),
        ({"heads": 0}, "program.heads is 0, but it must be an integer of at least 1"),
        ({"tokens": 1.5}, "program.tokens is 1.5, but it must be an integer of at least 1"),
        ({"wide": 4}, "program.wide is 4, but it must be a power of two, and at least 8"),
        ({"wide": 24}, "program.wide is 24, but it must be a power of two, and at least 8"),
        ({"warps": 3}, "program.warps is 3, but it must be a power of two, and at least 1"),
    ],
)
def test_programs_that_cannot_be(sizes, message):
    cache = allocate(CacheSpec(1, 1, 4, 2, 32, "bfloat16"), "NHD", DEVICE)
    key, value = tokens(2, 2, 32)
    with pytest.raises(ValueError, match=message):
        write_kv(key, value, cache.kv_caches[0], slots(0, 1), "bfloat16", program=Program(**sizes))


def test_sizes_of_a_program_may_be_numpy_integers():
    spec = CacheSpec(1, 1, 8, 2, 32, "int8_per_token_head")
    key, value = tokens(5, 2, 32)
    caches = [allocate(spec, "NHD", DEVICE) for _ in range(2)]
    for cache, program in zip(caches, (Program(), Program(*np.array([2, 1, 8, 1]))), strict=True):
        write_kv(key, value, cache.kv_caches[0], slots(3, -1, 7, 0, 5), spec.kv_cache_dtype, **views(cache)[0],
                 program=program)  # fmt: skip
    assert torch.equal(caches[0].storages[0], caches[1].storages[0])


def test_slots_that_were_checked_give_the_same_bytes():
    spec = CacheSpec(1, 1, 8, 2, 32, "int8_per_token_head")
    key, value = tokens(5, 2, 32)
    caches = [allocate(spec, "NHD", DEVICE) for _ in range(2)]
    for cache, checked in zip(caches, (False, True), strict=True):
        arguments = (key, value, cache.kv_caches[0], slots(3, -1, 7, 0, 5), spec.kv_cache_dtype)
        write_kv(*arguments, **views(cache)[0], slots_checked=checked)
    assert torch.equal(caches[0].storages[0], caches[1].storages[0])


def test_subnormal_bfloat16_is_kept():
    bits = torch.tensor([[0x0001, 0x0016, -0x7FEA, 0x007F] * 4], dtype=torch.int16).view(1, 1, 16)
    key = bits.view(torch.bfloat16).to(DEVICE)
    cache = allocate(CacheSpec(1, 1, 1, 1, 16, "bfloat16"), "NHD", DEVICE)
    write_kv(key, key, cache.kv_caches[0], slots(0), "bfloat16")
    assert torch.equal(cache.kv_caches[0][0, 0, 0].view(torch.int16).cpu(), bits[0])


def test_several_threads_write_the_right_bytes():
    """The interpreter keeps the position of a program in global variables, so launches must wait for each other."""
    spec = CacheSpec(1, 2, 8, 2, 32, "int8_per_token_head")
    key, value = tokens(12, 2, 32)
    slot = slots(*range(12))

    def filled(_):
        cache = allocate(spec, "NHD", DEVICE)
        write_kv(key, value, cache.kv_caches[0], slot, spec.kv_cache_dtype, **views(cache)[0], program=Program(1))
        return cache.storages[0].cpu()

    want = filled(0)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(got, want) for got in pool.map(filled, range(6)))


@pytest.mark.parametrize("slot", [-1, -(1 << 32), torch.iinfo(torch.int64).min])
def test_padding_of_any_negative_slot_writes_nothing(slot):
    cache = allocate(CacheSpec(1, 1, 4, 2, 32, "int8_per_token_head"), "NHD", DEVICE)
    key, value = tokens(2, 2, 32)
    write_kv(key, value, cache.kv_caches[0], slots(slot, slot), "int8_per_token_head", **views(cache)[0])
    assert not cache.storages[0].any()


@pytest.mark.parametrize("program", [Program(), Program(1, wide=256, warps=4, aligned=False)])
@pytest.mark.parametrize(("head_size", "shift"), [(72, 0), (128, 0), (128, 1), (128, 2)])
@pytest.mark.parametrize("mode", SCALED)
def test_a_poisoned_cell_leaves_its_neighbours_alone(mode, head_size, shift, program):
    """Test several ways to spread rows over threads: at odd addresses, one register holds elements of several rows."""
    key, value = torch.randn(2, 3, 8, head_size + shift, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    key, value = (x[..., shift:].to(DEVICE) if not shift else x.to(DEVICE)[..., shift:] for x in (key, value))
    key[0, 0, 0] = key[1, 3, 5] = value[2, 7, head_size - 1] = float("nan")
    caches = [allocate(CacheSpec(1, 1, 4, 8, head_size, mode), "NHD", place) for place in (DEVICE, "cpu")]
    write_kv(key, value, caches[0].kv_caches[0], slots(2, 0, 1), mode, **views(caches[0])[0], program=program)
    slot = torch.tensor([2, 0, 1])
    write_reference(key.cpu(), value.cpu(), caches[1].kv_caches[0], slot, mode, *views(caches[1])[0].values())
    assert int((caches[0].storages[0].cpu() != caches[1].storages[0]).sum()) == 0
