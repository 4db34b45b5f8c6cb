"""Tables as pieces: the pieces have the bytes of the entries, also with holes, repeats and several tables."""

import json
import random

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import BelongsAt, Disjoint, SameBytes
from kvviz.audit.pieces import pieces
from kvviz.audit.view import Storage, View
from tests.golden import FOLDER

CACHE = View("K", Storage("s", 200), (8, 3), (12, 2), 1, 2, axes=("block", "element"))


def bytes_of(views):
    return sorted(byte for view in views for byte in view.all_bytes.tolist())


@pytest.mark.parametrize("seed", range(300))
def test_pieces_have_the_bytes_of_the_entries(seed):
    draw = random.Random(seed)
    cache = View("K", Storage("s", 400), (8, 3), (draw.choice((-12, 12)), 2), 100, 2)
    length = draw.randint(0, 9)
    tables = {name: [draw.randint(-1, 7) for _ in range(length)] for name in "abc"[: draw.randint(1, 3)]}
    found = pieces(cache, tables)
    for name, table in tables.items():
        entries = [View("e", cache.storage, (3,), (2,), 100 + cache.stride[0] * i, 2) for i in table if i >= 0]
        assert bytes_of(found[name]) == bytes_of(entries)
        assert sum(view.shape[0] for view in found[name]) == len(entries)


def test_a_ring_and_a_table_with_a_hole():
    found = pieces(CACHE, {"window": [5, 6, 7, 0, -1, 2, 4]})["window"]
    assert [(view.name, view.shape[0], view.offset) for view in found] == [
        ("window 0 to 2", 3, 61), ("window 3", 1, 1), ("window 5 to 6", 2, 25),
    ]  # fmt: skip
    assert found[2].stride == (24, 2)


def test_a_block_that_a_table_names_twice_is_a_collision():
    """Position 8 of a ring of 8 slots writes the slot of position 0: 3 elements of 2 bytes."""
    found = pieces(CACHE, {"ring": [position % 8 for position in range(9)]})["ring"]
    (finding,) = audit_views(found, [Disjoint(tuple(view.name for view in found))]).findings
    assert (finding.kind, finding.views, finding.bytes) == ("collision", ("ring 0 to 7", "ring 8"), 6)


def test_a_save_of_a_table_must_have_the_bytes_of_the_table():
    """The save takes blocks 5 to 8 in one run. The table has the blocks 5, 6, 7 and 0: block 0 is missing."""
    cache = View("cache", Storage("s", 108), (9, 12), (12, 1))
    table = pieces(cache, {"request": [5, 6, 7, 0]})["request"]
    saved = View("saved", cache.storage, (48,), (1,), 60)
    names = tuple(view.name for view in table)
    truncated, oversized = audit_views([*table, saved], [SameBytes("saved", names)]).findings
    assert (truncated.kind, truncated.bytes, truncated.example[0].start_bytes) == ("truncated", 12, 0)
    assert (oversized.kind, oversized.bytes, oversized.example[0].start_bytes) == ("oversized", 12, 96)
    assert truncated.text == "saved lacks 12 bytes of request 0 to 2 and request 3"


def test_slots_of_a_rank_that_leave_the_blocks_of_the_request():
    """Two ranks, blocks of 4 tokens, runs of 3 tokens per rank: 3 does not divide 4.

    The released vLLM refuses this. Without the refusal, it would compute these slots: 4 tokens of rank 0 lie outside
    the blocks of the request, and two tokens have one slot.
    """
    rows = json.loads((FOLDER / "vllm_dcp_slots.json").read_text())
    row = next(row for row in rows if row.get("unchecked_slots_outside_the_request") == [4, 0])
    rank_0, rank_1 = row["unchecked_slots"]
    cache = View("K", Storage("cache", 256 * 8), (256, 8), (8, 1), axes=("slot", "byte"))
    blocks = View("K", cache.storage, (64, 4, 8), (32, 8, 1))
    found = pieces(cache, {"rank 0": rank_0, "rank 1": rank_1})
    request = pieces(blocks, {"block": row["block_table"][0]})["block"]
    for rank, outside, twice in (("rank 0", 4, 1), ("rank 1", 0, 0)):
        names = tuple(view.name for view in found[rank])
        result = audit_views(
            [*found[rank], *request], [SameBytes(names, tuple(view.name for view in request)), Disjoint(names)]
        )
        assert sum(finding.bytes for finding in result.of_kind("oversized")) == outside * 8
        assert sum(finding.bytes for finding in result.of_kind("collision")) == twice * 8
    assert sum(view.shape[0] for view in found["rank 0"]) == 25


def test_two_tables_are_compared_piece_by_piece():
    """The ring of 6 slots was taken for a ring of 8: positions 6 and 7 are misplaced, 2 x 3 elements."""
    found = pieces(CACHE, {"written": [p % 8 for p in range(8)], "meant": [p % 6 for p in range(8)]})
    pairs = list(zip(found["written"], found["meant"], strict=True))
    result = audit_views([view for pair in pairs for view in pair], [BelongsAt(a.name, b.name) for a, b in pairs])
    (finding,) = result.findings
    assert (finding.kind, finding.views, finding.elements, finding.bytes) == ("misplaced", ("written 6 to 7",), 6, 12)


@pytest.mark.parametrize(
    ("view", "tables", "said"),
    [
        (View("x", CACHE.storage, (), ()), {"t": [0]}, "x has no axis: a table selects entries of the first axis"),
        (CACHE, {"t": [0], "u": [0, 1]}, "the tables differ in length: t has 1, u has 2 entries"),
        (
            CACHE,
            {"t": [0, 8]},
            'entry 1 of t is 8, but K has the entries 0 to 7: use the claim "maps"',
        ),
        (CACHE, {"t": [-2]}, "entry 0 of t is -2"),
    ],
)
def test_errors_say_which_entry_is_wrong(view, tables, said):
    with pytest.raises(ValueError, match=said):
        pieces(view, tables)
