"""The work limit: it is counted, it is shared, and what was found before it is kept."""

import numpy as np
import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.budget import TooMuchWorkError, limited, spend
from kvviz.audit.byte_sets import nested_parts
from kvviz.audit.causes import diagnose
from kvviz.audit.claims import BelongsAt, Disjoint
from kvviz.audit.compare import Piece, Transfer
from kvviz.audit.findings import Finding, Place
from kvviz.audit.rank_bytes import Rank
from kvviz.audit.view import Storage, View

POOL = Storage("pool", 1 << 40)


def irregular(name: str, number: int) -> View:
    return View(name, POOL, (680, 64), ((997, 1009)[number % 2], 13), 7 * number)


def test_work_is_refused_before_it_is_done():
    with limited(10) as budget:
        spend(7)
        with pytest.raises(TooMuchWorkError, match="10 units is reached: 3 are left, and this step needs 4"):
            spend(4)
        assert budget.left == 3
        spend(3)
    spend(1 << 60)  # outside of a limit nothing is counted


def test_an_inner_limit_is_the_outer_limit():
    with limited(10) as outer, limited(1000) as inner:
        assert inner is outer


def test_findings_before_the_limit_stay():
    views = [View("a", POOL, (4,), (1,)), View("b", POOL, (4,), (1,), 2), *(irregular(f"v{n}", n) for n in range(4))]
    claims = [Disjoint(("a", "b")), Disjoint(tuple(f"v{n}" for n in range(4))), BelongsAt("a", views[1])]
    whole = audit_views(views, claims)
    with limited(3000):
        part = audit_views(views, claims)
    assert not whole.not_judged and whole.findings[0] == part.findings[0] and part.findings[0].bytes == 2
    (open_,) = (finding for finding in part.not_judged if finding.kind == "collision")
    assert open_.views == ("v0", "v1", "v2", "v3") and open_.text.startswith("not judged: the work limit of 3,000")
    assert not part.clean and part.verdict.startswith("not all judged: ") and "collision (not judged): v0" in str(part)
    assert "not judged: 4 data views are disjoint" in part.checked


def test_nothing_is_proved_after_the_limit():
    views = [View(f"layer {n} K", POOL, (4, 8), (8, 1)) for n in range(3)]
    claims = [Disjoint(tuple(view.name for view in views))]
    result = audit_views(views, claims)
    (one,) = diagnose(views, claims, result)
    assert one.proved
    with limited(1000):
        assert not any(one.proved for one in diagnose(views, claims, result))


def test_what_was_not_judged_is_not_diagnosed():
    open_ = Finding("collision", ("a",), "pool", None, None, text="not judged: x", judged=False)
    result = audit_views([View("a", POOL, (4,), (1,))])
    assert diagnose([View("a", POOL, (4,), (1,))], [], type(result)((open_,), ())) == ()


def test_a_billion_parts_are_refused_before_they_are_listed():
    with pytest.raises(TooMuchWorkError, match="too many overlapping elements"):
        nested_parts([(1, 10**9), (1, 10**9)], 1, "v")


def test_records_hold_python_integers_and_tuples():
    place = Place("a", [np.int32(1), np.int64(2)], "a", np.int32(3), np.int8(4))
    finding = Finding("collision", ["a", "b"], "pool", np.int32(7), np.int64(8), [place], [["a", np.int16(2)]])
    assert (finding.views, finding.example, finding.hits) == (("a", "b"), (place,), (("a", 2),))
    numbers = (finding.elements, finding.bytes, finding.hits[0][1], *place.index, place.start_bytes, place.stop_bytes)
    assert {type(number) for number in numbers} == {int} and hash(finding)


def test_records_of_a_transfer_hold_python_integers_and_tuples():
    piece = Piece(np.int32(0), np.int64(1), "a", "b", np.int32(70_000), nbytes=np.int8(3))
    rank = Rank([View("a", POOL, (4,), (1,))], {"head": np.arange(2)}, [range(3)], np.int32(2), np.int32(1))
    transfer = Transfer([rank], [rank], [piece])
    assert {type(number) for number in (piece.sender, piece.receiver, piece.from_byte, piece.nbytes)} == {int}
    assert (rank.holds, rank.blocks, transfer.pieces) == ({"head": (0, 1)}, (range(3),), (piece,))
    assert {type(number) for number in (*rank.holds["head"], rank.world, rank.place)} == {int}
