"""The audit against a byte-by-byte account in plain Python, over random small views, and the text of its findings."""

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvviz.audit.audit import audit_scales, audit_views
from kvviz.audit.claims import Aligned, BelongsAt, Disjoint, Follows, Maps
from kvviz.audit.findings import FRAME, KINDS, LOOK_ELSEWHERE, Audit, Finding, FindingKind, Place, get_kind
from kvviz.audit.view import Storage, View

SEEDS = range(400)
A, B = Storage("A", 40), Storage("B", 24)


def elements(view: View) -> dict[tuple[int, ...], range]:
    """Return the bytes of each index, in the order of the indices."""
    found = {}
    for index in product(*map(range, view.shape)):
        start = (view.offset + sum(i * step for i, step in zip(index, view.stride, strict=True))) * view.itemsize
        found[index] = range(start, start + view.itemsize)
    return found


def account(views) -> dict[int, set[tuple[str, tuple[int, ...]]]]:
    """Return who claims each byte: byte -> {(view, index)}."""
    claimed: dict[int, set] = {}
    for view in views:
        for index, bytes_ in elements(view).items():
            for byte in bytes_:
                claimed.setdefault(byte, set()).add((view.name, index))
    return claimed


def place(view: View, index: tuple[int, ...]) -> tuple:
    bytes_ = elements(view)[index]
    return view.name, index, bytes_.start, bytes_.stop


def random_view(draw: random.Random, name: str, storage: Storage) -> View:
    """Return any view: with gaps, negative steps, steps of 0, empty axes, or elements outside the storage."""
    shape = tuple(draw.choice((0, 1, 2, 2, 3, 3)) for _ in range(draw.randint(0, 3)))
    stride = tuple(draw.randint(-2, 6) for _ in shape)
    itemsize = draw.choice((1, 1, 2, 4))
    offset = draw.randint(-1, storage.nbytes // itemsize // draw.choice((1, 3)))
    role, read_only = draw.choice(("data", "scale")), draw.random() < 0.2
    return View(name, storage, shape, stride, offset, itemsize, role=role, read_only=read_only)


def rearranged(draw: random.Random, view: View, storage: Storage) -> View:
    """Return a view of the same shape: shifted, stretched, reversed, with swapped strides, elsewhere, or unchanged."""
    stride, offset = list(view.stride), view.offset
    change = draw.choice(("none", "shift", "stretch", "swap", "reverse", "elsewhere"))
    if change == "shift":
        offset += draw.randint(-2, 3)
    if change == "stretch":
        stride = [step + draw.randint(0, 1) for step in stride]
    if change == "swap":
        draw.shuffle(stride)
    if change == "reverse" and view.shape and view.shape[0]:
        offset, stride[0] = offset + stride[0] * (view.shape[0] - 1), -stride[0]
    home = (B if storage is A else A) if change == "elsewhere" else storage
    return View(view.name, home, view.shape, tuple(stride), offset, view.itemsize, role=view.role)  # a place is written


def scene(seed: int):
    """Return views in two storages, a claim that some are disjoint, and rightful places for some."""
    draw = random.Random(seed)
    views = [random_view(draw, f"v{n}", draw.choice((A, A, B))) for n in range(draw.randint(1, 7))]
    named = views if draw.random() < 0.5 else draw.sample(views, draw.randint(0, len(views)))
    disjoint = Disjoint(tuple(view.name for view in named))
    placed = draw.sample(views, draw.randint(0, min(2, len(views))))
    homes = [rearranged(draw, view, view.storage) for view in placed]
    homes = [replace(home, name=draw.choice((home.name, f"home of {home.name}"))) for home in homes]
    claims = [disjoint, *(BelongsAt(view.name, home) for view, home in zip(placed, homes, strict=True))]
    return views, claims


def record(finding) -> tuple:
    """Return a finding as a tuple like those of the account. The owner of a misplaced place is checked elsewhere."""
    places = finding.example[:2] if finding.kind in ("misplaced", "permuted") else finding.example
    example = tuple((p.view, p.index, p.start_bytes, p.stop_bytes) for p in places)
    return finding.kind, finding.views, finding.storage, finding.elements, finding.bytes, example


def expected_of_one(view: View):
    """Yield the findings out_of_bounds and self_overlap of one view."""
    claimed, inside = account([view]), range(view.storage.nbytes)
    outside = {index: bytes_ for index, bytes_ in elements(view).items() if any(b not in inside for b in bytes_)}
    if outside:
        first = min(outside, key=lambda index: outside[index].start)
        count = len({b for b in claimed if b not in inside})
        yield "out_of_bounds", (view.name,), view.storage.name, len(outside), count, (place(view, first),)
    shared = {byte: who for byte, who in claimed.items() if len(who) > 1}
    if shared and not view.read_only:
        touching = {index for who in shared.values() for _, index in who}
        first = min(index for _, index in shared[min(shared)])
        yield "self_overlap", (view.name,), view.storage.name, len(touching), len(shared), (place(view, first),)


def expected_collisions(views):
    for storage in dict.fromkeys(view.storage for view in views):
        there = [view for view in views if view.storage == storage]
        groups: dict[tuple[str, ...], dict[int, set]] = {}
        writers = {view.name for view in there if not view.read_only}
        for byte, who in account(there).items():
            names = {name for name, _ in who}
            if len(names) > 1 and names & writers and 0 <= byte < storage.nbytes:
                groups.setdefault(tuple(v.name for v in there if v.name in names), {})[byte] = who
        for names, bytes_ in sorted(groups.items(), key=lambda item: min(item[1])):
            members = [view for view in there if view.name in names]
            cells = set().union(*bytes_.values())
            first = bytes_[min(bytes_)]
            example = tuple(place(v, min(index for name, index in first if name == v.name)) for v in members)
            yield "collision", names, storage.name, len(cells), len(bytes_), example


def expected_misplaced(view: View, rightful: View):
    ours, theirs = elements(view), elements(rightful)
    elsewhere = view.storage != rightful.storage
    wrong = [index for index in ours if elsewhere or ours[index].start != theirs[index].start]
    if wrong:
        starts = [sorted(bytes_.start for bytes_ in map_.values()) for map_ in (ours, theirs)]
        kind = "permuted" if starts[0] == starts[1] and not elsewhere else "misplaced"
        first = min(wrong, key=lambda index: ours[index].start)
        count = len({byte for index in wrong for byte in ours[index]})
        example = (place(view, first), place(replace(rightful, name=view.name), first))
        yield kind, (view.name,), view.storage.name, len(wrong), count, example


def expected_hits(view: View, rightful: View, owners) -> Counter:
    """Count the owners of the lowest bytes of misplaced elements. Data come first; of several owners, the last one."""
    ours, theirs, hits = elements(view), elements(rightful), Counter()
    there = owners_of(view.storage, owners)
    claimed = {owner.name: account([owner]) for owner in there}
    for index, bytes_ in ours.items():
        if view.storage == rightful.storage and bytes_.start == theirs[index].start:
            continue
        under = [owner.name for owner in there if bytes_.start in claimed[owner.name]]
        if not 0 <= bytes_.start < view.storage.nbytes:
            hits["outside the storage"] += 1
        elif not under:
            hits["padding"] += 1
        else:
            hits[f"{under[-1]}, at another index" if under[-1] == rightful.name else under[-1]] += 1
    return hits


def owners_of(storage: Storage, owners) -> list[View]:
    """Return the owners in a storage. The last one that has a byte is its owner."""
    there = [owner for owner in owners if owner.storage == storage]
    return [one for one in there if one.role != "data"] + [one for one in there if one.role == "data"]


def place_of_owner(byte: int, storage: Storage, owners) -> list[tuple]:
    """Return the owner's first element with a byte, as a list of one, or an empty list if nobody owns the byte."""
    found = [(view, i) for view in owners_of(storage, owners) for i, b in elements(view).items() if byte in b]
    return [place(view, min(i for one, i in found if one is view)) for view, _ in found[-1:]]


@pytest.mark.parametrize("seed", SEEDS)
def test_findings_are_those_of_the_account(seed):
    views, claims = scene(seed)
    named = {view.name: view for view in views}
    expected = [found for view in views for found in expected_of_one(view)]
    expected += expected_collisions([named[name] for name in claims[0].views])
    for claim in claims[1:]:
        expected += expected_misplaced(named[claim.view], claim.rightful)
    result = audit_views(views, claims)
    assert [record(finding) for finding in result.findings] == expected
    assert result.clean == (not expected)
    for finding in result.of_kind("collision"):
        assert finding.readers == tuple(name for name in finding.views if named[name].read_only)
    noted = {note.split(" is only read")[0] for note in result.notes if "is only read" in note}
    assert noted == {view.name for view in views if view.read_only and overlaps_itself(view)}


def overlaps_itself(view: View) -> bool:
    return any(len(who) > 1 for who in account([view]).values())


@pytest.mark.parametrize("seed", SEEDS)
def test_hits_are_those_of_the_account(seed):
    views, claims = scene(seed)
    named, placed = {view.name: view for view in views}, claims[1:]
    moved = {claim.view for claim in placed}
    owners = [view for view in views if view.name not in moved and not view.read_only]
    owners += [claim.rightful for claim in placed]
    moved = [f for f in audit_views(views, claims).findings if f.kind in ("misplaced", "permuted")]
    rightful = {claim.view: claim.rightful for claim in placed}
    for finding in moved:
        (name,) = finding.views
        third = [(p.view, p.index, p.start_bytes, p.stop_bytes) for p in finding.example[2:]]
        assert third == place_of_owner(finding.example[0].start_bytes, named[name].storage, owners)
        counts = [count for _, count in finding.hits]
        assert dict(finding.hits) == expected_hits(named[name], rightful[name], owners)
        assert counts == sorted(counts, reverse=True) and sum(counts) == finding.elements


def test_the_random_scenes_hold_every_kind_often():
    found = [finding for seed in SEEDS for finding in audit_views(*scene(seed)).findings]
    kinds = Counter(finding.kind for finding in found)
    assert set(kinds) == {"collision", "misplaced", "permuted", "out_of_bounds", "self_overlap"}
    assert min(kinds.values()) >= 10
    assert any(len(finding.views) >= 3 for finding in found)
    hits = {what.rpartition(", ")[2] for finding in found for what, _ in finding.hits}
    assert {"outside the storage", "padding", "at another index", "v0"} <= hits
    assert sum(audit_views(*scene(seed)).clean for seed in SEEDS) >= 10


def words(name: str, offset: int, count: int = 2, step: int = 2, storage: Storage = A, role: str = "scale") -> View:
    return View(name, storage, (count,), (step,), offset, 4, ("block",), role)


def test_readers_may_share_bytes_with_readers():
    """A reader and a writer may not share bytes."""
    views = [replace(words(name, 0), read_only=name != "w") for name in ("r", "q", "w")]
    clean = audit_views(views, [Disjoint(("r", "q"))])
    assert clean.clean and "2 scale views are disjoint, apart from 2 views that are only read" in clean.checked
    (finding,) = audit_views(views, [Disjoint(("r", "q", "w"))]).findings
    assert (finding.views, finding.readers, finding.bytes) == (("r", "q", "w"), ("r", "q"), 8)
    assert finding.text == "1 view writes here; only read: r, q"


def test_a_tile_that_is_only_read_is_a_note():
    tile = View("tile", A, (4, 8), (0, 1), 0, read_only=True)
    result = audit_views([tile])
    assert result.clean and result.notes == (
        "tile is only read, and 32 of its elements share 8 bytes: this is no error",
    )
    assert result.checked == ("1 view lies within its storage",)
    assert [f.kind for f in audit_views([replace(tile, read_only=False)]).findings] == ["self_overlap"]


def test_readers_of_drifting_strides_do_not_collide():
    """These strides have no short common period, so the views are compared pair by pair."""
    pool = Storage("pool", 400 * 10**9)
    views = [
        View("a", pool, (143_855_897,), (601,), read_only=True),
        View("b", pool, (2, 80), (45_231_795_701, 64_307_124), 31_995_320_483, read_only=True),
    ]
    assert audit_views(views, [Disjoint(("a", "b"))]).clean
    views[0] = replace(views[0], read_only=False)
    (finding,) = audit_views(views, [Disjoint(("a", "b"))]).findings
    assert (finding.bytes, finding.readers) == (2, ("b",))


def test_one_group_is_one_finding_however_many_claim_it():
    (finding,) = audit_views(
        [words(f"v{n}", 1) for n in range(28)], [Disjoint(tuple(f"v{n}" for n in range(28)))]
    ).findings
    assert (finding.kind, len(finding.views), finding.elements, finding.bytes) == ("collision", 28, 56, 8)
    assert [place.view for place in finding.example] == ["v0", "v27"]


def test_views_that_no_claim_names_may_overlay():
    assert audit_views([words("a", 0), words("b", 0)]).clean
    assert audit_views([words("a", 0), words("b", 0), words("c", 1)], [Disjoint(("a", "c"))]).clean


def test_equal_addresses_in_two_storages_do_not_overlap():
    assert audit_views([words("a", 0), words("b", 0, storage=B)], [Disjoint(("a", "b"))]).clean


def test_nothing_is_clean():
    assert audit_views([]).clean and audit_views([], [Disjoint(())]).clean


def test_the_right_bytes_in_another_storage_are_misplaced():
    (finding,) = audit_views([words("a", 1)], [BelongsAt("a", words("a", 1, storage=B))]).findings
    assert (finding.kind, finding.elements, finding.hits) == ("misplaced", 2, (("padding", 2),))


def test_kinds_are_asked_for_by_name():
    result = audit_views([words("a", 0), words("b", 1, step=-4)], [Disjoint(("a", "b")), BelongsAt("a", words("a", 2))])
    assert [finding.kind for finding in result.of_kind("out_of_bounds")] == ["out_of_bounds"]
    assert result.of_kind("collision") == ()
    assert len(result.of_kind("misplaced")) == 1


@pytest.mark.parametrize(
    ("views", "claims", "said"),
    [
        (["a", "b", "a", "b", "c"], [], "view names must differ: a, b given more than once"),
        (["a"], [Disjoint(("a", "z"))], "names the view 'z', which is not among the 1 views"),
        (["a", "b"], [BelongsAt("z", words("z", 0))], "names the view 'z', which is not among the 2 views"),
        (["a"], [BelongsAt("a", words("home", 0, count=3))], r"a has shape \(2,\) .* \(3,\)"),
    ],
)
def test_names_and_shapes_must_fit(views, claims, said):
    with pytest.raises(ValueError, match=said):
        audit_views([words(name, 0) for name in views], claims)


def test_scales_are_held_against_the_owner_of_their_name():
    owners = [words("K data", 0, role="data"), words("K scale", 1)]
    assert audit_scales(owners, owners[1:]).clean
    moved = audit_scales(owners, [words("K scale", 2)])
    assert [finding.kind for finding in moved.findings] == ["collision", "misplaced"]
    assert moved.findings[1].hits == (("K data", 1), ("padding", 1))
    with pytest.raises(ValueError, match="'V scale'.*not among the 2 views"):
        audit_scales(owners, [words("V scale", 1)])


def test_clean_says_where_to_look_next():
    views = [words("a", 0), words("b", 1), words("d", 4, role="data")]
    claims = [Disjoint(("a", "b")), Disjoint(("a", "d")), *(BelongsAt(n, words(n, k)) for k, n in enumerate("ab"))]
    assert LOOK_ELSEWHERE.startswith("clean: every claim holds.")
    assert "ordering" in LOOK_ELSEWHERE and "stale" in LOOK_ELSEWHERE
    assert str(audit_views(views, claims)) == (
        f"{LOOK_ELSEWHERE}\n"
        "checked: 3 views lie within their storages; 3 views do not overlap themselves; 2 scale views are disjoint; "
        "2 views (1 scale, 1 data) are disjoint; 2 scale views lie at their rightful places"
    )


def test_scales_that_nobody_places_are_noted():
    a, b, data = words("a", 0), words("b", 1), words("d", 2, role="data")
    apart = Disjoint(("a", "b", "d"))
    (note,) = audit_views([a, b, data], [apart, BelongsAt("a", words("a", 0))]).notes
    assert "says where 1 of 2 scale views belong" in note
    assert audit_views([a, b, data], [apart, BelongsAt("a", "b")]).notes == ()
    (note,) = audit_views([data, words("e", 1, role="data")], [Disjoint(("d", "e"))]).notes
    assert note.startswith("no scale view was given")
    assert audit_views([a, b, data]).notes == ()


def test_a_collision_in_words():
    result = audit_views([words("a", 0), words("b", 2)], [Disjoint(("a", "b"))])
    assert str(result) == (
        "collision: a, b: 2 elements, 4 bytes of A\n"
        "  first: a [block 1] at bytes [8, 12)\n"
        "  first: b [block 0] at bytes [8, 12)\n"
        'note: no claim "belongs_at" or "follows" says where 2 of 2 scale views belong: they may be misplaced\n'
        "checked: 2 views lie within their storages; 2 views do not overlap themselves; "
        "failed: 2 scale views are not disjoint"
    )


def test_a_misplaced_view_in_words():
    result = audit_views([words("a", 2, count=4), words("b", 4, role="data")], [BelongsAt("a", words("a", 0, count=4))])
    assert str(result.findings[0]) == (
        "misplaced: a: 4 elements, 16 bytes of A\n"
        "  first: a [block 0] at bytes [8, 12)\n"
        "  belongs: a [block 0] at bytes [0, 4)\n"
        "  belongs there: a [block 1] at bytes [8, 12)\n"
        "  lands on b: 2\n"
        "  lands on a, at another index: 1\n"
        "  lands on padding: 1"
    )


def test_a_place_is_named_by_the_view_that_lies_there():
    """read[1] belongs at byte 1 and lies at byte 2. The view that lies at byte 1 is the rightful one."""
    storage = Storage("s", 4)
    views = [View("rightful", storage, (3,), (1,)), View("read", storage, (3,), (1,), 1)]
    (finding,) = audit_views(views, [BelongsAt("read", "rightful")]).findings
    assert str(finding) == (
        "misplaced: read: 3 elements, 3 bytes of s\n"
        "  first: read [axis 0 0] at bytes [1, 2)\n"
        "  belongs: read [axis 0 0] at bytes [0, 1)\n"
        "  belongs there: rightful [axis 0 1] at bytes [1, 2)\n"
        "  lands on rightful, at another index: 2\n"
        "  lands on padding: 1"
    )


def test_a_rightful_place_never_has_the_name_of_another_view():
    storage = Storage("s", 8)
    views = [View("a", storage, (2,), (1,)), View("b", storage, (2,), (1,), 4)]
    (finding,) = audit_views(views, [BelongsAt("a", View("b", storage, (2,), (1,), 1))]).findings
    assert [place.view for place in finding.example] == ["a", "a"] and finding.hits[0][0] == "a, at another index"
    (finding,) = audit_views(views, [BelongsAt("a", View("home", storage, (2,), (1,), 1))]).findings
    assert finding.hits == (("home, at another index", 1), ("padding", 1))


def test_of_many_names_only_some_are_printed():
    names = tuple(f"v{n}" for n in range(28))
    (finding,) = audit_views([words(name, 1) for name in names], [Disjoint(names)]).findings
    lines = str(finding).splitlines()
    assert lines[0] == "collision: v0, v1, ... 25 more, v27: 56 elements, 8 bytes of A"
    assert [line.split(" [")[0] for line in lines[1:]] == ["  first: v0", "  first: v27"]
    (four,) = audit_views([words(name, 1) for name in names[:4]], [Disjoint(names[:4])]).findings
    assert str(four).startswith("collision: v0, v1, v2, v3: 8 elements")


def test_drifting_views_out_of_place_share_one_budget():
    """Counting the owners under a misplaced view stops before the work, not after the work."""
    storage, blocks = Storage("s", 1 << 42), 50_269
    shape = (blocks, 16, 8, 128)
    views = [View(f"p{n}", storage, shape, (131_072 + 128 * n, 1, 16, 128), n * 7) for n in range(200)]
    begun = time.process_time()
    result = audit_views(views, [BelongsAt(f"p{n}", f"p{199 - n}") for n in range(100)])
    assert time.process_time() - begun < 3
    assert len(result.findings) == 100 and {finding.kind for finding in result.findings} == {"misplaced"}
    wrong = blocks - 1  # the offsets differ, and the block strides the other way round: at one block they may agree
    assert all(finding.elements >= wrong * 16 * 8 * 128 for finding in result.findings)


def test_a_claim_given_twice_is_judged_once():
    view, home = View("v", Storage("s", 64), (4,), (1,)), View("h", Storage("s", 64), (4,), (1,), 4)
    claim = BelongsAt("v", "h")
    assert audit_views([view, home], [claim, claim]) == audit_views([view, home], [claim])


def test_bytes_outside_that_are_too_much_work_are_reported_and_not_counted():
    shape, stride = (1000, 1001, 1003, 1007), (10_007_000_003, 10_007_001, 10_007, 9)
    view = View("v", Storage("s", 64), shape, stride)
    (finding,) = audit_views([view]).of_kind("out_of_bounds")
    assert finding.elements is None and "reaches bytes [0, " in finding.text and "was not counted" in finding.text


def test_views_that_overlap_themselves_share_one_budget():
    """A thousand of them give findings without counts. A small view before them is counted."""
    storage = Storage("s", 1 << 40)
    small = View("small", storage, (3, 4), (2, 1))
    views = [View(f"v{n}", storage, (2000 + n, 3000 + n), (1, 1), n) for n in range(1000)]
    first, *others = audit_views([small, *views]).findings
    account = [start for block in range(3) for start in range(2 * block, 2 * block + 4)]
    assert first.bytes == len({start for start in account if account.count(start) > 1}) == 4
    assert len(others) == 1000 and all(f.kind == "self_overlap" and not f.judged for f in others)


def test_lists_and_numpy_integers_are_claims_like_any_other():
    views = [words("a", 0), words("b", 1)]
    assert Disjoint(["a", "b"]) == Disjoint(("a", "b")) and hash(Disjoint(["a", "b"]))
    assert audit_views(views, [Disjoint(["a", "b"])]) == audit_views(views, [Disjoint(("a", "b"))])
    claim = Maps("ids", "a", np.int32(2), np.int64(1), np.uint8(8))
    assert claim == Maps("ids", "a", 2, 1, 8) and type(claim.count) is int


def test_a_kind_is_looked_up_and_an_unknown_one_names_the_nearest():
    assert get_kind("unaligned") is KINDS["unaligned"] and [kind.name for kind in KINDS.values()] == [*KINDS]
    for ask in (get_kind, audit_views([]).of_kind, lambda kind: Finding(kind, ("a",), "A", 1, 1)):
        with pytest.raises(ValueError, match="finding kind 'colision' does not exist: .*did you mean 'collision'"):
            ask("colision")


def test_a_new_kind_needs_one_record(monkeypatch):
    monkeypatch.setitem(KINDS, "twice", FindingKind("twice", "a scale is written twice", "warning", FRAME))
    finding = Finding("twice", ("a", "b"), "A", 1, 4, (Place("a", (0,), "a [block 0]", 0, 4),))
    assert (finding.severity, finding.drawing) == ("warning", FRAME)
    assert str(finding) == "twice (warning): a, b: 1 element, 4 bytes of A\n  first: a [block 0] at bytes [0, 4)"
    assert replace(finding, severity="error").severity == "error" and Audit((finding,), ()).of_kind("twice")


def test_a_failed_check_is_not_printed_as_true():
    views = [words("a", 0), words("b", 9), View("c", A, (3, 2), (1, 1))]
    result = audit_views(views, [BelongsAt("a", words("a", 0)), BelongsAt("b", words("b", 8)), Aligned("c", 8, False)])
    assert result.checked == (
        "2 other views lie within their storages",
        "2 other views do not overlap themselves",
        "failed: 1 view does not lie within its storage",
        "failed: 1 view overlaps itself",
        "1 other scale view lies at its rightful place",
        "failed: 1 scale view does not lie at its rightful place",
        "warning: 1 view does not have all rows at multiples of 8 bytes (only offsets were judged)",
    )
    cells = View("cells", A, (4, 4), (10, 1))
    scales = [View(f"s{n}", A, (4,), (10,), 4 + n) for n in range(3)]
    follows = [Follows(f"s{n}", "cells", 4) for n in range(3)]
    checked = audit_views([cells, *scales], follows).checked
    assert checked[2:] == (
        "1 other scale view follows its data",
        "failed: 2 scale views do not follow their data",
    )


def test_the_verdict_counts_errors_and_warnings():
    error = Finding("collision", ("a",), "A", 1, 1)
    warning = Finding("unaligned", ("a",), "A", 1, None, severity="warning")
    assert Audit((), ()).verdict == LOOK_ELSEWHERE
    assert Audit((warning,), ()).verdict == (
        "clean, with 1 warning (legal but slow): no error was found. " + LOOK_ELSEWHERE.partition(". ")[2]
    )
    assert Audit((error,), ()).verdict == "1 error"
    assert Audit((error, error, warning, warning), ()).verdict == "2 errors, 2 warnings (legal but slow)"
