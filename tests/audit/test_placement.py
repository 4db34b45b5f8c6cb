"""Misplaced scales at production size, compared with known figures."""

import pytest

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec


def hits(finding) -> tuple[int, int, int]:
    """Return how many elements hit scales of the same half, of the other half, and of the view at another index."""
    name, half = finding.views[0], finding.views[0].split()[2]
    own = sum(n for what, n in finding.hits if what == f"{name}, at another index")
    same = sum(n for what, n in finding.hits if what.endswith(f" {half} scale") and what != name)
    other = sum(n for what, n in finding.hits if f" {half} scale" not in what)
    return same, other, own


@pytest.mark.parametrize(
    ("layout", "elements", "same", "other", "own"),
    [
        ("cross-layer NHD", 6_434_304, 6_204_544, 0, 229_760),
        ("cross-layer HND", 6_434_431, 3_102_304, 3_217_216, 114_911),
    ],
)
def test_production_size(layout, elements, same, other, own):
    spec = CacheSpec(28, 50_269, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, layout, "meta")
    result = audit_scales(cache.owners(), cache.writers(cache.carve_scales("shape")))
    found = {finding.views[0]: finding for finding in result.findings if finding.kind == "misplaced"}
    assert found["layer 0 K scale"].elements == elements
    assert hits(found["layer 0 K scale"]) == (same, other, own)
    collisions = result.of_kind("collision")
    assert [len(f.views) for f in collisions] == [28, 28]
    assert sum(f.bytes for f in collisions) == 2 * 50_269 * 16 * 8 * 4
