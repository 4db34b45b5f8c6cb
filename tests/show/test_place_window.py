"""The picture of a mistake: every byte of it against enumeration, and its places against the findings."""

import random
from functools import cache

from kvviz.audit.causes import Diagnosis, diagnose
from kvviz.audit.claims import Covers, Disjoint, Follows, Overlay
from kvviz.audit.rightful import rightful_places
from kvviz.audit.view import Storage, View
from kvviz.show.place_picture import as_text, picture
from kvviz.show.place_window import NEAR_BYTES, OUTSIDE, PlaceWindow, place_window
from tests.audit.mutations import mutated

SEEDS = 80


def window_of(views, claims, found: Diagnosis | None = None, all_found=None) -> PlaceWindow:
    all_found = all_found or diagnose(views, claims)
    repaired = {view.name: view for one in all_found for view in one.repaired}
    return place_window(found or all_found[0], views, claims, repaired)


@cache
def windows() -> list[tuple]:
    """Return views, claims, all diagnoses and the window of one diagnosis, for caches with one mistake."""
    made = []
    for seed in range(SEEDS):
        sound, _, _ = mutated(random.Random(seed))
        views, claims = list(sound.views.values()), sound.claims
        all_found = diagnose(views, claims)
        for found in all_found:
            window = window_of(views, claims, found, all_found)
            if window is not None:
                made.append((views, claims, all_found, window))
    return made


def named_at(views, storage, byte: int) -> set[str]:
    return {view.name for view in views if view.storage == storage and byte in bytes_of(view)}


@cache
def bytes_of(view: View) -> frozenset[int]:
    return frozenset(view.all_bytes.tolist())


def test_every_byte_against_enumeration():
    """The names on each byte are views that use it. The owner is one of the views that belong there.

    The views of the finding, and views that a claim keeps apart from them, are all named. Other views are named where
    none of these uses the byte.
    """
    checked = 0
    for views, claims, all_found, window in windows():
        if window.used == "taken by":
            continue
        places = rightful_places(views, claims)
        rightful = places.moved | {view.name: view for one in all_found for view in one.repaired}
        hidden = places.references | (places.extents - {*window.finding.views})
        shown = [view for view in views if view.name not in hidden]
        linked = {*window.finding.views}
        linked |= {
            name for claim in claims if isinstance(claim, Disjoint) and linked & {*claim.views} for name in claim.views
        }
        homes = [rightful.get(view.name, view) for view in shown]
        for row in window.rows:
            for span in (span for span in row.users if span.state != OUTSIDE):
                for byte in range(span.start, span.stop):
                    users = named_at(shown, row.storage, byte)
                    assert users & linked <= {*span.names} <= users and bool(span.names) == bool(users), byte
                    checked += 1
            for span in (span for span in row.owners if span.state != OUTSIDE):
                for byte in range(span.start, span.stop):
                    owners = named_at(homes, row.storage, byte)
                    assert {*span.names} <= owners and bool(span.names) == bool(owners), byte
    assert checked > 2_500


def test_what_an_extent_takes_against_enumeration():
    checked = 0
    for views, _, _, window in windows():
        if window.used != "taken by":
            continue
        (row,), extent = window.rows, next(view for view in views if view.name == window.finding.views[0])
        ((mark,),) = (row.marks,)
        lane = row.owners if window.finding.kind == "truncated" else row.users
        (name,) = next(span.names for span in lane if span.start <= mark.start < span.stop)
        block = int(name.rsplit(" ", 1)[1])  # a sound cache has one entry of the extent per block
        taken = set(extent.bytes_of(extent.starts[block]).ravel().tolist())
        for span in (span for span in row.users if span.state != OUTSIDE):
            for byte in range(span.start, span.stop):
                assert bool(span.names) == (byte in taken), byte
                checked += 1
        assert (mark.start in taken) == (window.finding.kind == "oversized")
    assert checked > 100


def test_the_places_are_those_of_the_finding():
    for *_, window in windows():
        if not window.arrow:
            continue
        marks = {mark.text: (row.storage.name, mark) for row in window.rows for mark in row.marks}
        (home, belongs), (there, lies) = marks["belongs here"], marks["lies here"]
        assert (home, belongs.start) != (there, lies.start)
        if window.finding.kind in ("misplaced", "permuted"):
            first, second = window.finding.example[:2]
            assert (lies.start, belongs.start) == (first.start_bytes, second.start_bytes)
        reach = max(lies.stop, belongs.stop) - min(lies.start, belongs.start)
        assert len(window.rows) == (1 if home == there and reach <= NEAR_BYTES else 2)
        assert all(row.start <= mark.start < row.stop for row in window.rows for mark in row.marks)
        assert picture(window, alone=False).count('<rect class="mark"') == 2


def test_the_rows_are_whole():
    """The spans of a row are in order and without gaps, and the text names all of them."""
    for *_, window in windows():
        for row in window.rows:
            for spans in filter(None, (row.owners, row.users)):
                assert [span.start for span in spans] == [row.start, *(span.stop for span in spans[:-1])]
                assert spans[-1].stop == row.stop
                assert all(f"[{span.start}, {span.stop})" in as_text(window) for span in spans)


def test_a_place_outside_the_storage():
    view = View("v", Storage("s", 40), (50,), (1,))
    (row,) = window_of([view], ()).rows
    assert [(span.state, span.start) for span in row.users][-1] == (OUTSIDE, 40)
    assert [span.state for span in row.users] == ["right", OUTSIDE] and row.marks[0].start == 40
    below = View("v", Storage("s", 40), (8,), (1,), -4)
    (row,) = window_of([below], ()).rows
    assert [(span.state, span.stop) for span in row.users][:2] == [(OUTSIDE, 0), ("right", 4)]


def test_equal_blocks_of_an_overlay_are_no_mistake():
    storage = Storage("s", 72)
    a, b = View("a", storage, (4, 16), (16, 1)), View("b", storage, (4, 16), (16, 1), 8)
    window = window_of([a, b], [Overlay(("a", "b"))])
    states = {(span.state, len(span.names)) for row in window.rows for span in row.users}
    assert {("right", 2), ("contested", 2)} <= states


def test_equal_ids_of_unequal_blocks_are_no_mistake():
    storage = Storage("s", 72)
    a, b = View("a", storage, (2, 32), (32, 1)), View("b", storage, (4, 16), (16, 1), 8)
    window = window_of([a, b], [Overlay(("a", "b"), blocks_per_id=(1, 2))])
    states = {(span.start, span.state) for row in window.rows for span in row.users if len(span.names) == 2}
    assert {state for start, state in states if start < 32} == {"right"} and (32, "contested") in states


def test_a_block_that_several_extents_take():
    storage, other = Storage("s", 96), Storage("t", 32)
    views = [View("data", storage, (4, 20), (24, 1)), View("scales", other, (4, 4), (4, 1))]
    views += [View("sent data", storage, (8, 10), (12, 1)), View("sent scales", other, (8, 2), (2, 1))]
    claims = [Covers(("sent data", "sent scales"), ("data", "scales"), extents_per_block=2)]
    window = window_of(views, claims)
    (row,) = window.rows
    spans = [(span.start, span.stop, span.state, span.names) for span in row.users]
    name = "sent data, entry 0 to 1"
    assert (row.storage, spans[:2]) == (storage, [(0, 10, "right", (name,)), (10, 12, "unreached", ())])
    assert (12, 22, "right", (name,)) in spans and row.marks[0].start == 10


def test_the_picture_shows_views_that_no_finding_names():
    storage = Storage("s", 96)
    views = [View(f"layer {n} data", storage, (4, 8), (24, 1), 12 * n) for n in range(2)]
    views += [View("layer 0 scale", storage, (4,), (3,), 2, 4), View("layer 1 scale", storage, (4,), (6,), 5, 4)]
    claims = [Follows(f"layer {n} scale", f"layer {n} data", 8) for n in range(2)]
    window = window_of(views, claims)
    for lane in ("owners", "users"):
        names = {name for row in window.rows for span in getattr(row, lane) for name in span.names}
        assert names >= {"layer 0 data", "layer 1 data"}


def test_two_groups_of_one_size_have_two_labels():
    storage = Storage("s", 32)
    views = [View(f"v{n}", storage, (8,), (1,), 8 * (n // 2)) for n in range(4)]
    claims = [Disjoint(("v0", "v1")), Disjoint(("v2", "v3"))]
    html = picture(window_of(views, claims), alone=True)
    assert "<b>2 views</b> v0, v1" in html and "<b>2 views b</b> v2, v3" in html


def test_a_transfer_that_is_too_short():
    storage = Storage("s", 96)
    views = [View("content", storage, (4, 24), (24, 1)), View("sent", storage, (4, 20), (24, 1))]
    window = window_of(views, [Covers("sent", ("content",))])
    assert window.used == "taken by" and window.rows[0].marks[0].start == 20
    states = [(span.start, span.stop, span.state) for span in window.rows[0].users]
    assert states == [(8, 20, "right"), (20, 40, "unreached")]
