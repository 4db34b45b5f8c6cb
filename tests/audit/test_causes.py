"""Diagnoses against caches with one known mistake, with two, and without any; and the case book's causes."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.case_book import cases
from kvviz.audit.causes import CAUSES, diagnose
from kvviz.audit.claims import Aligned, BelongsAt, Covers, Disjoint, Follows, SameBytes, names_in
from kvviz.audit.guesses import natural
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import load
from tests.audit.mutations import MUTATIONS, kv_swapped, mutated, sound_cache, width_without_scales

SEEDS = 150


def diagnosed(seed: int):
    sound, name, causes = mutated(random.Random(seed))
    views = list(sound.views.values())
    result = audit_views(views, sound.claims, witnesses=False)
    return sound, name, causes, result, diagnose(views, sound.claims, result) if result.findings else ()


def repaired(views: dict[str, View], diagnoses) -> list[View]:
    return list({**views, **{view.name: view for one in diagnoses for view in one.repaired}}.values())


def own_bytes(view: View) -> set[tuple[str, int]]:
    return {(view.storage.name, byte) for byte in view.all_bytes.tolist()}


def enumerated_clean(views: list[View], claims) -> bool:
    """What claims about places say, looked up byte by byte."""
    named = {view.name: view for view in views}
    for claim in claims:
        if isinstance(claim, Disjoint):
            sets = [own_bytes(named[name]) for name in claim.views]
            if len(set().union(*sets)) != sum(map(len, sets)):
                return False
        if isinstance(claim, Follows):
            data = named[claim.data]
            places = data.starts[..., 0] + claim.at_bytes
            starts = named[claim.scale].starts
            if ((starts if starts.shape == places.shape else starts[..., 0]) != places).any():
                return False
        if isinstance(claim, BelongsAt) and (named[claim.view].starts != claim.rightful.starts).any():
            return False
        if isinstance(claim, SameBytes):
            whole = set().union(*(own_bytes(named[name]) for name in names_in(claim.whole)))
            if own_bytes(named[claim.part]) != whole:
                return False
        if isinstance(claim, Aligned):
            view = named[claim.view]
            rows = view.starts[..., 0] + (view.storage.address_modulo(claim.boundary_bytes) or 0)
            if (rows % claim.boundary_bytes).any():
                return False
    return all(0 <= byte < view.storage.nbytes for view in views for _, byte in own_bytes(view))


def check_the_first_cause(seeds: int, enumerated_every: int) -> None:
    """Check that at least 95 of 100 mistakes are named, and that a proved repair is clean byte by byte."""
    right, wrong, seen = 0, [], set()
    for seed in range(seeds):
        sound, name, causes, result, found = diagnosed(seed)
        if not result.findings:
            continue
        seen.add(name)
        assert found, f"seed {seed}: {name} was not diagnosed"
        if found[0].cause in causes:
            right += 1
        else:
            wrong.append((seed, name, found[0].cause))
        if all(one.proved for one in found) and seed % enumerated_every == 0:
            assert enumerated_clean(repaired(sound.views, found), sound.claims), f"seed {seed}: {name}"
    assert seen == {mutation.__name__ for mutation in MUTATIONS}
    print(f"{right} of {right + len(wrong)} mistakes are named first; the others: {wrong}")
    assert right >= 0.95 * (right + len(wrong)), wrong


def test_the_right_cause_comes_first():
    check_the_first_cause(SEEDS, 5)


@pytest.mark.slow
def test_the_right_cause_comes_first_in_2000_caches():
    check_the_first_cause(2_000, 4)


@pytest.mark.parametrize("seed", range(40))
def test_a_sound_cache_has_no_diagnosis(seed):
    sound = sound_cache(random.Random(seed))
    assert diagnose(list(sound.views.values()), sound.claims) == ()


def test_two_mistakes_give_two_diagnoses():
    checked = 0
    for seed in range(120):
        sound = sound_cache(random.Random(seed))
        draw = random.Random(seed)
        before = dict(sound.views)
        if not (sound.spec.is_per_token_head and kv_swapped(sound, draw) and width_without_scales(sound, draw)):
            continue
        assert sound.views != before
        found = diagnose(list(sound.views.values()), sound.claims)
        assert sorted(one.cause for one in found) == ["kv_swapped", "width_without_scales"]
        assert all(one.proved for one in found)
        checked += 1
    assert checked >= 10


def test_every_finding_is_explained_once_at_least():
    for seed in range(0, SEEDS, 10):
        _, _, _, result, found = diagnosed(seed)
        explained = {finding for one in found for finding in one.findings}
        assert explained == set(result.findings)


def test_every_cause_that_is_named_has_a_record_and_a_lesson():
    lessons = {path.name[:2] for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")}
    assert {cause.lesson for cause in CAUSES.values()} <= lessons


def test_a_wrong_number_that_nothing_explains_is_named():
    sound = next(s for s in map(sound_cache, map(random.Random, range(99))) if s.spec.is_per_token_head)
    view = sound.views["layer 1 K scale"]
    sound.views[view.name] = replace(view, offset=view.offset + 1)
    (found,) = diagnose(list(sound.views.values()), sound.claims)
    assert (found.cause, found.views, found.proved) == ("other_number", ("layer 1 K scale",), True)
    assert "start" in found.text and f"{view.offset * 4:,}" in found.text


def test_natural_order():
    sizes = {f"layer {n} K scale": n for n in range(12)}
    assert sorted(sizes, key=natural) == list(sizes)


BOOK = {case["id"]: case for case in cases()}
NO_NUMBERS_FOR_A_REPAIR = {
    "AMBIG-HEADS-2",
    "AMBIG-MLA-OUTER",
    "WINDOW-POOL-SPACE",
    "WINDOW-ZERO-TABLE",
    "STATE-RESUME-COLUMN",
    "STATE-POOL-UNSENT",
    "NVFP4-SCALES-STAY",
    "CHUNK-TOKEN-TABLE",
}
"""Cases with a wrong table, with a transfer that has no extent in a storage, or with two readings of one shape."""


def test_public_reports_of_a_cause_are_in_the_case_book():
    reports = {case["cause"]: set() for case in BOOK.values()}
    for case in BOOK.values():
        reports[case["cause"]].add(f"{case['repo'].split('/')[1]} {case['number']}".replace("vllm ", "vLLM "))
    for cause in CAUSES.values():
        name = cause.like.replace(" issue ", " ").replace(" PR ", " ")
        assert not name or name in reports[cause.name], cause.name


@pytest.mark.parametrize("name", BOOK)
def test_the_case_book_is_diagnosed(name):
    file = load(json.dumps(BOOK[name]["views_file"]))
    found = diagnose(file.views, file.claims)
    assert (found[0].cause if found else "") == BOOK[name]["cause"]
    assert len({one.cause for one in found}) == len(found) <= 1
    if found and name not in NO_NUMBERS_FOR_A_REPAIR:
        assert found[0].proved, found[0].repair
    mended = BOOK[name].get("fixed_views_file")
    if mended:
        fixed = load(json.dumps(mended))
        assert diagnose(fixed.views, fixed.claims) == ()


@pytest.mark.parametrize("blocks", [1, 2])
def test_an_extent_of_too_few_blocks_is_diagnosed_by_its_number_of_blocks(blocks):
    memory = Storage("memory", 192)
    views = [View("content", memory, (4, 48), (48, 1)), View("sent", memory, (blocks, 48), (48, 1))]
    (found,) = diagnose(views, [Covers("sent", ("content",))])
    assert found.proved and found.repaired[0].shape == (4, 48)
    assert found.text == f'The number of blocks of "sent" is wrong. The number is {blocks} and must be 4.'


def family(starts, strides):
    """Return views of 3 blocks of 8 bytes in one storage, one per layer, each claimed to be covered by an extent."""
    storage = Storage("s", 120)
    axes = ("block", "byte")
    data = [
        View(f"layer {n} V data", storage, (3, 8), (step, 1), start, axes=axes)
        for n, (start, step) in enumerate(zip(starts, strides, strict=True))
    ]
    extents = [
        View(f"layer {n} transfer", storage, (3, 8), (40, 1), 8 * n, role="transfer") for n in range(len(starts))
    ]
    claims = [Disjoint(tuple(view.name for view in data))]
    claims += [Covers(extent.name, (view.name,)) for extent, view in zip(extents, data, strict=True)]
    return [*data, *extents], claims


@pytest.mark.parametrize(
    ("starts", "strides", "cause", "numbers"),
    [
        ((0, 8, 0, 24, 32), (40,) * 5, "offset_dropped", (40, 16)),
        ((0, 8, 17, 24, 32), (40,) * 5, "other_number", (40, 16)),
        ((0, 8, 16, 24, 32), (40, 40, 41, 40, 40), "other_number", (40, 16)),
    ],
    ids=["offset dropped", "another start", "stride one off"],
)
def test_only_the_wrong_view_is_blamed(starts, strides, cause, numbers):
    """Neither its neighbours nor the extent that covers the right place is repaired."""
    views, claims = family(starts, strides)
    result = audit_views(views, claims)
    (one,) = diagnose(views, claims, result)
    assert (one.cause, one.views, one.proved) == (cause, ("layer 2 V data",), True), one.text
    assert [(view.name, view.stride[0], view.offset) for view in one.repaired] == [("layer 2 V data", *numbers)]
    assert set(one.findings) == set(result.findings)


def test_a_proved_repair_changes_something():
    for seed in range(40):
        sound, _, _, result, found = diagnosed(seed)
        for one in found:
            assert not any(view in sound.views.values() for view in one.repaired), one.text


def changed(name: str, **records: dict) -> tuple[str, ...]:
    """Return the causes of a case in which the views of these names (with _ for a space) have other numbers."""
    file = json.loads(json.dumps(BOOK[name]["views_file"]))
    for view in file["views"]:
        view.update(records.get(view["name"].replace(" ", "_"), {}))
    given = load(json.dumps(file))
    return tuple(one.cause for one in diagnose(given.views, given.claims))


def test_a_ring_moves_as_a_whole():
    """If one part of the ring is where it belongs, the other part was not moved around the ring."""
    assert changed("WINDOW-RING-RESTORE") == ("ring_start",)
    assert "ring_start" not in changed("WINDOW-RING-RESTORE", positions_8_to_12={"offset": 0})


def test_strides_of_the_other_half_are_those_of_another_storage():
    assert changed("NVFP4-V-BY-K-STRIDES") == ("half_strides",)
    assert changed("NVFP4-V-BY-K-STRIDES", V_data={"stride": [24, 6, 1]}) != ("half_strides",)


def test_a_part_is_no_run_of_sections_if_it_has_another_size():
    """A part that is twice its whole counts other blocks. A part of one and a half times has no known cause."""
    assert changed("DCP-BLOCK-SPAN") == ("block_unit",)
    assert changed("DCP-BLOCK-SPAN", filled={"shape": [1, 12]}) == ("unknown",)


def test_the_step_of_a_page_is_named_only_if_the_numbers_are_those_of_the_page():
    assert changed("KERNEL-PADDED-SPLIT") == ("block_unit",)
    assert changed("KERNEL-PADDED-SPLIT", kernel_blocks={"stride": [48, 24, 1]}) == ("other_number",)


def test_rows_with_scales_behind_them_need_a_scale_view_that_says_so():
    assert changed("INDEXER-PLANAR") == ("scale_region",)
    assert "other_number" in changed("INDEXER-PLANAR", index_values={"stride": [48, 11, 1]})
