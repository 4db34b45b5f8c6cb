"""Shared bytes against enumeration, over random sets of views, and at production size against known figures."""

import random
from itertools import combinations

import numpy as np
import pytest

from kvviz.audit import byte_sets
from kvviz.audit import sweep as sweep_module
from kvviz.audit.audit import audit_scales
from kvviz.audit.byte_sets import byte_range, start_sets
from kvviz.audit.elements import first_wrong, locate, same_places
from kvviz.audit.overlap import shared_bytes
from kvviz.audit.sweep import Sweep
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec

STORAGE = Storage("s", 4096)
SETS, PARTS = 10_000, 20


def random_view(draw: random.Random, name: str) -> View:
    """Nested with gaps, or any strides at all; overlapping itself now and then."""
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 5)))
    if draw.random() < 0.6:
        order, stride, step = draw.sample(range(len(shape)), len(shape)), [0] * len(shape), 1
        for axis in order:
            step += draw.choice((0, 0, 0, 1, 3))
            stride[axis] = step
            step *= shape[axis]
    else:
        stride = [draw.randint(-6, 12) for _ in shape]
    return View(name, STORAGE, shape, tuple(stride), draw.randint(0, 30), draw.choice((1, 1, 2, 4)))


def random_set(seed: int) -> list[View]:
    draw = random.Random(seed)
    views = [random_view(draw, f"v{n}") for n in range(draw.randint(2, 4))]
    if draw.random() < 0.2:  # an overlay of the very same bytes
        first = views[0]
        views.append(View("twin", STORAGE, first.shape, first.stride, first.offset, first.itemsize))
    return [view for view in views if view.num_elements <= 600]


def enumerated(views: list[View]) -> dict:
    """Members -> (bytes, lowest byte, elements of each member), byte by byte."""
    owners: dict[int, set[int]] = {}
    for number, view in enumerate(views):
        for byte in view.all_bytes.tolist():
            owners.setdefault(byte, set()).add(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for byte, who in owners.items():
        if len(who) > 1:
            groups.setdefault(tuple(sorted(who)), []).append(byte)
    return {
        who: (len(bytes_), min(bytes_), tuple(touching(views[number], bytes_) for number in who))
        for who, bytes_ in groups.items()
    }


def touching(view: View, bytes_: list[int]) -> int:
    return int(np.isin(view.bytes_of(view.starts.ravel()), bytes_).any(axis=1).sum())


def shares(a: View, b: View) -> bool:
    """numpy's own exact answer, over real memory."""
    memory, zero = np.zeros(1 << 15, np.uint8), 1 << 14
    arrays = (
        np.ndarray(
            view.shape,
            f"V{view.itemsize}",
            memory,
            zero + view.offset * view.itemsize,
            tuple(step * view.itemsize for step in view.stride),
        )
        for view in (a, b)
    )
    return bool(np.shares_memory(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_shared_bytes_are_those_of_the_enumeration(part):
    for seed in range(part * SETS // PARTS, (part + 1) * SETS // PARTS):
        views = random_set(seed)
        sweep = Sweep([byte_sets.byte_sets(view) for view in views], [view.itemsize for view in views])
        found = {region.members: (region.bytes, region.first, region.elements) for region in sweep.regions()}
        assert found == enumerated(views), seed


def test_numpy_agrees_on_every_pair():
    for seed in range(0, SETS, 40):
        for a, b in combinations(random_set(seed), 2):
            assert bool(Sweep([byte_sets.byte_sets(a), byte_sets.byte_sets(b)]).regions()) == shares(a, b), seed


def test_pairs_are_counted_by_equations():
    tried = 0
    for seed in range(0, SETS, 5):
        for a, b in combinations(random_set(seed), 2):
            if a.nested and b.nested:
                tried += 1
                got = sum(shared_bytes(p, q) for p in byte_sets.byte_sets(a)[0] for q in byte_sets.byte_sets(b)[0])
                assert got == len(np.intersect1d(a.all_bytes, b.all_bytes)), seed
    assert tried > 1000


def test_a_period_does_not_change_the_answer(monkeypatch):
    """The limits are lowered, so that these small views are counted period by period."""
    monkeypatch.setattr(byte_sets, "FEW_RANGES", 30)
    monkeypatch.setattr(sweep_module, "FEW_RANGES", 30)
    for seed in range(60):
        draw = random.Random(seed)
        step, count = draw.choice((24, 36, 60)), draw.randint(70, 90)
        views = [
            View("a", STORAGE, (count, 3, 2), (step, 8, 3), draw.randint(0, 40)),
            View("b", STORAGE, (count, 4), (step * draw.choice((1, 2)), 5), draw.randint(0, 40)),
            View("c", STORAGE, (count * 5,), (4,), draw.randint(0, 9), 4),
        ]
        sweep = Sweep([byte_sets.byte_sets(view) for view in views], [view.itemsize for view in views])
        assert sweep.period < 1000
        found = {region.members: (region.bytes, region.first, region.elements) for region in sweep.regions()}
        assert found == enumerated(views), seed


def test_first_bytes_are_counted_once_an_index():
    for seed in range(500):
        for view in random_set(seed):
            regions = Sweep([start_sets(view), [byte_range(-(1 << 20), 1 << 20)]]).regions()
            assert sum(region.elements[0] for region in regions) == view.num_elements


def test_locate_finds_the_first_index():
    for seed in range(500):
        for view in random_set(seed):
            starts = view.starts.ravel()
            for byte in random.Random(seed).sample(range(-20, 300), 30):
                covering = np.flatnonzero((starts <= byte) & (byte < starts + view.itemsize))
                want = view.index(int(covering[0])) if len(covering) else None
                assert locate(view, byte) == want, (seed, byte)


def test_places_that_agree_are_counted():
    for seed in range(2000):
        draw = random.Random(seed)
        view = random_view(draw, "v")
        stride = tuple(step + draw.choice((0, 0, 1)) for step in view.stride)
        other = View("w", STORAGE, view.shape, stride, view.offset + draw.choice((0, 0, 1)), view.itemsize)
        equal = view.starts == other.starts
        assert same_places(view, other) == int(equal.sum()), seed
        if view.nested:
            wrong = np.flatnonzero(~equal.ravel())
            first = view.index(int(wrong[np.argmin(view.starts.ravel()[wrong])])) if len(wrong) else None
            assert first_wrong(view, other) == first, seed


def production(num_blocks: int, layout: str, padded: int | None = None):
    spec = CacheSpec(28, num_blocks, 16, 8, 128, "fp8_per_token_head", page_size_padded=padded)
    return allocate(spec, layout, "meta")


def hits(finding) -> tuple[int, int, int]:
    """Other layers' scales of the same half, the other half's, and the view's own at another index."""
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
    cache = production(50_269, layout)
    result = audit_scales(cache.owners(), cache.writers(cache.carve_scales("shape")))
    found = {finding.views[0]: finding for finding in result.findings if finding.kind == "misplaced"}
    assert found["layer 0 K scale"].elements == elements
    assert hits(found["layer 0 K scale"]) == (same, other, own)
    collisions = result.of_kind("collision")
    assert [len(f.views) for f in collisions] == [28, 28]
    assert sum(f.bytes for f in collisions) == 2 * 50_269 * 16 * 8 * 4


@pytest.mark.parametrize("layout", ["cross-layer NHD", "cross-layer HND", "BLNHC"])
def test_work_does_not_grow_with_the_blocks(layout):
    work = []
    for num_blocks in (50_269, 1_000_000):
        cache = production(num_blocks, layout)
        carve = "shape" if cache.layout.packing == "split" else "strides"
        views = [view for view in cache.owners() if view.role == "data"] + list(
            cache.writers(cache.carve_scales(carve))
        )
        kinds = list({(v.offset, v.stride, v.itemsize): v for v in views}.values())
        sweep = Sweep([byte_sets.byte_sets(view) for view in kinds], [view.itemsize for view in kinds])
        sweep.regions()
        work.append(sweep.work)
    assert work[1] <= work[0] * 1.05
