"""Shared bytes of random sets of views, compared with an enumeration of every byte; work at production size."""

import random
from itertools import combinations

import numpy as np
import pytest

from kvviz.audit import byte_sets as byte_sets_module
from kvviz.audit import sweep as sweep_module
from kvviz.audit.byte_sets import byte_range, byte_sets
from kvviz.audit.overlap import shared_bytes
from kvviz.audit.sweep import WORD_BITS, Sweep, covering_masks, distinct_rows, set_bits
from kvviz.audit.view import View
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from tests.audit.random_views import STORAGE, random_set

SETS, PARTS = 10_000, 20


def enumerated(views: list[View]) -> dict:
    """Return members -> (bytes, lowest byte, elements of each member), counted byte by byte."""
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
    """Return True if numpy finds a shared byte in real memory."""
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
        sweep = Sweep([byte_sets(view) for view in views], [view.itemsize for view in views])
        found = {region.members: (region.bytes, region.first, region.elements) for region in sweep.regions()}
        assert found == enumerated(views), seed


def test_numpy_agrees_on_every_pair():
    for seed in range(0, SETS, 40):
        for a, b in combinations(random_set(seed), 2):
            assert bool(Sweep([byte_sets(a), byte_sets(b)]).regions()) == shares(a, b), seed


def test_pairs_are_counted_by_equations():
    tried = 0
    for seed in range(0, SETS, 5):
        for a, b in combinations(random_set(seed), 2):
            if a.nested and b.nested:
                tried += 1
                got = sum(shared_bytes(p, q) for p in byte_sets(a)[0] for q in byte_sets(b)[0])
                assert got == len(np.intersect1d(a.all_bytes, b.all_bytes)), seed
    assert tried > 1000


def test_a_period_does_not_change_the_answer(monkeypatch):
    """The limits are lowered, so that these small views are counted period by period."""
    monkeypatch.setattr(byte_sets_module, "FEW_RANGES", 30)
    monkeypatch.setattr(sweep_module, "FEW_RANGES", 30)
    for seed in range(60):
        draw = random.Random(seed)
        step, count = draw.choice((24, 36, 60)), draw.randint(70, 90)
        views = [
            View("a", STORAGE, (count, 3, 2), (step, 8, 3), draw.randint(0, 40)),
            View("b", STORAGE, (count, 4), (step * draw.choice((1, 2)), 5), draw.randint(0, 40)),
            View("c", STORAGE, (count * 5,), (4,), draw.randint(0, 9), 4),
        ]
        sweep = Sweep([byte_sets(view) for view in views], [view.itemsize for view in views])
        assert sweep.period < 1000
        found = {region.members: (region.bytes, region.first, region.elements) for region in sweep.regions()}
        assert found == enumerated(views), seed


@pytest.mark.parametrize("layout", ["cross-layer NHD", "cross-layer HND", "BLNHC"])
def test_work_does_not_grow_with_the_blocks(layout):
    work = []
    for num_blocks in (50_269, 1_000_000):
        spec = CacheSpec(28, num_blocks, 16, 8, 128, "fp8_per_token_head")
        cache = allocate(spec, layout, "meta")
        carve = "shape" if cache.layout.packing == "split" else "strides"
        views = [view for view in cache.owners() if view.role == "data"] + list(
            cache.writers(cache.carve_scales(carve))
        )
        kinds = list({(v.offset, v.stride, v.itemsize): v for v in views}.values())
        sweep = Sweep([byte_sets(view) for view in kinds], [view.itemsize for view in kinds])
        sweep.regions()
        work.append(sweep.work)
    assert work[1] <= work[0] * 1.05


def test_the_example_of_three_intervals():
    """K owns [0, 8) and V owns [4, 12)."""
    sweep = Sweep([[byte_range(0, 8)], [byte_range(4, 12)]])
    (table,) = sweep.intervals()
    assert table.starts.tolist() == [0, 4, 8] and table.sizes.tolist() == [4, 4, 4]
    assert [table.combinations[n] for n in table.combination] == [(0,), (0, 1), (1,)]
    assert [(region.members, region.bytes) for region in sweep.regions(1)] == [((0,), 4), ((0, 1), 4), ((1,), 4)]


def test_bit_masks_tell_which_sets_cover_an_interval():
    masks = covering_masks(np.array([0, 1, 0, 1]), 2, np.arange(4))
    assert masks.tolist() == [[0b01], [0b11], [0b10], [0b00]]
    many = WORD_BITS + 5
    masks = covering_masks(np.arange(many), many, np.array([0, many - 1, 0]))
    distinct, number = distinct_rows(masks)
    assert [set_bits(row) for row in distinct[number]] == [(0,), tuple(range(many)), (0,)]
