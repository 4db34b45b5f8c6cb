"""Pairs of views without a short common period, compared with an enumeration in Python integers."""

import random

import pytest

from kvviz.audit import overlap
from kvviz.audit.audit import audit_views
from kvviz.audit.byte_sets import Pattern, byte_range
from kvviz.audit.claims import Disjoint
from kvviz.audit.overlap import shared_bytes
from kvviz.audit.view import Storage, View

POOL = Storage("pool", 400 * 10**9)


def byte_ranges(view: View) -> list[tuple[int, int]]:
    return sorted((start, start + view.itemsize) for start in view.starts.ravel().tolist())


def many_and_few(draw: random.Random) -> tuple[View, View]:
    """Return a view of very many elements and a view of few, so that a test can enumerate the few."""
    step, size = draw.randrange(400, 700), draw.randrange(10**8, 2 * 10**8)
    blocks, rows = draw.randint(2, 3), draw.randint(2, 90)
    stride = draw.randrange(rows * 10**8, rows * 10**8 + 10**9)
    return View("a", POOL, (size,), (step,)), View(
        "b", POOL, (blocks, rows), (stride, 10**8 - draw.randrange(10**6)), 7
    )


@pytest.mark.parametrize("seed", range(60))
def test_long_steps_are_counted_exactly(seed):
    a, b = many_and_few(random.Random(seed))
    (step,), (size,) = a.stride, a.shape
    want = sum(start % step == 0 and start // step < size for start, _ in byte_ranges(b))
    found = audit_views([a, b], [Disjoint(("a", "b"))]).of_kind("collision")
    assert [finding.bytes for finding in found] == [want] * bool(want)


def test_two_bytes_that_products_beyond_64_bits_hid():
    a = View("a", POOL, (143_855_897,), (601,))
    b = View("b", POOL, (2, 80), (45_231_795_701, 64_307_124), 31_995_320_483)
    shared = [start for start, _ in byte_ranges(b) if start % 601 == 0 and start // 601 < 143_855_897]
    assert shared == [34_760_526_815, 80_506_779_508]
    (finding,) = audit_views([a, b], [Disjoint(("a", "b"))]).findings
    assert (finding.kind, finding.views, finding.bytes) == ("collision", ("a", "b"), 2)


def test_views_are_reported_if_numpy_and_the_count_contradict_each_other(monkeypatch):
    a = View("a", POOL, (143_855_897,), (601,))
    b = View("b", POOL, (2, 80), (45_231_795_701, 64_307_124), 31_995_320_483)
    monkeypatch.setattr(overlap, "shared_bytes", lambda p, q: 0)
    monkeypatch.setattr(overlap, "_overlap", lambda a, b, work: True)
    (finding,) = audit_views([a, b], [Disjoint(("a", "b"))]).findings
    assert finding.bytes is None and "the shared bytes were not counted" in finding.text


def test_patterns_apart_share_nothing():
    (low,), (high,) = byte_range(-(1 << 61), 5 - (1 << 61)), byte_range(1 << 61, (1 << 61) + 5)
    assert shared_bytes(low, high) == shared_bytes(high, low) == 0
    assert shared_bytes(low, Pattern(low.base + 4, 1 << 60, 3, low.starts, 3)) == 1


def test_views_beyond_the_limit_of_pairs_are_named(monkeypatch):
    monkeypatch.setattr(overlap, "MAX_PAIRS", 3)
    views = [View(f"v{n}", POOL, (10**8 - n,), (601 + 2 * n,), 600 * n) for n in range(4)]
    found = audit_views(views, [Disjoint(tuple(view.name for view in views))]).findings
    assert found[-1].text.startswith("not judged") and found[-1].bytes is None
    named = {frozenset(finding.views) for finding in found[:-1]}
    assert set(found[-1].views) == {"v1", "v2", "v3"} and all("v0" in names for names in named)
