"""The views of all 200 golden rows: KV views, scale views, misplaced cells and shared addresses."""

import pytest

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import released_layout
from kvviz.cache.spec import CacheSpec
from tests.golden import SCALE_VIEWS, row_id


def carving_of(release: str) -> tuple[str, str]:
    """Packing and carving of a vLLM release."""
    return ("split", "shape") if release < "0.26" else ("packed", "strides")


def build(row: dict, device: str = "meta"):
    packing, carve = carving_of(row["vllm"])
    spec = CacheSpec(*(row[k] for k in ("layers", "blocks", "block_size", "kv_heads", "head_size")), row["mode"])
    layout = released_layout(row["layout"], row["allocation"] == "cross_layer", packing)
    cache = allocate(spec, layout, device)
    return cache, cache.carve_scales(carve)


@pytest.mark.parametrize("row", SCALE_VIEWS, ids=row_id)
def test_views_have_the_released_geometry(row):
    cache, scales = build(row)
    assert cache.storages[0].numel() == row["buffer_bytes"]
    for golden in row["views"]:
        layer = golden["layer"]
        kv = cache.kv_caches[layer]
        assert (list(kv.shape), list(kv.stride())) == (golden["kv_shape"], golden["kv_stride"])
        assert kv.storage_offset() == golden["kv_storage_offset"]
        for scale, name in zip(scales[layer], ("k_scale", "v_scale"), strict=True):
            assert list(scale.shape) == golden[name]["shape"]
            assert list(scale.stride()) == golden[name]["stride"]
            assert scale.storage_offset() == golden[name]["storage_offset"]


@pytest.mark.parametrize("row", SCALE_VIEWS, ids=row_id)
def test_audit_counts_misplaced_cells_and_shared_addresses(row):
    cache, scales = build(row)
    result = audit_scales(cache.owners(), cache.writers(scales))
    moved = [f for f in result.findings if f.kind in ("misplaced", "permuted")]
    assert sum(f.elements for f in moved) == row["misplaced_cells"]
    shared = row["addresses_claimed_by_more_than_one_cell"]
    collisions = result.of_kind("collision")
    assert sum(f.bytes for f in collisions) == shared * 4
    assert result.clean == (row["misplaced_cells"] == 0)
    for finding in collisions:
        assert len(finding.views) == row["layers"]


def test_golden_rows_cover_every_finding():
    kinds = set()
    for row in SCALE_VIEWS:
        cache, scales = build(row)
        kinds |= {f.kind for f in audit_scales(cache.owners(), cache.writers(scales)).findings}
    assert kinds == {"collision", "misplaced", "permuted"}


def test_a_row_with_one_layer():
    """Cut the first golden row to one layer. Each layer has its own storage there, so nothing else changes."""
    row = SCALE_VIEWS[0]
    assert row["allocation"] == "per_layer" and row["layers"] > 1
    one = {**row, "layers": 1, "views": row["views"][:1]}
    test_views_have_the_released_geometry(one)
    test_audit_counts_misplaced_cells_and_shared_addresses(one)
