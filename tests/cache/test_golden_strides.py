"""Byte strides of the six packed layouts in all 240 golden rows, refusals included."""

import pytest

from kvviz.cache.buffers import allocate
from kvviz.cache.layout import get_layout
from kvviz.cache.spec import CacheSpec
from tests.golden import LAYOUT_STRIDES, row_id

SHAPE = ("layers", "blocks", "block_size", "kv_heads", "head_size")


@pytest.mark.parametrize("row", LAYOUT_STRIDES, ids=row_id)
def test_strides_are_the_released_ones(row):
    spec = CacheSpec(*(row[k] for k in SHAPE), row["mode"], page_size_padded=row["page_size_padded"])
    layout = get_layout(row["layout"])
    assert 2 * spec.cell_bytes == row["content_bytes"]
    if row["refused"]:
        with pytest.raises(ValueError, match="cannot be padded"):
            layout.strides_bytes(spec)
        return
    strides = layout.strides_bytes(spec)
    assert [strides[axis] for axis in "LBHN"] + [1] == row["strides_LBHNC"]
    cache = allocate(spec, layout, "meta", one_storage=True)
    layers, size = cache.kv_caches, spec.element_bytes
    assert [step * size for step in layers[0].stride()[:3]] == row["strides_LBHNC"][1:4]
    assert [kv.storage_offset() * size for kv in layers] == [n * row["strides_LBHNC"][0] for n in range(row["layers"])]


@pytest.mark.parametrize("row", LAYOUT_STRIDES[:1], ids=row_id)
def test_a_row_with_one_layer(row):
    """Cut the first golden row to one layer. Layers are outermost there, so no stride depends on their number."""
    assert row["layout"].startswith("L") and row["layers"] > 1
    test_strides_are_the_released_ones({**row, "layers": 1})
