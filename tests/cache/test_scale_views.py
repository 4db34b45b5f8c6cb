"""The two ways to carve scale views: when they agree, what they refuse, and whose bytes they write."""

import pytest
import torch

from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES, Mode
from kvviz.cache.scale_views import carve_from_shape, carve_from_strides, kv_halves
from kvviz.cache.spec import CacheSpec

SPLIT = [name for name, layout in LAYOUTS.items() if layout.packing == "split"]
SCALED = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")


def starts(tensor: torch.Tensor) -> list[int]:
    return View.of(tensor, "view", Storage("cache", tensor.untyped_storage().nbytes())).starts.ravel().tolist()


def is_dense_from_zero(kv: torch.Tensor) -> bool:
    """Return True if the elements in the order (B, 2, N, H, C) are the bytes 0, 1, 2, ... of the storage."""
    return starts(kv) == list(range(kv.numel()))


@pytest.mark.parametrize("padding", [None, 0, 8])
@pytest.mark.parametrize("one_storage", [False, True])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 3, 2, 1), (2, 1, 2, 2), (2, 3, 1, 2), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("layout", SPLIT)
def test_both_carvings_agree_exactly_on_a_dense_buffer_at_zero(layout, counts, one_storage, padding):
    spec = CacheSpec(*counts, 8, "int8_per_token_head")
    if padding is not None:
        counts = (*counts[:3], 1) if layout == "cross-layer HND" else counts  # heads outside a page forbid padding
        spec = CacheSpec(*counts, 8, "int8_per_token_head")
        spec = CacheSpec(*counts, 8, "int8_per_token_head", page_size_padded=spec.content_page_size_bytes + padding)
    cache = allocate(spec, layout, one_storage=one_storage or LAYOUTS[layout].cross_layer)
    for kv in cache.kv_caches:
        pairs = zip(carve_from_shape(kv), carve_from_strides(kv), strict=True)
        assert all(starts(left) == starts(right) for left, right in pairs) == is_dense_from_zero(kv)


@pytest.mark.parametrize(
    ("layout", "one_storage", "agreeing"),
    [("NHD", False, [0, 1, 2]), ("NHD", True, [0]), ("HND", False, []), ("cross-layer NHD", True, [])],
)
def test_which_layers_agree(layout, one_storage, agreeing):
    cache = allocate(CacheSpec(3, 2, 4, 2, 8), layout, one_storage=one_storage)
    pairs = [(carve_from_shape(kv)[0], carve_from_strides(kv)[0]) for kv in cache.kv_caches]
    assert [n for n, (left, right) in enumerate(pairs) if starts(left) == starts(right)] == agreeing


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_carve_the_last_four_bytes_of_each_cell(layout, mode, tail):
    cache = allocate(CacheSpec(2, 3, 2, 3, 32, mode, tail), layout, "meta")
    for kv in cache.kv_caches:
        for half, scale in zip(kv_halves(kv), carve_from_strides(kv), strict=True):
            assert scale.dtype == torch.float32 and scale.shape == half.shape[:3]
            assert starts(scale) == starts(half[..., -4])


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("layout", SPLIT)
def test_shape_carves_the_same_addresses_for_every_layer(layout, mode):
    spec = CacheSpec(3, 2, 2, 3, 32, mode)
    cache = allocate(spec, layout, one_storage=True)
    p, plane = spec.cell_bytes, 2 * 3 * spec.cell_bytes
    cells = [(b, n, h) for b in range(2) for n in range(2) for h in range(3)]
    for kv in cache.kv_caches:
        for half, scale in enumerate(carve_from_shape(kv)):
            want = [2 * b * plane + half * plane + (n * 3 + h) * p + p - 4 for b, n, h in cells]
            assert starts(scale) == want


@pytest.mark.parametrize("carve", [carve_from_shape, carve_from_strides])
def test_views_share_the_memory_of_the_cache(carve):
    cache = allocate(CacheSpec(2, 2, 2, 2, 8), "cross-layer NHD")
    k_scale, v_scale = carve(cache.kv_caches[1])
    for scale in (k_scale, v_scale):
        assert scale.untyped_storage().data_ptr() == cache.storages[0].untyped_storage().data_ptr()
    k_scale[1, 0, 1] = 1.0
    byte = starts(k_scale)[5]
    assert cache.storages[0][byte : byte + 4].tolist() == [0x00, 0x00, 0x80, 0x3F]
    assert int(cache.storages[0].count_nonzero()) == 2


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("carve", ["shape", "strides"])
def test_ensure_scale_caches_fills_with_one_and_nothing_else(layout, carve):
    cache = allocate(CacheSpec(3, 2, 2, 2, 8), layout, one_storage=True)
    pairs = cache.ensure_scale_caches(carve)
    assert len(pairs) == 3
    places = {byte for pair in pairs for scale in pair for byte in starts(scale)}
    assert all(bool((scale == 1.0).all()) for pair in pairs for scale in pair)
    words = cache.storages[0].view(torch.float32)
    assert {4 * n for n in words.nonzero().ravel().tolist()} == places
    assert {words[byte // 4].item() for byte in places} == {1.0}
    assert len(places) == (48 if carve == "strides" else 16)


def test_carving_alone_writes_nothing():
    cache = allocate(CacheSpec(2, 2, 2, 2, 8), "NHD", fill=0xA5)
    cache.carve_scales("shape")
    cache.carve_scales("strides")
    assert {int(byte) for storage in cache.storages for byte in storage.unique()} == {0xA5}


def storage(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("carve", "kv", "said"),
    [
        (
            carve_from_shape,
            storage(97)[:96].view(1, 2, 2, 2, 12),
            "the storage is 97 bytes, not a multiple of 4, so float32",
        ),
        (carve_from_strides, storage(98)[:96].view(1, 2, 2, 2, 12), "the storage is 98 bytes, not a multiple of 4"),
        (carve_from_shape, storage(96).view(2, 2, 2, 12), r"\(2, 2, 2, 12\).* only the split packing"),
        (carve_from_shape, storage(80).view(1, 2, 2, 2, 10), "a cell is 10 bytes, not a multiple of 4"),
        (
            carve_from_strides,
            storage(80).view(1, 2, 2, 2, 10),
            "the first scale is 6 bytes, not a multiple of 4",
        ),
        (carve_from_strides, storage(100)[2:98].view(1, 2, 2, 2, 12), "the first scale is 10 bytes"),
        (carve_from_strides, storage(112).view(1, 2, 2, 2, 14)[..., 2:], "the first scale is 10 bytes"),
        (carve_from_strides, storage(112).as_strided((1, 2, 2, 2, 12), (112, 56, 28, 14, 1)), "a stride is 14 bytes"),
        (carve_from_strides, storage(112).as_strided((1, 2, 2, 2, 12), (112, 52, 26, 12, 1)), "a stride is 26 bytes"),
        (carve_from_strides, storage(112).as_strided((2, 2, 1, 2, 12), (54, 24, 24, 12, 1)), "a stride is 54 bytes"),
        (
            carve_from_strides,
            storage(112).as_strided((1, 2, 2, 2, 12), (112, 50, 24, 12, 1)),
            "the first scale is 58 bytes",
        ),
        (carve_from_shape, torch.zeros(1, 2, 2, 2, 8, dtype=torch.bfloat16), "bfloat16.* one byte per element"),
        (carve_from_strides, torch.zeros(1, 2, 2, 16, dtype=torch.bfloat16), "bfloat16.* one byte per element"),
    ],
)
def test_what_cannot_be_carved_is_refused_with_its_numbers(carve, kv, said):
    with pytest.raises(ValueError, match=said):
        carve(kv)


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        (storage(192).view(1, 2, 2, 2, 24)[..., ::2], "innermost stride is 2, but it must be 1"),
        (storage(96).view(2, 2, 2, 12).transpose(2, 3), "innermost stride is 12, but it must be 1"),
        (storage(96).view(1, 3, 2, 2, 8), r"\(1, 3, 2, 2, 8\)"),
        (storage(56).view(2, 2, 2, 7), r"\(2, 2, 2, 7\)"),
        (storage(96).view(2, 4, 12), r"\(2, 4, 12\)"),
        (storage(96), r"\(96,\)"),
        (storage(96)[0], r"\(\)"),
        (storage(96).view(1, 1, 2, 2, 2, 12), r"\(1, 1, 2, 2, 2, 12\)"),
    ],
)
def test_what_is_no_kv_view_is_refused(kv, said):
    with pytest.raises(ValueError, match=said):
        kv_halves(kv)


def test_halves_share_the_memory_of_the_view():
    split, packed = storage(96).view(1, 2, 2, 2, 12), storage(96).view(1, 2, 2, 24)
    for kv in (split, packed):
        k_cells, v_cells = kv_halves(kv)
        assert k_cells.shape == v_cells.shape == (1, 2, 2, 12)
        k_cells.fill_(1)
        v_cells.fill_(2)
        assert (kv == 1).sum() == (kv == 2).sum() == 48
    assert packed[0, 0, 0].tolist() == [1] * 12 + [2] * 12
    assert split[0, 0].unique().tolist() == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mode_may_have_float16_scales(layout, monkeypatch):
    """The width and the dtype of a scale come from the mode alone: here 2 bytes, in cells of 18 bytes."""
    monkeypatch.setitem(MODES, "narrow", Mode("narrow", "int8", "float16"))
    cache = allocate(CacheSpec(2, 3, 2, 3, 16, "narrow"), layout)
    scales = cache.carve_scales()
    owners = tuple(view for view in cache.owners() if view.role == "scale")
    assert {scale.dtype for pair in scales for scale in pair} == {torch.float16}
    assert cache.writers(scales) == owners and {view.itemsize for view in owners} == {2}
    assert [scale.dtype for scale in carve_from_strides(cache.kv_caches[0], torch.float16)] == [torch.float16] * 2
    if LAYOUTS[layout].packing == "split":
        assert all(scale.dtype == torch.float16 for pair in cache.carve_scales("shape") for scale in pair)
