"""Overlay, Covers and SameBytes, compared with plain Python byte by byte on random small views."""

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Aligned, Covers, Disjoint, Overlay, SameBytes
from kvviz.audit.view import Storage, View

SEEDS = range(300)
POOL = Storage("pool", 96)


def elements(view: View) -> dict[tuple[int, ...], range]:
    """Return the bytes of each index."""
    found = {}
    for index in product(*map(range, view.shape)):
        start = (view.offset + sum(i * step for i, step in zip(index, view.stride, strict=True))) * view.itemsize
        found[index] = range(start, start + view.itemsize)
    return found


def blocks_of(view: View, per_block: int = 1) -> dict[int, set[int]]:
    """Return the bytes of each block of ``per_block`` entries."""
    found: dict[int, set[int]] = {}
    for index, bytes_ in elements(view).items():
        found.setdefault(index[0] // per_block, set()).update(bytes_)
    return found


def touching(views, bad: dict[str, dict[int, set[int]]], per_block: int = 1) -> Counter:
    """Count the elements of each view with a bad byte. Bad bytes are given by view and block."""
    counts: Counter = Counter()
    for view in views:
        for index, bytes_ in elements(view).items():
            counts[view.name] += bool(bad[view.name].get(index[0] // per_block, set()) & set(bytes_))
    return counts


def random_view(draw: random.Random, name: str, block_bytes: int | None) -> View:
    """Return a view of some blocks with up to two more axes, with gaps, an offset and any element size."""
    itemsize = draw.choice((1, 1, 2, 4))
    shape = (draw.choice((1, 2, 3, 4)), *(draw.choice((1, 2, 3)) for _ in range(draw.randint(0, 2))))
    step = draw.choice((3, 4, 5, 6, 8)) if block_bytes is None else block_bytes // itemsize
    stride = (step, *(draw.choice((1, 1, 2, 3)) for _ in shape[1:]))
    return View(name, POOL, shape, stride, draw.randint(0, 6), itemsize, read_only=draw.random() < 0.15)


def scene(seed: int) -> list[View]:
    draw = random.Random(seed)
    block_bytes = draw.choice((None, 8, 12, 16))
    return [random_view(draw, f"v{n}", block_bytes) for n in range(draw.randint(1, 5))]


def record(finding) -> tuple:
    return finding.kind, finding.views, finding.elements, finding.bytes


def claimed(views, claims) -> list:
    """Return the findings of the claims, without those of the views alone."""
    alone = set(audit_views(views).findings)
    return [finding for finding in audit_views(views, claims).findings if finding not in alone]


def expected_overlay(views, per_id=()):
    claimants: dict[int, set[tuple[str, int]]] = {}
    for number, view in enumerate(views):
        for block, bytes_ in blocks_of(view, per_id[number] if per_id else 1).items():
            for byte in bytes_:
                claimants.setdefault(byte, set()).add((view.name, block))
    groups: dict[tuple[str, ...], list[int]] = {}
    writers = {view.name for view in views if not view.read_only}
    for byte, who in claimants.items():
        if len({block for _, block in who}) > 1 and writers & {name for name, _ in who}:
            groups.setdefault(tuple(v.name for v in views if v.name in {name for name, _ in who}), []).append(byte)
    for names, bytes_ in groups.items():
        bad = {name: dict.fromkeys(range(99), set(bytes_)) for name in names}
        cells = touching([view for view in views if view.name in names], bad)
        yield "collision", names, cells.total(), len(bytes_), min(bytes_)


@pytest.mark.parametrize("seed", SEEDS)
def test_overlay_is_that_of_the_account(seed):
    views = scene(seed)
    check_overlay(views, ())


def check_overlay(views, per_id) -> list:
    found = claimed(views, [Overlay(tuple(view.name for view in views), per_id)])
    assert sorted(map(record, found)) == sorted(tuple(want) for *want, _ in expected_overlay(views, per_id))
    first_of = {names: first for _, names, _, _, first in expected_overlay(views, per_id)}
    blocks_per_id = dict(zip((view.name for view in views), per_id, strict=False))
    for finding in found:
        first, second, *_ = (place.index[0] // blocks_per_id.get(place.view, 1) for place in finding.example)
        assert first != second and {p.view for p in finding.example} == {*finding.views}
        named = {view.name: view for view in views}
        assert finding.readers == tuple(name for name in finding.views if named[name].read_only)
        assert not named[finding.example[0].view].read_only
        check_places(finding, first_of[finding.views], views)
    return found


def check_places(finding, byte: int, views) -> None:
    """Check that each place of an example is an element of its view and covers the byte."""
    named = {view.name: view for view in views}
    for place in finding.example:
        bytes_ = range(place.start_bytes, place.stop_bytes)
        assert byte in bytes_ and bytes_ == elements(named[place.view])[place.index]


def extent_faults(extents, content, neighbours, extents_per_block=1, blocks_per_extent=1):
    """Return the bytes that extents lack, and the bytes that they take of other blocks: by view and block."""
    taken: dict[int, set[int]] = {}
    for extent in extents:
        for block, bytes_ in blocks_of(extent, extents_per_block).items():
            taken.setdefault(block, set()).update(bytes_)
    missing = {
        view.name: {b: bytes_ - taken.get(b, set()) for b, bytes_ in blocks_of(view, blocks_per_extent).items()}
        for view in content
    }
    foreign = {
        view.name: {
            block: bytes_ & set().union(*(there for other, there in taken.items() if other != block))
            for block, bytes_ in blocks_of(view, blocks_per_extent).items()
        }
        for view in neighbours
    }
    return missing, foreign


def expected_covers(extents, content, neighbours, extents_per_block=1, blocks_per_extent=1):
    found = extent_faults(extents, content, neighbours, extents_per_block, blocks_per_extent)
    for kind, views, bad in zip(("truncated", "oversized"), (content, neighbours), found, strict=True):
        bytes_ = set().union(*(there for by_block in bad.values() for there in by_block.values()))
        if bytes_:
            cells = touching(views, bad, blocks_per_extent)
            names = dict.fromkeys((*(e.name for e in extents), *(v.name for v in views if cells[v.name])))
            yield kind, tuple(names), cells.total(), len(bytes_)


@pytest.mark.parametrize("seed", SEEDS)
def test_covers_is_that_of_the_account(seed):
    views = scene(seed)
    extent, others = views[0], views[1:] or [random_view(random.Random(seed), "content", None)]
    draw = random.Random(seed)
    content = draw.sample(others, draw.randint(1, len(others)))
    neighbours = draw.choice(([], draw.sample(others, draw.randint(1, len(others)))))
    claim = Covers("v0", tuple(v.name for v in content), tuple(v.name for v in neighbours))
    found = claimed([extent, *others], [claim])
    assert list(map(record, found)) == list(expected_covers([extent], content, neighbours or content))
    for finding in found:
        assert finding.text.startswith(f"{finding.bytes} byte")
        check_places_of_extent(finding, [extent], content, neighbours or content)


def check_places_of_extent(finding, extents, content, neighbours, extents_per_block=1, blocks_per_extent=1):
    """The example shows a block of the extent with the byte of another block, or content that its block lacks."""
    first, *others = finding.example
    missing, foreign = extent_faults(extents, content, neighbours, extents_per_block, blocks_per_extent)
    bad, shown = (missing, finding.example) if finding.kind == "truncated" else (foreign, others)
    byte = min(byte for by_block in bad.values() for there in by_block.values() for byte in there)
    check_places(finding, byte, [*extents, *content, *neighbours])
    assert shown and all(byte in bad[p.view][p.index[0] // blocks_per_extent] for p in shown)
    if finding.kind == "oversized":
        (extent,), block = [e for e in extents if e.name == first.view], first.index[0] // extents_per_block
        assert byte in blocks_of(extent, extents_per_block)[block]
        assert all(p.index[0] // blocks_per_extent != block for p in others)


def test_a_place_of_an_extent_is_of_the_block_that_is_wrong():
    """The second block of the extent takes bytes of block 0. Byte 2 is also in block 0 of the extent."""
    storage = Storage("s", 12)
    views = [View("blocks", storage, (3, 4), (4, 1)), View("sent", storage, (2, 8), (2, 1))]
    truncated, finding = claimed(views, [Covers("sent", ("blocks",))])
    assert record(truncated) == ("truncated", ("sent", "blocks"), 4, 4)  # block 2 has no extent
    assert record(finding) == ("oversized", ("sent", "blocks"), 8, 8)
    assert [str(place) for place in finding.example] == [
        "sent [axis 0 1, axis 1 0] at bytes [2, 3)",
        "blocks [axis 0 0, axis 1 2] at bytes [2, 3)",
    ]


def test_places_of_an_overlay_are_of_different_blocks():
    storage = Storage("s", 12)
    views = [View("blocks", storage, (3, 4), (4, 1)), View("other", storage, (2, 8), (2, 1))]
    finding = next(f for f in claimed(views, [Overlay(("blocks", "other"))]) if len(f.views) == 2)
    assert [str(place) for place in finding.example] == [
        "blocks [axis 0 0, axis 1 2] at bytes [2, 3)",
        "other [axis 0 1, axis 1 0] at bytes [2, 3)",
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_same_bytes_is_that_of_the_account(seed):
    part, whole = (scene(seed) + scene(seed + 1))[:2]
    whole = View("whole", POOL, whole.shape, whole.stride, whole.offset, whole.itemsize)
    ours, theirs = (set().union(*blocks_of(view).values()) for view in (part, whole))
    expected, first = [], {}
    for kind, view, bytes_ in (("oversized", part, ours - theirs), ("truncated", whole, theirs - ours)):
        if bytes_:
            first[kind] = (view.name, min(bytes_))
            cells = sum(bool(bytes_ & set(there)) for there in elements(view).values())
            expected.append((kind, (part.name, "whole"), cells, len(bytes_)))
    found = claimed([part, whole], [SameBytes(part.name, "whole")])
    assert sorted(map(record, found)) == sorted(expected)
    for finding in found:
        name, byte = first[finding.kind]
        assert [p.view for p in finding.example] == [name]
        check_places(finding, byte, [part, whole])


def test_the_random_pools_hold_everything_often():
    """Equal and unequal block strides, both faults of an extent, clean extents and short extents all occur."""
    counts: Counter = Counter()
    for seed in SEEDS:
        views = scene(seed)
        counts["equal" if len({v.stride[0] * v.itemsize for v in views}) == 1 else "unequal"] += 1
        counts["clean" if not list(expected_overlay(views)) else "collision"] += 1
        counts["fewer blocks"] += len(views) > 1 and views[0].shape[0] < views[1].shape[0]
        for kind, *_ in expected_covers([views[0]], views[1:], views[1:]) if views[1:] else ():
            counts[kind] += 1
    assert min(counts.values()) >= 20 and len(counts) == 7


def pages(name: str, width: int, blocks: int = 4, step: int = 16, offset: int = 0, storage: Storage = POOL) -> View:
    return View(name, storage, (blocks, width), (step, 1), offset, axes=("block", "byte"))


def test_an_exact_extent_is_clean_and_padding_may_be_covered():
    views = [pages("content", 12), pages("tight", 12), pages("with padding", 16)]
    assert not claimed(views, [Covers("tight", ("content",)), Covers("with padding", ("content",))])


def test_blocks_without_an_extent_are_not_covered():
    """Four blocks of 48 bytes, and an extent of 64 bytes that has one block: 128 of 192 bytes are never moved."""
    memory = Storage("memory", 192)
    views = [pages("content", 48, 4, 48, storage=memory), pages("sent", 64, 1, 64, storage=memory)]
    truncated, oversized = claimed(views, [Covers("sent", ("content",))])
    assert record(truncated) == ("truncated", ("sent", "content"), 144, 144)
    assert record(oversized) == ("oversized", ("sent", "content"), 16, 16)
    assert truncated.text.endswith(
        "; sent has 1 block and content has 4 (if this is meant, declare blocks_per_extent 4)"
    )
    (truncated,) = claimed(views, [Covers("sent", ("content",), blocks_per_extent=4)])
    assert record(truncated) == ("truncated", ("sent", "content"), 128, 128)


def test_a_transfer_of_some_blocks_names_these_blocks_as_its_content():
    views = [pages("first two", 16, blocks=2), pages("all", 16), pages("long", 24, blocks=2)]
    assert not claimed(views[:2], [Covers("first two", ("first two",), ("all",))])
    (finding,) = claimed(views, [Covers("long", ("first two",), ("all",))])
    assert record(finding) == ("oversized", ("long", "all"), 16, 16)


@pytest.mark.parametrize(
    ("extent", "numbers"),
    [
        (((12, 16), (16, 1)), {"extents_per_block": 3}),  # sectors of 16 bytes
        (((2, 96), (96, 1)), {"blocks_per_extent": 2}),  # chunks of two blocks
        (((3, 64), (64, 1)), {"blocks_per_extent": 4, "extents_per_block": 3}),  # three pieces of all blocks
        (((1, 192), (192, 1)), {"blocks_per_extent": 4}),  # one registration
        (((192,), (1,)), {"extents_per_block": 48}),  # a flat extent
        (((192,), (1,)), {"extents_per_block": 192, "blocks_per_extent": 4}),
    ],
)
def test_extents_need_not_be_as_long_as_blocks(extent, numbers):
    memory = Storage("memory", 192)
    sent = View("sent", memory, *extent)
    views = [pages("content", 48, 4, 48, storage=memory), sent]
    assert not claimed(views, [Covers("sent", ("content",), **numbers)])
    late = replace(sent, offset=1)
    found = claimed([views[0], late], [Covers("sent", ("content",), **numbers)])
    assert list(map(record, found)) == list(expected_covers([late], views[:1], views[:1], **numbers)) and found


def test_a_flat_extent_asks_for_its_blocks():
    memory = Storage("memory", 48)
    views = [pages("content", 12, 4, 12, storage=memory), View("sent", memory, (48,), (1,))]
    said = "sent has one axis of 48 elements.* content has 4 blocks.*extents_per_block, here 12"
    with pytest.raises(ValueError, match=said):
        audit_views(views, [Covers("sent", ("content",))])
    assert not claimed(views, [Covers("sent", ("content",), extents_per_block=12)])


def test_content_in_two_storages_needs_an_extent_in_each():
    """Data and scales lie in two storages. An extent over the data alone moves no scale: 4 blocks of 8 bytes."""
    other = Storage("scales", 32)
    views = [pages("data", 16), pages("scale", 8, 4, 8, storage=other), pages("sent", 16)]
    views.append(pages("sent scales", 8, 4, 8, storage=other))
    (finding,) = claimed(views, [Covers("sent", ("data", "scale"))])
    assert (*record(finding), finding.storage) == ("truncated", ("sent", "scale"), 32, 32, "scales")
    assert finding.text == "32 bytes of the content are not covered: 32 elements of scale; no extent lies in scales"
    assert not claimed(views, [Covers(("sent", "sent scales"), ("data", "scale"))])


@pytest.mark.parametrize("seed", SEEDS)
def test_several_extents_and_unequal_counts_are_those_of_the_account(seed):
    draw = random.Random(seed)
    views = scene(seed) + [replace(view, name=f"w{n}") for n, view in enumerate(scene(seed + 1))]
    cut = draw.randint(1, min(2, len(views) - 1))
    extents, content = views[:cut], views[cut:]
    numbers = {"extents_per_block": draw.choice((1, 1, 2, 3)), "blocks_per_extent": draw.choice((1, 1, 2, 3))}
    claim = Covers(tuple(v.name for v in extents), tuple(v.name for v in content), **numbers)
    found = claimed(views, [claim])
    assert list(map(record, found)) == list(expected_covers(extents, content, content, **numbers))
    for finding in found:
        check_places_of_extent(finding, extents, content, content, **numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_overlay_of_unequal_blocks_is_that_of_the_account(seed):
    draw = random.Random(seed)
    views = scene(seed)
    per_id = tuple(draw.choice((1, 2, 3)) for _ in views)
    check_overlay(views, per_id)


def sectors() -> list[View]:
    """A pool of 6 sectors of 96 bytes. A sector is one block of 3 sliding layers, or 3 blocks of a full layer."""
    pool = Storage("sectors", 576)
    sliding = [
        View(f"layer {n} {half}", pool, (6, 4, 4), (96, 4, 1), 32 * n + 16 * (half == "V"))
        for n in range(3)
        for half in "KV"
    ]
    full = [View(f"layer 3 {half}", pool, (18, 4, 4), (32, 4, 1), 16 * (half == "V")) for half in "KV"]
    return [*sliding, *full]


def test_a_pool_of_sectors_is_clean_if_the_ratio_is_declared():
    views = sectors()
    names = tuple(view.name for view in views)
    found = check_overlay(views, ())
    assert len(found) == 6
    said = "96 bytes, which are 3 blocks of layer 3 K. If this is meant, declare blocks_per_id [1, 1, 1, 1, 1, 1, 3, 3]"
    assert all(said in finding.text for finding in found)
    assert not claimed(views, [Overlay(names, (1,) * 6 + (3,) * 2)])
    late = [*views[:-1], replace(views[-1], offset=views[-1].offset + 8)]
    assert check_overlay(late, (1,) * 6 + (3,) * 2)


def test_a_stride_that_is_too_short_is_no_ratio():
    """The second view steps half a block, and lies across two sectors: no number of blocks per id makes this clean."""
    views = [pages("right", 16), pages("carved", 12, 7, 8)]
    found = claimed(views, [Overlay(("right", "carved"))])
    assert found and not any("blocks_per_id" in finding.text for finding in found)


def test_large_pools_of_unequal_blocks_cost_what_small_ones_cost():
    large, blocks = Storage("large", 1 << 40), 1 << 20
    views = [View("sliding", large, (blocks, 96), (96, 1)), View("full", large, (3 * blocks + 1, 32), (32, 1))]
    assert not claimed(views, [Overlay(("sliding", "full"), (1, 3))])
    (finding,) = claimed([views[0], replace(views[1], offset=8)], [Overlay(("sliding", "full"), (1, 3))])
    assert record(finding) == ("collision", ("sliding", "full"), 2 * 8 * (blocks - 1), 8 * (blocks - 1))


def test_three_sections_of_a_rank_count_together():
    """A page of 3 sections of 16 bytes, two ranks: rank 0 owns the first half of each section."""
    memory = Storage("page", 48)
    parts = [View(f"rank 0 part {n}", memory, (8,), (1,), 16 * n) for n in range(3)]
    share, half = View("share", memory, (3, 8), (16, 1)), View("half", memory, (24,), (1,))
    names = tuple(part.name for part in parts)
    assert not claimed([*parts, share], [SameBytes(names, "share"), SameBytes("share", names)])
    truncated, oversized = sorted(claimed([half, *parts], [SameBytes("half", names)]), key=lambda f: f.kind)[::-1]
    assert record(oversized)[2:] == (8, 8) and record(truncated)[2:] == (8, 8)
    assert truncated.text == "half lacks 8 bytes of rank 0 part 0 and rank 0 part 1 and rank 0 part 2"
    assert oversized.text.startswith("half has 8 bytes that") and oversized.text.endswith("part 2 do not have")


@pytest.mark.parametrize("seed", SEEDS)
def test_unions_are_those_of_the_account(seed):
    draw, views = random.Random(seed), scene(seed) + [replace(v, name=f"w{n}") for n, v in enumerate(scene(seed + 1))]
    cut = draw.randint(1, len(views) - 1)
    sides = views[:cut], views[cut:]
    ours, theirs = (set().union(*(there for v in side for there in blocks_of(v).values())) for side in sides)
    expected = []
    for kind, side, bytes_ in (("oversized", 0, ours - theirs), ("truncated", 1, theirs - ours)):
        if bytes_:
            cells = sum(bool(bytes_ & set(there)) for view in sides[side] for there in elements(view).values())
            expected.append((kind, tuple(v.name for v in views), cells, len(bytes_)))
    found = claimed(views, [SameBytes(*(tuple(v.name for v in side) for side in sides))])
    assert sorted(map(record, found)) == sorted(expected)


def test_neighbours_of_the_same_block_may_be_covered():
    """An extent may cover all layers of its own block. An extent that starts later covers the next block."""
    views = [pages("layer 0", 6), pages("layer 1", 6, offset=8), pages("from 0", 16), pages("from 8", 16, offset=8)]
    layers = ("layer 0", "layer 1")
    assert not claimed(views, [Covers("from 0", ("layer 0",), layers)])
    (finding,) = claimed(views, [Covers("from 8", ("layer 1",), layers)])
    assert record(finding) == ("oversized", ("from 8", "layer 0"), 18, 18)
    assert finding.text == "18 bytes of other blocks are covered: 18 elements of layer 0"


def test_elements_are_counted_and_not_bytes():
    """Two float32 elements of each block are not covered completely. One is also cut by the end of another view."""
    content = View("content", POOL, (2, 3), (8, 1), 0, 4)
    views = [content, View("extent", POOL, (2, 5), (32, 1), 0), View("edge", POOL, (2, 7), (32, 1), 0)]
    truncated, *others = claimed(views, [Covers("extent", ("content", "edge"))])
    assert record(truncated) == ("truncated", ("extent", "content", "edge"), 2 * 2 + 2 * 2, 2 * 7) and not others


def test_many_equal_blocks_cost_what_few_cost():
    large = Storage("large", 16 << 30)
    views = [pages("content", 24, 1 << 26, 256, storage=large), pages("sent", 16, 1 << 26, 256, storage=large)]
    (finding,) = claimed(views, [Covers("sent", ("content",))])
    assert record(finding) == ("truncated", ("sent", "content"), 8 << 26, 8 << 26)


def test_many_blocks_of_unequal_strides_are_judged_by_the_first():
    """Findings in the first blocks have no counts. Fewer blocks give findings of the same kinds, with counts."""
    for blocks in (50_269, 64):
        memory = Storage("memory", blocks * 32)
        cache = View("cache", memory, (blocks, 2, 16), (16, blocks * 16, 1), axes=("block", "kv", "byte"))
        sent = pages("sent", 32, blocks, 32, storage=memory)
        truncated, oversized = found = claimed([cache, sent], [Covers("sent", ("cache",))])
        assert (truncated.kind, oversized.kind) == ("truncated", "oversized")
        if blocks == 64:
            assert list(map(record, found)) == list(expected_covers([sent], [cache], [cache]))
        else:
            assert (truncated.elements, truncated.bytes) == (None, None)
            assert "counted in the first 341 blocks of each view only" in truncated.text


@pytest.mark.parametrize(
    ("views", "claim", "said"),
    [
        ([View("a", POOL, (), ()), pages("b", 4)], Overlay(("a", "b")), "a has no axis: its first axis must be"),
        ([View("a", POOL, (), ()), pages("b", 4)], Covers("b", ("a",), ("b",)), "a has no axis"),
        ([View("a", POOL, (), ()), pages("b", 4)], Covers("a", ("b",)), "a has no axis"),
        (
            [pages("a", 4), pages("b", 4, storage=Storage("other", 96))],
            SameBytes("a", "b"),
            "a lies in pool and b in other: they must lie in one storage",
        ),
        ([pages("a", 4)], Overlay(("a",), (1, 2)), "blocks_per_id has 2 numbers for 1 view: give one number per view"),
        ([pages("a", 4)], Overlay(("a",), (0,)), "blocks_per_id must be at least 1, but it is 0 for a"),
        ([pages("a", 4)], Covers("a", ("a",), extents_per_block=0), "extents_per_block must be at least 1, but it is"),
        ([pages("a", 4)], Covers("a", ("z",)), "names the view 'z', which is not among the 1 views"),
    ],
)
def test_errors_say_what_does_not_fit(views, claim, said):
    with pytest.raises(ValueError, match=said):
        audit_views(views, [claim])


def test_what_is_too_much_work_is_never_called_clean():
    """One claim is not judged. The findings of the other claims stay."""
    views = [pages("a", 1, 3000, 16), pages("b", 1, 3000, 17, 60_000)]
    result = audit_views(views, [Overlay(("a", "b")), Disjoint(("a", "b")), Aligned("b", 2)])
    (overlay,) = (finding for finding in result.of_kind("collision") if finding.text)
    assert not result.clean and (overlay.views, overlay.elements, overlay.bytes) == (("a", "b"), None, None)
    said = "not judged: the block strides of a, b differ; nothing was found in their first 512 blocks, "
    assert overlay.text.startswith(said) and "more than the 4096" in overlay.text
    assert result.of_kind("unaligned") and result.of_kind("out_of_bounds")
    assert "2 data views are disjoint" in result.checked and overlay in result.not_judged
    assert "not judged: 2 data views share bytes of equal block ids only" in result.checked


@pytest.mark.parametrize("seed", range(100))
def test_claims_that_share_neighbours_say_what_each_says_alone(seed):
    views = scene(seed) + [replace(view, name=f"w{n}") for n, view in enumerate(scene(seed + 1))]
    names = tuple(view.name for view in views)
    claims = [Covers(view.name, (names[n - 1],), names) for n, view in enumerate(views)]
    alone = [finding for claim in claims for finding in claimed(views, [claim])]
    assert claimed(views, claims) == list(dict.fromkeys(alone))
    want = [item for n, extent in enumerate(views) for item in expected_covers([extent], [views[n - 1]], views)]
    assert list(map(record, alone)) == want


def test_an_extent_a_layer_does_not_grow_with_the_square_of_the_layers():
    large, blocks = Storage("large", 1 << 42), 50_269
    views = [
        View(f"l{n}", large, (blocks, 2, 16, 8, 128), (200 << 15, 1 << 14, 1 << 10, 128, 1), n << 15)
        for n in range(200)
    ]
    apart = [replace(view, stride=(1 << 15, *view.stride[1:]), offset=view.offset * blocks) for view in views]
    for group in (views, apart):
        names = tuple(view.name for view in group)
        begun = time.process_time()
        assert audit_views(group, [Covers(name, (name,), names) for name in names]).clean
        assert time.process_time() - begun < 6


def test_a_flat_extent_over_no_blocks_has_nothing_to_cover():
    storage = Storage("s", 48)
    views = [View("sent", storage, (48,), (1,)), View("K", storage, (0, 16), (16, 1))]
    assert not audit_views(views, [Covers("sent", ("K",))]).findings
