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


def blocks_of(view: View) -> dict[int, set[int]]:
    """Return the bytes of each block."""
    found: dict[int, set[int]] = {}
    for index, bytes_ in elements(view).items():
        found.setdefault(index[0], set()).update(bytes_)
    return found


def touching(views, bad: dict[str, dict[int, set[int]]]) -> Counter:
    """Count the elements of each view with a bad byte. Bad bytes are given by view and block."""
    counts: Counter = Counter()
    for view in views:
        for index, bytes_ in elements(view).items():
            counts[view.name] += bool(bad[view.name].get(index[0], set()) & set(bytes_))
    return counts


def random_view(draw: random.Random, name: str, block_bytes: int | None) -> View:
    """Return a view of some blocks with up to two more axes, with gaps, an offset and any element size."""
    itemsize = draw.choice((1, 1, 2, 4))
    shape = (draw.choice((1, 2, 3, 4)), *(draw.choice((1, 2, 3)) for _ in range(draw.randint(0, 2))))
    step = draw.choice((3, 4, 5, 6, 8)) if block_bytes is None else block_bytes // itemsize
    stride = (step, *(draw.choice((1, 1, 2, 3)) for _ in shape[1:]))
    return View(name, POOL, shape, stride, draw.randint(0, 6), itemsize)


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


def expected_overlay(views):
    claimants: dict[int, set[tuple[str, int]]] = {}
    for view in views:
        for block, bytes_ in blocks_of(view).items():
            for byte in bytes_:
                claimants.setdefault(byte, set()).add((view.name, block))
    groups: dict[tuple[str, ...], list[int]] = {}
    for byte, who in claimants.items():
        if len({block for _, block in who}) > 1:
            groups.setdefault(tuple(v.name for v in views if v.name in {name for name, _ in who}), []).append(byte)
    for names, bytes_ in groups.items():
        bad = {name: dict.fromkeys(range(9), set(bytes_)) for name in names}
        cells = touching([view for view in views if view.name in names], bad)
        yield "collision", names, cells.total(), len(bytes_), min(bytes_)


@pytest.mark.parametrize("seed", SEEDS)
def test_overlay_is_that_of_the_account(seed):
    views = scene(seed)
    found = claimed(views, [Overlay(tuple(view.name for view in views))])
    assert sorted(map(record, found)) == sorted(tuple(want) for *want, _ in expected_overlay(views))
    first_of = {names: first for _, names, _, _, first in expected_overlay(views)}
    for finding in found:
        first, second, *_ = finding.example
        assert first.index[0] != second.index[0] and {p.view for p in finding.example} == {*finding.views}
        check_places(finding, first_of[finding.views], views)


def check_places(finding, byte: int, views) -> None:
    """Check that each place of an example is an element of its view and covers the byte."""
    named = {view.name: view for view in views}
    for place in finding.example:
        bytes_ = range(place.start_bytes, place.stop_bytes)
        assert byte in bytes_ and bytes_ == elements(named[place.view])[place.index]


def expected_covers(extent, content, neighbours):
    taken = blocks_of(extent)
    missing = {
        view.name: {b: bytes_ - taken[b] for b, bytes_ in blocks_of(view).items() if b in taken} for view in content
    }
    foreign = {
        view.name: {
            block: bytes_ & set().union(*(there for other, there in taken.items() if other != block))
            for block, bytes_ in blocks_of(view).items()
        }
        for view in neighbours
    }
    for kind, views, bad in (("truncated", content, missing), ("oversized", neighbours, foreign)):
        bytes_ = set().union(*(there for by_block in bad.values() for there in by_block.values()))
        if bytes_:
            cells = touching(views, bad)
            names = dict.fromkeys((extent.name, *(v.name for v in views if cells[v.name])))
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
    assert list(map(record, found)) == list(expected_covers(extent, content, neighbours or content))
    for finding in found:
        assert finding.text.startswith(f"{finding.bytes} byte")
        check_places_of_extent(finding, extent, content, neighbours or content)


def check_places_of_extent(finding, extent, content, neighbours):
    """The example shows a block of the extent with the byte of another block, or content that its block lacks."""
    taken, (first, *others) = blocks_of(extent), finding.example
    if finding.kind == "truncated":
        bad = {v.name: {b: there - taken[b] for b, there in blocks_of(v).items() if b in taken} for v in content}
        shown = finding.example
    else:
        bad = {
            v.name: {b: there & set().union(*(taken[o] for o in taken if o != b)) for b, there in blocks_of(v).items()}
            for v in neighbours
        }
        shown = others
    byte = min(byte for by_block in bad.values() for there in by_block.values() for byte in there)
    check_places(finding, byte, [extent, *content, *neighbours])
    assert shown and all(byte in bad[p.view][p.index[0]] for p in shown)
    if finding.kind == "oversized":
        assert first.view == extent.name and byte in taken[first.index[0]]
        assert all(p.index[0] != first.index[0] for p in others)


def test_a_place_of_an_extent_is_of_the_block_that_is_wrong():
    """The second block of the extent takes bytes of block 0. Byte 2 is also in block 0 of the extent."""
    storage = Storage("s", 12)
    views = [View("blocks", storage, (3, 4), (4, 1)), View("sent", storage, (2, 8), (2, 1))]
    (finding,) = claimed(views, [Covers("sent", ("blocks",))])
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
    expected = []
    for kind, view, bytes_ in (("oversized", part, ours - theirs), ("truncated", whole, theirs - ours)):
        if bytes_:
            cells = sum(bool(bytes_ & set(there)) for there in elements(view).values())
            expected.append((kind, (part.name, "whole"), cells, len(bytes_)))
    found = claimed([part, whole], [SameBytes(part.name, "whole")])
    assert sorted(map(record, found)) == sorted(expected)


def test_the_random_pools_hold_everything_often():
    """Equal and unequal block strides, both faults of an extent, clean extents and short extents all occur."""
    counts: Counter = Counter()
    for seed in SEEDS:
        views = scene(seed)
        counts["equal" if len({v.stride[0] * v.itemsize for v in views}) == 1 else "unequal"] += 1
        counts["clean" if not list(expected_overlay(views)) else "collision"] += 1
        counts["fewer blocks"] += len(views) > 1 and views[0].shape[0] < views[1].shape[0]
        for kind, *_ in expected_covers(views[0], views[1:], views[1:]) if views[1:] else ():
            counts[kind] += 1
    assert min(counts.values()) >= 20 and len(counts) == 7


def pages(name: str, width: int, blocks: int = 4, step: int = 16, offset: int = 0, storage: Storage = POOL) -> View:
    return View(name, storage, (blocks, width), (step, 1), offset, axes=("block", "byte"))


def test_an_exact_extent_is_clean_and_padding_may_be_covered():
    views = [pages("content", 12), pages("tight", 12), pages("with padding", 16)]
    assert not claimed(views, [Covers("tight", ("content",)), Covers("with padding", ("content",))])


def test_a_block_range_of_the_content_is_its_first_blocks():
    """An extent of two blocks must cover two blocks, and may not touch other blocks."""
    views = [pages("content", 16), pages("two", 16, blocks=2), pages("two, long", 24, blocks=2)]
    assert not claimed(views, [Covers("two", ("content",))])
    (finding,) = claimed(views, [Covers("two, long", ("content",))])
    assert record(finding) == ("oversized", ("two, long", "content"), 16, 16)


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
            assert list(map(record, found)) == list(expected_covers(sent, [cache], [cache]))
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
            Covers("a", ("b",)),
            "a lies in storage pool, and b in another one",
        ),
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
    assert "disjoint" in "".join(result.checked) and "equal block ids" not in "".join(result.checked)


def test_blocks_that_an_extent_does_not_reach_are_named():
    views = [pages("content", 16), pages("two", 16, blocks=2), pages("three", 16, blocks=3), pages("four", 16)]
    left = {view.name: audit_views(views, [Covers(view.name, ("content",))]) for view in views}
    assert all(result.clean for result in left.values())
    assert left["two"].notes == ("blocks 2 to 3 of content were not judged: two has only 2 blocks",)
    assert left["three"].notes == ("block 3 of content was not judged: three has only 3 blocks",)
    assert left["four"].notes == left["content"].notes == ()


@pytest.mark.parametrize("seed", range(100))
def test_claims_that_share_neighbours_say_what_each_says_alone(seed):
    views = scene(seed) + [replace(view, name=f"w{n}") for n, view in enumerate(scene(seed + 1))]
    names = tuple(view.name for view in views)
    claims = [Covers(view.name, (names[n - 1],), names) for n, view in enumerate(views)]
    alone = [finding for claim in claims for finding in claimed(views, [claim])]
    assert claimed(views, claims) == list(dict.fromkeys(alone))
    want = [item for n, extent in enumerate(views) for item in expected_covers(extent, [views[n - 1]], views)]
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
