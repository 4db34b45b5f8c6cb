"""The challenge: each set can be solved from its files alone, and the audit agrees with a count of single bytes."""

from functools import cache

import numpy as np
import pytest

from kvviz.audit.claims import Aligned, Covers, Disjoint, Follows
from kvviz.audit.findings import KINDS
from kvviz.audit.views_file import ViewsFile, dump, load
from kvviz.challenge.faults import CLEAN, FAULTS
from kvviz.challenge.questions import CASES, FIRST_BYTE, FIXES, LEVELS, Case, challenge, check, mended

SETS = [(level, seed) for level in LEVELS for seed in range(8)]
EVERY = pytest.mark.parametrize(
    ("level", "seed"), [pytest.param(*one, marks=[pytest.mark.slow] if one[1] > 1 else []) for one in SETS]
)
NO_BYTE = ("ambiguous", "index_space", CLEAN)


@cache
def drawn(level: str, seed: int) -> tuple[Case, ...]:
    return challenge(seed, level)


@cache
def kind_of(case: Case) -> str:
    (kind,) = {finding.kind for finding in case.file.audit().findings} or {CLEAN}
    return kind


@cache
def fix_of(case: Case) -> str:
    """Return the only fix after which the file is clean, or "nothing" if the file is clean already."""
    if kind_of(case) == CLEAN:
        return "nothing"
    (fix,) = (fix for fix in FIXES if mended(case, fix).audit().clean)
    return fix


def counted_first_byte(file: ViewsFile, kind: str) -> int | None:
    """Return the first byte, found by listing every byte of every view."""
    if kind in NO_BYTE:
        return None
    named = {view.name: view for view in file.views}
    found = {
        "collision": shared,
        "misplaced": elsewhere,
        "permuted": elsewhere,
        "out_of_bounds": lambda file, named: [b for v in file.views for b in v.all_bytes if b >= v.storage.nbytes],
        "truncated": not_moved,
        "oversized": of_another_block,
        "self_overlap": lambda file, named: [b for view in file.views for b in twice(view.all_bytes)],
        "unaligned": off_the_boundary,
    }
    return int(min(found[kind](file, named)))


def twice(places) -> np.ndarray:
    values, counts = np.unique(places, return_counts=True)
    return values[counts > 1]


def shared(file, named):
    for claim in file.claims:
        if isinstance(claim, Disjoint):
            yield from twice(np.concatenate([np.unique(named[name].all_bytes) for name in claim.views]))


def elsewhere(file, named):
    for claim in file.claims:
        if isinstance(claim, Follows):
            starts = named[claim.scale].starts
            yield from starts[starts != named[claim.data].starts[..., 0] + claim.at_bytes]


def not_moved(file, named):
    for claim in file.claims:
        if isinstance(claim, Covers):
            for content in (named[name] for name in claim.content):
                for block, starts in enumerate(content.starts):
                    yield from set(starts.ravel().tolist()) - set(named[claim.extent].starts[block].ravel().tolist())


def of_another_block(file, named):
    for claim in file.claims:
        if isinstance(claim, Covers):
            owner = np.full(file.storages[0].nbytes, -1)
            for view in (named[name] for name in claim.neighbours):
                for block, starts in enumerate(view.starts):
                    owner[starts.ravel()] = block
            for block, starts in enumerate(named[claim.extent].starts):
                yield from starts[(owner[starts] >= 0) & (owner[starts] != block)]


def off_the_boundary(file, named):
    for claim in file.claims:
        if isinstance(claim, Aligned):
            rows = named[claim.view].starts[..., 0]
            yield from rows[rows % claim.boundary_bytes != 0]


def answer(case: Case) -> dict:
    kind = kind_of(case)
    return {"kind": kind, "first_byte": counted_first_byte(case.file, kind), "fix": fix_of(case)}


@EVERY
def test_each_file_has_a_kind_of_its_own(level, seed):
    kinds = [kind_of(case) for case in drawn(level, seed)]
    assert len(set(kinds)) == len(kinds) == CASES and set(kinds) <= set(LEVELS[level])
    assert kinds.count(CLEAN) == (level == "full")


@EVERY
def test_the_answer_that_is_counted_byte_by_byte_is_right(level, seed):
    for case in drawn(level, seed):
        verdict = check(case, **answer(case))
        assert verdict.solved and str(verdict).endswith(": solved"), (case, str(verdict))


@EVERY
def test_a_set_is_only_numbers_away_from_any_other(level, seed):
    """Compare names, roles, axes and claims: they depend on the level and on the number of layers alone."""

    def form(file):
        views = [(view.name, view.role, view.axes[0], view.itemsize) for view in file.views]
        claims = [(type(claim), getattr(claim, "views", ()), getattr(claim, "view", "")) for claim in file.claims]
        return [storage.name for storage in file.storages], views, claims

    others = {len(case.file.views): form(case.file) for case in drawn(level, 0) + drawn(level, 1)}
    for case in drawn(level, seed):
        assert form(case.file) == others.get(len(case.file.views), form(case.file))
        assert load(dump(case.file)) == case.file and case.file.views[0].name == "layer 0 K data"
        assert not set(repr(case).replace("'", " ").split()) & {*KINDS, *FIXES, CLEAN}


@pytest.mark.slow
def test_every_kind_and_every_fix_comes_up():
    cases = [case for level, seed in SETS for case in drawn(level, seed)]
    assert {kind_of(case) for case in cases} == {*FAULTS} == {*FIRST_BYTE} <= {*KINDS, CLEAN}
    assert {fix_of(case) for case in cases} == {*FIXES}
    several = {kind: {fix_of(case) for case in cases if kind_of(case) == kind} for kind in FAULTS}
    assert all(len(several[kind]) > 1 for kind in ("misplaced", "out_of_bounds", "unaligned", "index_space"))


def test_a_seed_gives_its_set_and_another_seed_another():
    assert challenge(0) == drawn("easy", 0)
    files = {dump(case.file) for seed in range(3) for case in drawn("easy", seed)}
    assert len(files) == CASES * 3
    assert len({tuple(map(kind_of, drawn("easy", seed))) for seed in range(3)}) > 1


@pytest.mark.slow
def test_geometries_differ():
    views = [case.file.views[0] for seed in range(8) for case in drawn("full", seed)]
    for axis in (0, 2, 3):
        assert len({view.shape[axis] for view in views}) > 2
    layers = {len([view for view in case.file.views if view.role == "transfer"]) for case in drawn("full", 0)}
    assert len(layers) > 1
    heads_first = [view.stride[1] < view.stride[2] for view in views if view.shape[2] > 1]
    assert 0 < sum(heads_first) < len(heads_first)


class TestCheck:
    @pytest.fixture
    def case(self):
        return next(case for case in drawn("easy", 0) if kind_of(case) == "collision")

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ({"kind": "misplaced"}, "first byte and fix are right, kind is wrong"),
            ({"first_byte": 1}, "kind and fix are right, first byte is wrong"),
            ({"fix": "length"}, "kind and first byte are right, fix is wrong"),
            ({"kind": "misplaced", "first_byte": None}, "fix is right, kind is wrong, first byte is not given yet"),
            ({"kind": CLEAN, "first_byte": 1, "fix": "nothing"}, "kind, first byte and fix are wrong"),
            ({"fix": None}, "kind and first byte are right, fix is not given yet"),
        ],
    )
    def test_a_sentence_names_what_is_wrong_and_nothing_that_is_right(self, case, wrong, told):
        right = answer(case)
        verdict = check(case, **right | wrong)
        assert case.name == f"unknown {case.number} of the easy set, seed 0"
        assert str(verdict) == f"{case.name}: {told}" and not verdict.solved
        for part in wrong:
            assert repr(right[part]) not in str(verdict) and f" {right[part]}" not in str(verdict)

    def test_blocks_and_storage_that_do_not_match_have_two_remedies(self):
        fixes = []
        for seed in range(12):
            (case,) = (case for case in drawn("easy", seed) if kind_of(case) == "out_of_bounds")
            fixes.append((fix_of(case), [name for name in FIXES if "fix" not in check(case, fix=name).wrong]))
        assert {right for right, _ in fixes} >= {"count", "storage"}
        for right, accepted in fixes:
            assert accepted == (["count", "storage"] if right in ("count", "storage") else [right])

    def test_no_answer_is_no_failure(self, case):
        assert (
            str(check(case))
            == f"unknown {case.number} of the easy set, seed 0: kind, first byte and fix are not given yet"
        )

    def test_clean_is_clean_only_where_it_is(self):
        (case,) = (case for case in drawn("full", 0) if kind_of(case) == CLEAN)
        assert check(case, kind=CLEAN, fix="nothing").solved
        assert str(check(case, kind=CLEAN, fix="offset")).endswith("kind and first byte are right, fix is wrong")
        assert "kind and first byte are wrong" in str(check(case, kind="collision", first_byte=0, fix="nothing"))

    @pytest.mark.parametrize(
        "given", [{"kind": "colision"}, {"fix": "ofset"}, {"first_byte": 1.0}, {"first_byte": True}]
    )
    def test_what_is_no_answer_is_refused(self, case, given):
        with pytest.raises(ValueError, match="collision|offset|must be an integer or None, not"):
            check(case, **given)


@pytest.mark.parametrize(("given", "told"), [({"seed": "7"}, "not '7'"), ({"seed": 1, "level": "esay"}, "'easy'")])
def test_a_set_that_does_not_exist(given, told):
    with pytest.raises(ValueError, match=told):
        challenge(**given)


def test_a_fix_that_does_not_exist():
    with pytest.raises(ValueError, match="did you mean 'length'"):
        mended(drawn("easy", 0)[0], "lenght")


def test_numpy_integers_are_integers():
    cases = challenge(np.int64(0), "easy")
    assert cases == drawn("easy", 0) and type(cases[0].seed) is int
    case = cases[0]
    right = answer(case)
    assert check(case, **right | {"first_byte": np.int64(right["first_byte"])}).solved


@pytest.mark.parametrize("seed", [True, np.bool_(True), 1.0, np.float64(1), None], ids=repr)
def test_other_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer, not"):
        challenge(seed)
