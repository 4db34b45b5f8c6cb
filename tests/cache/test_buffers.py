"""Allocations: layers share no byte, all views together cover the content, and too large buffers are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvviz.cache import buffers
from kvviz.cache.buffers import allocate, check_fits
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.scale_views import kv_halves
from kvviz.cache.spec import CacheSpec

GIB = 1 << 30
PLACEMENTS = [
    (name, shared) for name, layout in LAYOUTS.items() for shared in ([None] if layout.cross_layer else [0, 1])
]
FREE = 10_000


def small(mode: str, tail: bool = True, heads: int = 3, padding: int | None = None) -> CacheSpec:
    spec = CacheSpec(3, 4, 2, heads, 16, mode, tail)
    padded = None if padding is None else spec.content_page_size_bytes + padding
    return CacheSpec(3, 4, 2, heads, 16, mode, tail, padded)


def counts(cache) -> torch.Tensor:
    return torch.bincount(torch.cat(cache.storages).long(), minlength=256)


@pytest.fixture
def little_memory(monkeypatch):
    """Let 10,000 bytes be free, and fail the test if anything is allocated."""

    def refuse(*sizes, **options):
        raise AssertionError(f"allocated {sizes}")

    monkeypatch.setattr(buffers.psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    monkeypatch.setattr(buffers.torch, "full", refuse)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layout", "shared"), PLACEMENTS)
def test_layers_cover_bytes_of_their_own_and_together_all(layout, shared, mode, tail):
    """Fill each layer's view with its number: the counts are right only if no two views share a byte."""
    spec = small(mode, tail)
    cache = allocate(spec, layout, one_storage=None if shared is None else bool(shared))
    assert len(cache.storages) == (3 if shared == 0 else 1)
    for layer, kv in enumerate(cache.kv_caches):
        kv.view(torch.uint8).fill_(layer + 1)
    content = spec.num_blocks * spec.content_page_size_bytes
    assert counts(cache)[:4].tolist() == [0, content, content, content]


@pytest.mark.parametrize("layout", ["NHD", "HND", "cross-layer NHD", "LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padding_belongs_to_nobody(layout):
    spec = small("int8_per_token_head", padding=20)
    cache = allocate(spec, layout)
    for layer, kv in enumerate(cache.kv_caches):
        kv.fill_(layer + 1)
    content = spec.num_blocks * spec.content_page_size_bytes
    assert counts(cache)[:4].tolist() == [3 * 4 * 20, content, content, content]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_share_the_content_among_them(layout, mode):
    spec = small(mode)
    cache = allocate(spec, layout, "meta", one_storage=True)
    taken = [byte for view in cache.owners() for byte in view.all_bytes.tolist()]
    assert sorted(taken) == list(range(spec.buffer_bytes))
    assert len(cache.owners()) == 3 * (4 if spec.is_per_token_head else 2)


def test_without_a_tail_the_scales_are_the_last_data_bytes():
    spec = small("fp8_per_token_head", tail=False)
    data, scales = (
        {byte for view in allocate(spec, "NHD", "meta", one_storage=True).owners() if view.role == role
         for byte in view.all_bytes.tolist()}
        for role in ("data", "scale")
    )  # fmt: skip
    assert data == set(range(spec.buffer_bytes))
    assert scales == {byte for byte in data if byte % 16 >= 12}


def test_owners_are_named_and_lie_in_the_storages_named():
    cache = allocate(small("int4_per_token_head"), "NHD")
    names = [view.name for view in cache.owners()]
    assert names[:3] == ["layer 0 K data", "layer 0 V data", "layer 1 K data"]
    assert names[-2:] == ["layer 2 K scale", "layer 2 V scale"]
    assert list(cache.storages_by_name()) == ["layer 0", "layer 1", "layer 2"]
    assert {view.storage.name for view in cache.owners() if "layer 1" in view.name} == {"layer 1"}
    assert list(allocate(small("fp8"), "BLHNC").storages_by_name()) == ["cache"]


@pytest.mark.parametrize(
    ("mode", "dtype"), [(mode, torch.uint8) for mode in list(MODES)[1:]] + [("bfloat16", torch.bfloat16)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shape_and_dtype_of_the_views(layout, mode, dtype):
    spec = small(mode)
    cell = spec.cell_bytes // spec.element_bytes
    packed = LAYOUTS[layout].packing == "packed"
    for kv in allocate(spec, layout).kv_caches:
        assert kv.dtype == dtype
        assert tuple(kv.shape) == ((4, 3, 2, 2 * cell) if packed else (4, 2, 2, 3, cell))
        assert [tuple(half.shape) for half in kv_halves(kv)] == [(4, 2, 3, cell)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_are_the_k_and_the_v_cells(layout):
    """Write K cells, then V cells: each fills one half of the buffer, and V follows K at the layout's K stride."""
    spec = small("fp8_per_token_head")
    cache = allocate(spec, layout, one_storage=True)
    strides = LAYOUTS[layout].strides_bytes(spec)
    for kv in cache.kv_caches:
        k_cells, v_cells = kv_halves(kv)
        assert v_cells.storage_offset() - k_cells.storage_offset() == strides["K"]
        assert k_cells.stride() == v_cells.stride() == tuple(strides[axis] for axis in "BNHC")
        k_cells.fill_(1)
        v_cells.fill_(2)
    assert counts(cache)[:3].tolist() == [0, spec.buffer_bytes // 2, spec.buffer_bytes // 2]


@pytest.mark.parametrize("fill", [0, 1, 0xA5, 255])
@pytest.mark.parametrize(("layout", "one_storage"), [("NHD", False), ("NHD", True), ("BHLNC", None)])
def test_every_byte_is_filled(layout, one_storage, fill):
    spec = small("fp8_per_token_head", heads=1, padding=8)
    cache = allocate(spec, layout, one_storage=one_storage, fill=fill)
    assert int(counts(cache)[fill]) == spec.buffer_bytes
    assert all(storage.dtype == torch.uint8 and storage.dim() == 1 for storage in cache.storages)


@pytest.mark.parametrize("fill", [1.5, -1, 256, True, "0", None], ids=repr)
def test_fill_is_a_byte(fill):
    with pytest.raises(ValueError, match="fill is .*, but it must be an integer from 0 to 255"):
        allocate(small("fp8"), "NHD", fill=fill)


def test_fill_may_be_a_numpy_integer():
    assert int(counts(allocate(small("fp8"), "NHD", fill=np.uint8(7)))[7]) == small("fp8").buffer_bytes


def test_a_layout_may_be_given_itself():
    assert (
        allocate(small("fp8"), LAYOUTS["HND"]).kv_caches[0].stride()
        == allocate(small("fp8"), "HND").kv_caches[0].stride()
    )


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.cross_layer])
def test_a_cross_layer_buffer_is_one(layout):
    with pytest.raises(ValueError, match=f"{layout} .*one_storage must not be False"):
        allocate(small("fp8"), layout, one_storage=False)
    assert len(allocate(small("fp8"), layout, one_storage=True).storages) == 1


@pytest.mark.parametrize("layout", ["NHD", "cross-layer NHD"])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(little_memory, layout):
    spec = CacheSpec(2, 100, 16, 2, 64)
    with pytest.raises(MemoryError) as caught:
        allocate(spec, layout)
    assert f"needs {spec.buffer_bytes} bytes" in str(caught.value) and f"{FREE} bytes free" in str(caught.value)
    assert "meta" in str(caught.value)


def test_an_absurd_number_of_blocks_is_refused():
    spec = CacheSpec(24, 10**15, 16, 2, 64)
    with pytest.raises(MemoryError, match=str(spec.buffer_bytes)):
        allocate(spec, "NHD")


@pytest.mark.parametrize(("nbytes", "fits"), [(FREE, True), (FREE + 1, False)])
def test_the_last_byte_may_be_taken(little_memory, monkeypatch, nbytes, fits):
    monkeypatch.setattr(buffers.torch.cuda, "mem_get_info", lambda device: (FREE, 10 * FREE))
    monkeypatch.setattr(buffers.torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(buffers.torch.cuda, name, lambda device: 0)
    for device in ("cpu", "cuda:0"):
        if fits:
            check_fits(nbytes, device)
        else:
            with pytest.raises(MemoryError, match=f"{nbytes} bytes, but {device} has {FREE} "):
                check_fits(nbytes, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_holds_more_than_any_machine(layout, monkeypatch):
    monkeypatch.setattr(buffers.psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    spec = CacheSpec(24, 500_000, 16, 2, 64)
    cache = allocate(spec, layout, "meta", one_storage=True)
    assert cache.storages[0].numel() == spec.buffer_bytes > 40 * GIB
    last = cache.kv_caches[-1]
    reach = sum((size - 1) * step for size, step in zip(last.shape, last.stride(), strict=True))
    assert last.storage_offset() + reach == spec.buffer_bytes - 1


@pytest.mark.parametrize("mode", [mode for mode in MODES if "per_token_head" not in mode])
def test_modes_without_scales_have_none_to_carve(mode):
    with pytest.raises(ValueError, match=f"{mode} has no scales"):
        allocate(small(mode), "NHD").carve_scales()


def test_an_unknown_carving_gets_a_suggestion():
    with pytest.raises(ValueError, match="carve 'stride' does not exist.*did you mean 'strides'"):
        allocate(small("fp8_per_token_head"), "NHD").carve_scales("stride")


def test_writers_have_the_names_of_their_owners():
    cache = allocate(small("fp8_per_token_head"), "cross-layer NHD")
    writers = cache.writers(cache.carve_scales("shape"))
    owners = [view for view in cache.owners() if view.role == "scale"]
    assert [view.name for view in writers] == [view.name for view in owners]
    assert [view.axes for view in writers] == [("block", "token", "head")] * 6
    assert {view.itemsize for view in writers} == {4}
