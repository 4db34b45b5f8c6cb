"""Each kind of public report that is not in the case book: its example has the right diagnosis, or none.

Other tests of this folder hold the exact numbers of the findings of these examples.
"""

from dataclasses import replace

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.causes import diagnose
from kvviz.audit.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Covers,
    Disjoint,
    Follows,
    Maps,
    Overlay,
    SameBytes,
)
from kvviz.audit.pieces import pieces
from kvviz.audit.view import Storage, View

MEMORY, PAGE = Storage("memory", 192), Storage("page", 48)
CONTENT = View("content", MEMORY, (4, 48), (48, 1))
BLOCKS = View("blocks", Storage("s", 12), (3, 4), (4, 1))
READER = View("r", Storage("A", 40), (2,), (2,), 0, 4, read_only=True)
TILE = View("tile", READER.storage, (4, 8), (0, 1), read_only=True)
CACHE = View("cache", Storage("c", 108), (9, 12), (12, 1))


def of(storage: Storage, name: str, *numbers, **more) -> View:
    return View(name, storage, *numbers, **more)


def base_of_64_bytes():
    return [of(Storage("pool", 5 * 4096, 64, 4096), "v", (3, 64), (4096, 1))], [Aligned("v", 4096)]


def scales_behind_all_data_of_a_page():
    s = Storage("s", 96)
    views = [of(s, "X data", (2, 4, 8), (48, 8, 1)), of(s, "X scale", (2, 4), (12, 3), 2, 4, role="scale")]
    return views, [Disjoint(("X data", "X scale"))]


def a_view_one_byte_late():
    s = Storage("s", 4)
    return [of(s, "rightful", (3,), (1,)), of(s, "read", (3,), (1,), 1)], [BelongsAt("read", "rightful")]


def blocks_of_half_the_step():
    return [BLOCKS, of(BLOCKS.storage, "sent", (2, 8), (2, 1))], [Covers("sent", ("blocks",))]


def an_overlay_of_unequal_ids():
    return [BLOCKS, of(BLOCKS.storage, "other", (2, 8), (2, 1))], [Overlay(("blocks", "other"))]


def a_home_between_two_elements():
    s = Storage("s", 20)
    views = [of(s, "K data", (2, 6), (10, 1)), of(s, "K scale", (2,), (2,), 2, 4, role="scale")]
    return views, [Follows("K scale", "K data", 6)]


def sectors(blocks_per_id=()):
    pool = Storage("sectors", 576)
    places = [(f"layer {n} {half}", 32 * n + 16 * (half == "V")) for n in range(3) for half in "KV"]
    views = [of(pool, name, (6, 4, 4), (96, 4, 1), start) for name, start in places]
    views += [of(pool, f"layer 3 {half}", (18, 4, 4), (32, 4, 1), 16 * (half == "V")) for half in "KV"]
    return views, [Overlay(tuple(view.name for view in views), blocks_per_id)]


def an_extent(*numbers, **per):
    return [CONTENT, of(MEMORY, "sent", *numbers)], [Covers("sent", ("content",), **per)]


def scales_in_another_storage():
    views = [CONTENT, of(MEMORY, "sent", (4, 48), (48, 1))]
    views.append(of(Storage("scales", 32), "scale", (4, 8), (8, 1), role="scale"))
    return views, [Covers("sent", ("content", "scale"))]


def three_sections_as_one_range():
    parts = [of(PAGE, f"part {n}", (8,), (1,), 16 * n) for n in range(3)]
    return [of(PAGE, "half", (24,), (1,)), *parts], [SameBytes("half", tuple(part.name for part in parts))]


def a_table_saved_as_one_range():
    table = pieces(CACHE, {"request": [5, 6, 7, 0]})["request"]
    saved = of(CACHE.storage, "saved", (48,), (1,), 60)
    return [*table, saved], [SameBytes("saved", tuple(piece.name for piece in table))]


def a_ring_that_wraps_around():
    ring = pieces(replace(CACHE, shape=(9, 4)), {"ring": [position % 8 for position in range(9)]})["ring"]
    return ring, [Disjoint(tuple(piece.name for piece in ring))]


def slots_outside_the_request():
    made = pieces(CACHE, {"rank": [0, 1, -1, 5, 8], "block": [0, 1, 2, 3, 5]})
    names = {table: tuple(piece.name for piece in made[table]) for table in made}
    return [*made["rank"], *made["block"]], [SameBytes(names["rank"], names["block"])]


def a_table(*ids):
    return [CACHE], [Maps("slots", "cache", len(ids), table=ids)]


def values_counted_as_bytes():
    s = Storage("s", 3 * 272)
    views = [of(s, "K", (3, 4), (8, 1), 0, 34, values=32), of(s, "V", (3, 136), (272, 1), 128)]
    return views, [Disjoint(("K", "V"))]


def readers(*more):
    views = [READER, replace(READER, name="q"), *more]
    return views, [Disjoint(tuple(view.name for view in views))]


def addressed(base, unit):
    return [View("v", Storage("s", 1 << 33), (1 << 30,), (1,), 1 << 30, 4)], [Addressed("v", "int32", base, unit)]


KINDS = [  # what the example is, the cause ("": no diagnosis), the views of the diagnosis, and if the repair is proved
    ("1 base", base_of_64_bytes(), "unaligned_rows", ("v",), True),
    ("2 scales of a page", scales_behind_all_data_of_a_page(), "scale_region", ("X scale",), True),
    ("3 one byte late", a_view_one_byte_late(), "other_number", ("read",), True),
    ("3 extent", blocks_of_half_the_step(), "block_unit", ("sent",), True),
    ("3 overlay", an_overlay_of_unequal_ids(), "block_unit", ("other",), False),
    ("4 home", a_home_between_two_elements(), "rounded", ("K scale",), True),
    ("5 groups", sectors(), "block_unit", ("layer 3 K", "layer 3 V"), True),
    ("5 groups, declared", sectors((1,) * 6 + (3,) * 2), "", (), False),
    ("6 sectors", an_extent((12, 16), (16, 1)), "block_unit", ("sent",), True),
    ("6 sectors, declared", an_extent((12, 16), (16, 1), extents_per_block=3), "", (), False),
    ("6 chunks", an_extent((2, 96), (96, 1)), "block_unit", ("sent",), True),
    ("6 chunks, declared", an_extent((2, 96), (96, 1), blocks_per_extent=2), "", (), False),
    ("6 one block of four", an_extent((1, 64), (64, 1)), "other_number", ("sent",), True),
    ("6 one chunk, too short", an_extent((1, 64), (64, 1), blocks_per_extent=4), "other_number", ("sent",), True),
    ("6 two storages", scales_in_another_storage(), "width_without_scales", ("sent",), False),
    ("7 sections", three_sections_as_one_range(), "sections", ("half",), True),
    ("7 table as a range", a_table_saved_as_one_range(), "sections", ("saved",), False),
    ("7 ring", a_ring_that_wraps_around(), "table_entry", ("ring 8",), False),
    ("7 slots of a rank", slots_outside_the_request(), "table_entry", ("rank 3 to 4",), False),
    ("7 holes", a_table(0, -1, 8), "", (), False),
    ("7 an id too large", a_table(0, -1, 9), "block_unit", ("cache",), False),
    ("8 q8_0", values_counted_as_bytes(), "element_size", ("V",), True),
    ("9 readers", readers(), "", (), False),
    ("9 a writer", readers(replace(READER, name="w", read_only=False)), "one_base", ("q", "r", "w"), False),
    ("9 a tile that is read", ([TILE], []), "", (), False),
    ("9 a tile that is written", ([replace(TILE, read_only=False)], []), "broadcast", ("tile",), True),
    ("10 elements", addressed("view", "elements"), "", (), False),
    ("10 bytes of the view", addressed("view", "bytes"), "address_width", ("v",), True),
    ("10 bytes of the storage", addressed("storage", "bytes"), "address_width", ("v",), True),
]


@pytest.mark.parametrize(
    ("given", "cause", "views", "proved"), [row[1:] for row in KINDS], ids=[row[0] for row in KINDS]
)
def test_each_kind_has_its_diagnosis(given, cause, views, proved):
    result = audit_views(*given)
    found = diagnose(*given, result)
    assert [one.cause for one in found] == ([cause] if cause else [])
    if found:
        assert (found[0].views, found[0].proved) == (views, proved)
        assert set(found[0].findings) == set(result.findings)
        mended = {view.name: view for view in given[0]} | {view.name: view for view in found[0].repaired}
        assert not found[0].repaired or audit_views(list(mended.values()), given[1]).clean


def test_two_mistakes_on_one_view_have_their_own_findings():
    """The slots of a table and the type of addresses are wrong for one view. Each claim has a finding."""
    views = [View("pool", Storage("s", 1 << 17), (1 << 8, 1 << 9), (1 << 9, 1))]
    claims = [Maps("ids", "pool", 300), Addressed("pool", "int16")]
    found = diagnose(views, claims)
    assert {one.cause: [finding.elements for finding in one.findings] for one in found} == {
        "block_unit": [44], "address_width": [98304],
    }  # fmt: skip
