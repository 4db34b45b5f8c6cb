"""The geometry in plain integers is equal to the strides that torch computes."""

import numpy as np
import pytest
import torch

from kvviz.audit.view import View
from kvviz.cache import geometry
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS, Layout
from kvviz.cache.modes import MODES
from kvviz.cache.scale_views import carve_from_strides, kv_halves
from kvviz.cache.spec import CacheSpec

AXES = {4: ("block", "head", "token", "element"), 5: ("block", "half", "token", "head", "element")}
SHAPES = [(3, 4, 2, 3, 16), (1, 2, 4, 1, 16), (2, 1, 1, 2, 8), (1, 1, 1, 1, 8)]


def specs_of(shape, mode, layout):
    """Return the spec of this shape with and without a tail, and with padding if the layout can pad its pages."""
    specs = [CacheSpec(*shape, mode), *([CacheSpec(*shape, mode, tail=False)] if shape[-1] > 8 else [])]
    heads_inside = layout.order.index("H") > max(map(layout.order.index, "LB"))
    if heads_inside or shape[3] == 1:
        content = specs[0].content_page_size_bytes
        specs += [CacheSpec(*shape, mode, page_size_padded=content + extra) for extra in (0, 8)]
    return specs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layout", "one_storage"),
    [
        (name, shared)
        for name, layout in LAYOUTS.items()
        for shared in ((None, True) if layout.cross_layer else (None, True, False))
    ],
)
def test_views_are_those_of_the_tensors(layout, mode, one_storage):
    record = LAYOUTS[layout]
    for shape in SHAPES:
        for spec in specs_of(shape, mode, record):
            cache = allocate(spec, layout, "meta", one_storage=one_storage)
            expected, data, scales = [], [], []
            for layer, kv in enumerate(cache.kv_caches):
                storage = cache.storage_of(layer)
                expected.append(View.of(kv, f"layer {layer} KV", storage, AXES[kv.dim()]))
                for name, half in zip("KV", kv_halves(kv), strict=True):
                    cells = half.view(torch.uint8)[..., : spec.data_bytes]
                    data.append(View.of(cells, f"layer {layer} {name} data", storage, geometry.CELL_AXES, "data"))
                if spec.is_per_token_head:
                    pair = zip("KV", carve_from_strides(kv, getattr(torch, spec.mode.scale_dtype)), strict=True)
                    scales += [
                        View.of(scale, f"layer {layer} {name} scale", storage, geometry.SCALE_AXES, "scale")
                        for name, scale in pair
                    ]
            assert geometry.kv_views(spec, record, one_storage) == tuple(expected)
            assert geometry.owners(spec, record, one_storage) == cache.owners() == (*data, *scales)
            records = geometry.storages(spec, record, one_storage)
            sizes = {name: tensor.numel() for name, tensor in cache.storages_by_name().items()}
            assert {record.name: record.nbytes for record in records} == sizes


def test_the_example_of_the_first_line():
    spec = CacheSpec(24, 176_452, 16, 2, 64)
    owners = {view.name: view for view in geometry.owners(spec, LAYOUTS["cross-layer NHD"])}
    assert owners["layer 1 K data"].start_of((0, 0, 0, 0)) == 4_352


def test_a_cross_layer_buffer_is_one():
    spec = CacheSpec(2, 3, 4, 2, 8)
    for function in (geometry.storages, geometry.kv_views, geometry.owners):
        with pytest.raises(ValueError, match="cross-layer HND puts all layers into one buffer.*one_storage"):
            function(spec, LAYOUTS["cross-layer HND"], False)


def test_numbers_are_plain_integers():
    """NumPy integers as sizes must not reach the views: their products can overflow."""
    shape = (np.int32(24), np.int64(500_000), np.int32(16), np.uint8(8), np.int16(128))
    spec = CacheSpec(*shape)
    views = (*geometry.owners(spec, LAYOUTS["BLNHC"]), *geometry.kv_views(spec, LAYOUTS["BLNHC"]))
    numbers = [number for view in views for number in (*view.shape, *view.stride, view.offset, view.storage.nbytes)]
    assert {type(number) for number in numbers} == {int}
    assert spec == CacheSpec(24, 500_000, 16, 8, 128) and spec.buffer_bytes == 24 * 500_000 * 2 * 16 * 8 * 132


@pytest.mark.parametrize("order", ["HBLKNC", "HBLNKC"])
def test_a_layout_follows_from_its_order_alone(order):
    """Test a layout that no release has: heads are outside blocks, and blocks are outside layers."""
    layout = Layout("HBLNC", "split" if order.endswith("KNC") else "packed", order)
    spec = CacheSpec(2, 3, 4, 2, 8)
    taken = sorted(byte for view in geometry.owners(spec, layout) for byte in view.all_bytes.tolist())
    assert layout.cross_layer and taken == list(range(spec.buffer_bytes))
    cache = allocate(spec, layout)
    for layer, kv in enumerate(cache.kv_caches):
        kv.fill_(layer + 1)
    assert torch.bincount(cache.storages[0].long()).tolist() == [0, spec.layer_bytes, spec.layer_bytes]
