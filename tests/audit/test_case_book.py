"""The case book: 33 public bugs as views and claims. An enumeration in plain Python checks each number byte by byte.

The enumeration reads the JSON of a case only. It uses the meaning of each claim, and no code of the audit.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.case_book import cases
from kvviz.audit.claims import BelongsAt, Covers
from kvviz.audit.findings import KINDS, LOOK_ELSEWHERE
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import load

CASES = cases()
BY_ID = {case["id"]: case for case in CASES}
ALL_IDS = [
    "SCALE-PADDED-PAGE",
    "SCALE-XLAYER",
    "SCALE-OFFSET-DROP",
    "SCALE-PERMUTED",
    "SCALE-TRUNC-XFER",
    "SCALE-SWIZZLE",
    "ZERO-PACKED-SPAN",
    "XFER-WHOLE-PAGE",
    "XFER-RATIO-12X",
    "XFER-DEDUP-BASE",
    "XFER-27X-RANK-GUESS",
    "XFER-KONLY-2X",
    "LOUD-MIXED-PAGES",
    "PAD-STRIDE-ALLOC",
    "ORDER-KVFIRST",
    "ORDER-SPLIT-HALF",
    "ORDER-TRTLLM-HND",
    "AMBIG-HEADS-2",
    "AMBIG-MLA-OUTER",
    "POOL-GLOBAL-SCALES",
    "POOL-SLOT-CLAIM",
    "KERNELBLK-NIXL",
    "ADDR-FP32",
    "CLIP-OOB-TPU",
    "TP-GQA-REPLICA",
    "PERSIST-LAYOUT",
    "ALIGN-ROW-FAULT",
    "ALIGN-PERF-INLINE",
    "STALE-FP32-NAN",
    "CTRL-RACE-STORE",
    "CTRL-HOSTBUF",
    "CTRL-HICACHE-WAIT",
    "CTRL-PREFIX-STALE",
]
CONTROLS = [*ALL_IDS[-5:], "POOL-SLOT-CLAIM", "LOUD-MIXED-PAGES", "ALIGN-PERF-INLINE"]
ITEMSIZE = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
EVERY = pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
MENDED = pytest.mark.parametrize(
    "case", [c for c in CASES if "fixed_views_file" in c], ids=[c["id"] for c in CASES if "fixed_views_file" in c]
)


# ---------------------------------------------------------------- the enumeration


def cells(view: dict) -> dict[tuple[int, ...], range]:
    """Return the bytes of each index of a view record."""
    return _cells(json.dumps(view))


@lru_cache(maxsize=256)
def _cells(text: str) -> dict[tuple[int, ...], range]:
    view, found = json.loads(text), {}
    size = ITEMSIZE[view["dtype"]]
    for index in product(*map(range, view["shape"])):
        start = (view["offset"] + sum(i * step for i, step in zip(index, view["stride"], strict=True))) * size
        found[index] = range(start, start + size)
    return found


def by_block(view: dict) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for index, bytes_ in cells(view).items():
        found.setdefault(index[0], set()).update(bytes_)
    return found


def all_bytes(view: dict) -> set[int]:
    return {byte for bytes_ in cells(view).values() for byte in bytes_}


class Enumeration:
    """The findings of a views file, counted byte by byte. :attr:`findings` holds tuples like those of :func:`told`.

    (kind, views, cells, bytes, hits, severity)
    """

    def __init__(self, file: dict) -> None:
        self.views = {view["name"]: view for view in file["views"]}
        self.nbytes = {storage["name"]: storage["nbytes"] for storage in file["storages"]}
        self.claims = file["claims"]
        self.findings: list[tuple] = []
        for view in self.views.values():
            self._of_one(view)
        for claim in self.claims:
            fields = {key: value for key, value in claim.items() if key != "kind"}
            getattr(self, "_" + claim["kind"])(**fields)
        self.findings = list(dict.fromkeys(self.findings))

    def _add(self, kind, views, cells_, bytes_=None, hits=(), severity="error") -> None:
        self.findings.append((kind, tuple(views), cells_, bytes_, tuple(sorted(hits)), severity))

    def _of_one(self, view: dict) -> None:
        held, there = range(self.nbytes[view["storage"]]), cells(view)
        starts = np.array([bytes_.start for bytes_ in there.values()])
        claimed, times = np.unique(starts[:, None] + np.arange(ITEMSIZE[view["dtype"]]), return_counts=True)
        outside = set(claimed[(claimed < held.start) | (claimed >= held.stop)].tolist())
        for kind, bad in (("out_of_bounds", outside), ("self_overlap", set(claimed[times > 1].tolist()))):
            if bad:
                self._add(kind, [view["name"]], sum(not bad.isdisjoint(bytes_) for bytes_ in there.values()), len(bad))

    def _disjoint(self, views) -> None:
        claimants: dict[tuple[str, int], set[str]] = {}
        for name in views:
            storage = self.views[name]["storage"]
            for byte in all_bytes(self.views[name]):
                if byte in range(self.nbytes[storage]):
                    claimants.setdefault((storage, byte), set()).add(name)
        self._collisions(views, {place: who for place, who in claimants.items() if len(who) > 1})

    def _overlay(self, views) -> None:
        claimants: dict[tuple[str, int], set[tuple[str, int]]] = {}
        for name in views:
            for block, bytes_ in by_block(self.views[name]).items():
                for byte in bytes_:
                    claimants.setdefault((self.views[name]["storage"], byte), set()).add((name, block))
        foreign = {at: who for at, who in claimants.items() if len({block for _, block in who}) > 1}
        self._collisions(views, {at: {name for name, _ in who} for at, who in foreign.items()})

    def _collisions(self, views, claimants) -> None:
        groups: dict[tuple[str, ...], set[int]] = {}
        for (_, byte), who in claimants.items():
            groups.setdefault(tuple(name for name in views if name in who), set()).add(byte)
        for names, bytes_ in groups.items():
            touching = sum(bool(bytes_ & set(there)) for n in names for there in cells(self.views[n]).values())
            self._add("collision", names, touching, len(bytes_))

    def _rightful(self, claim: dict) -> dict[tuple[int, ...], int]:
        """Return the first byte of each element's rightful place."""
        if claim["kind"] == "belongs_at":
            return {index: bytes_.start for index, bytes_ in cells(self.views[claim["rightful"]]).items()}
        heads = {i[:-1]: there.start for i, there in cells(self.views[claim["data"]]).items() if i[-1] == 0}
        return {index: start + claim["at_bytes"] for index, start in heads.items()}

    def _belongs_at(self, **fields) -> None:
        self._placed({"kind": "belongs_at", **fields}, fields["view"])

    def _follows(self, **fields) -> None:
        self._placed({"kind": "follows", **fields}, fields["scale"])

    def _placed(self, claim: dict, name: str) -> None:
        ours, theirs = {i: b.start for i, b in cells(self.views[name]).items()}, self._rightful(claim)
        wrong = {index: start for index, start in ours.items() if start != theirs[index]}
        if not wrong:
            return
        size = ITEMSIZE[self.views[name]["dtype"]]
        bytes_ = {byte for start in wrong.values() for byte in range(start, start + size)}
        kind = "permuted" if sorted(ours.values()) == sorted(theirs.values()) else "misplaced"
        hits = Counter(self._under(start, self.views[name]["storage"], name) for start in wrong.values())
        self._add(kind, [name], len(wrong), len(bytes_), hits.items())

    def _under(self, byte: int, storage: str, home: str) -> str:
        """Return the rightful owner of a byte. Data come first; of several owners, the last one.

        A rightful place has the name of the view that states it.
        """
        if byte not in range(self.nbytes[storage]):
            return "outside the storage"
        here = {name: there for name, there in self._owners().items() if self.views[name]["storage"] == storage}
        owners = [name for name, there in here.items() if byte in there]
        data = [name for name in owners if self.views[name]["role"] == "data"]
        owner = (data or owners or ["padding"])[-1]
        stated = {claim.get("view", claim.get("scale")): claim.get("rightful", home) for claim in self._placing()}
        return f"{owner}, at another index" if owner == stated[home] else owner

    def _owners(self) -> dict[str, set[int]]:
        """Return the bytes of each rightful owner. A view with a rightful place owns that place."""
        if not hasattr(self, "_owned"):
            moved = {claim.get("view", claim.get("scale")): claim for claim in self._placing()}
            aside = {claim[key] for claim in self.claims for key in ("rightful", "extent") if key in claim}
            self._owned = {n: all_bytes(v) for n, v in self.views.items() if n not in aside and n not in moved}
            for name, claim in moved.items():
                size, homes = ITEMSIZE[self.views[name]["dtype"]], self._rightful(claim).values()
                self._owned[claim.get("rightful", name)] = {
                    byte for start in homes for byte in range(start, start + size)
                }
        return self._owned

    def _placing(self) -> list[dict]:
        return [claim for claim in self.claims if claim["kind"] in ("belongs_at", "follows")]

    def _covers(self, extent, content, neighbours=()) -> None:
        taken = by_block(self.views[extent])
        blocks = {index[0] for name in (*content, *neighbours) for index in cells(self.views[name])}
        others = {own: set().union(*(there for block, there in taken.items() if block != own)) for own in blocks}
        for kind, names in (("truncated", content), ("oversized", neighbours or content)):
            bad, counts = set(), Counter()
            for name in names:
                for (own, *_), there in cells(self.views[name]).items():
                    wrong = set(there) - taken.get(own, set(there)) if kind == "truncated" else set(there) & others[own]
                    bad |= wrong
                    counts[name] += bool(wrong)
            if bad:
                views = dict.fromkeys((extent, *(name for name in names if counts[name])))
                self._add(kind, views, counts.total(), len(bad))

    def _same_bytes(self, part, whole) -> None:
        ours, theirs = all_bytes(self.views[part]), all_bytes(self.views[whole])
        for kind, name, bytes_ in (("oversized", part, ours - theirs), ("truncated", whole, theirs - ours)):
            if bytes_:
                touching = sum(bool(bytes_ & set(there)) for there in cells(self.views[name]).values())
                self._add(kind, [part, whole], touching, len(bytes_))

    def _maps(self, name, view, count, ratio=1, stride_bytes=None) -> None:
        blocks = {block: min(there) for block, there in by_block(self.views[view]).items()}
        homeless = [i for i in range(count) if not set(range(i * ratio, (i + 1) * ratio)) <= set(blocks)]
        if homeless:
            self._add("index_space", [view], len(homeless))
        moved = [i for i in range(count) if stride_bytes and blocks.get(i * ratio, 0) != blocks[0] + i * stride_bytes]
        if moved:
            self._add("index_space", [view], len(moved))

    def _addressed(self, view, address_type) -> None:
        bad = [i for i, held in self.addresses(view).items() if int(np.dtype(address_type).type(held)) != held]
        if bad:
            self._add("index_space", [view], len(bad))

    def addresses(self, name: str) -> dict[tuple[int, ...], int]:
        """Return the address of each element, in elements."""
        size = ITEMSIZE[self.views[name]["dtype"]]
        return {index: bytes_.start // size for index, bytes_ in cells(self.views[name]).items()}

    def rows(self, name: str) -> dict[tuple[int, ...], int]:
        """Return the first byte of each row."""
        return {i[:-1]: bytes_.start for i, bytes_ in cells(self.views[name]).items() if i[-1] == 0}

    def _aligned(self, view, boundary_bytes, required=True) -> None:
        off = [start for start in self.rows(view).values() if start % boundary_bytes]
        if off:
            self._add("unaligned", [view], len(off), severity="error" if required else "warning")

    def _declared(self, view, readings, declared="") -> None:
        held = range(self.nbytes[self.views[view]["storage"]])
        fitting = [name for name in readings if all(byte in held for byte in all_bytes(self.views[name]))]
        maps = {(tuple(self.views[n]["shape"]), tuple(b.start for b in cells(self.views[n]).values())) for n in fitting}
        if not declared and len(maps) > 1:
            self._add("ambiguous", dict.fromkeys((view, *fitting)), len(cells(self.views[view])))


def told(finding) -> tuple:
    """Return a finding of the audit as a tuple like those of the enumeration."""
    hits = tuple(sorted(finding.hits))
    return finding.kind, finding.views, finding.elements, finding.bytes, hits, finding.severity


def written(expected: dict) -> tuple:
    """Return a finding of the case book as a tuple like those of the enumeration."""
    hits = tuple(sorted(expected.get("hits", {}).items()))
    views, numbers = tuple(expected["views"]), (expected["elements"], expected["bytes"])
    return expected["kind"], views, *numbers, hits, expected["severity"]


# ---------------------------------------------------------------- every case


def judged(file: dict):
    return load(json.dumps(file)).audit()


def test_all_33_are_here():
    assert len(ALL_IDS) == 33 and [case["id"] for case in CASES] == sorted(BY_ID, key=[*BY_ID].index)
    assert sorted(BY_ID) == sorted(ALL_IDS)
    assert {case["kind"] for case in CASES} == set("ABCDEFGHIJKLX")


@EVERY
def test_a_case_is_described_in_full(case):
    for field in ("symptom", "mechanism", "fix", "verdict"):
        assert len(case[field]) > 5 and case[field].strip() == case[field]
    assert case["repo"].count("/") == 1 and case["number"] > 0
    assert all(expected["kind"] in KINDS for expected in case["expected"])


@EVERY
def test_the_book_says_what_the_enumeration_says(case):
    found = Enumeration(case["views_file"]).findings
    assert Counter(map(written, case["expected"])) == Counter(found)


@EVERY
def test_the_audit_says_what_the_book_says(case):
    found = judged(case["views_file"])
    assert Counter(map(told, found.findings)) == Counter(map(written, case["expected"]))
    assert found.clean == all(expected["severity"] == "warning" for expected in case["expected"])
    for finding in found.findings:
        assert str(finding).startswith(finding.kind)
    for words in case.get("says", ()):
        assert words in str(found)


@MENDED
def test_mended_it_is_clean(case):
    assert not [found for found in Enumeration(case["fixed_views_file"]).findings if found[-1] == "error"]
    mended = judged(case["fixed_views_file"])
    assert mended.clean and LOOK_ELSEWHERE in str(mended), str(mended)
    assert not judged(case["views_file"]).clean or case["id"] in CONTROLS


@EVERY
def test_the_mended_geometry_is_the_same_cache(case):
    """Both files have the same storages and the same number of views."""
    mended = case.get("fixed_views_file", case["views_file"])
    assert [s["name"] for s in mended["storages"]] == [s["name"] for s in case["views_file"]["storages"]]
    assert len(mended["views"]) == len(case["views_file"]["views"])


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_clean(name):
    case = BY_ID[name]
    found = judged(case["views_file"])
    assert found.clean and LOOK_ELSEWHERE.partition(". ")[2] in str(found)
    assert all(finding.severity == "warning" for finding in found.findings)
    assert bool(found.findings) == (name == "ALIGN-PERF-INLINE")


@pytest.mark.parametrize("name", [name for name in ALL_IDS if name.startswith("CTRL-")])
def test_a_control_could_fail(name):
    """The audit finds a scale view that is moved by a cell, a step or a block, and a copy that is cut by a cell."""
    file = BY_ID[name]["views_file"]
    assert len({view["name"].split()[1] for view in file["views"] if view["role"] == "scale"}) == 2
    for number, view in enumerate(file["views"]):
        for change in ("offset", "stride") if view["role"] == "scale" else ("cut",) if view["role"] == "extent" else ():
            sick = json.loads(json.dumps(file))
            one = sick["views"][number]
            if change == "offset":
                one["offset"] += 3
            if change == "stride":
                one["stride"][0] -= 3
            if change == "cut":
                one["shape"][1] -= 4
            found = judged(sick)
            assert not found.clean and any(view["name"] in finding.views for finding in found.findings)
            assert Counter(map(told, found.findings)) == Counter(Enumeration(sick).findings)


# ---------------------------------------------------------------- further numbers of single cases


def numbers(name: str) -> dict:
    return BY_ID[name]["numbers"]


def view(name: str, of: str) -> dict:
    return next(view for view in BY_ID[name]["views_file"]["views"] if view["name"] == of)


def starts(name: str, of: str) -> dict[tuple[int, ...], int]:
    return {index: bytes_.start for index, bytes_ in cells(view(name, of)).items()}


def real(storage: int, *views: View, claims=()):
    """Return the audit of a case at its real size."""
    return audit_views([replace(v, storage=Storage("real", storage)) for v in views], claims)


def strided(name: str, shape, stride, offset: int = 0, itemsize: int = 1) -> View:
    return View(name, Storage("real", 0), tuple(shape), tuple(stride), offset, itemsize)


def test_scales_of_a_padded_page_land_in_other_blocks():
    name = "SCALE-PADDED-PAGE"
    for half in "KV":
        meant, landed, counts = starts(name, f"{half} scale, in its cells"), starts(name, f"{half} scale"), Counter()
        data = {b: i[0] for h in "KV" for i, there in cells(view(name, f"{h} data")).items() for b in there}
        slots = {b for h in "KV" for there in cells(view(name, f"{h} scale, in its cells")).values() for b in there}
        for index, start in landed.items():
            if start == meant[index]:
                continue
            if start in data:
                counts["data_of_its_own_block" if data[start] == index[0] else "data_of_another_block"] += 1
            else:
                counts["other_scales" if start in slots else "padding"] += 1
        assert counts == numbers(name)[half] and counts.total() == numbers(name)["misplaced"]
        assert len(landed) == numbers(name)["entries"]


def test_pages_of_the_padded_case():
    pages = numbers("SCALE-PADDED-PAGE")["page_bytes"]
    assert pages["int8_head_256"] == 2 * 256 * (256 + 4) and pages["int8_head_512"] == 2 * 256 * (512 + 4)
    assert pages["int8_head_512"] % pages["int8_head_256"] and pages["bf16_head_512"] % pages["bf16_head_256"] == 0


def test_all_layers_share_one_set_of_scales_and_no_data_are_hit():
    for name in ("SCALE-XLAYER", "SCALE-OFFSET-DROP"):
        maps = [starts(name, f"layer {layer} K scale") for layer in range(3)]
        assert maps[0] == maps[1] == maps[2]
        data = {b for n in range(3) for h in "KV" for b in all_bytes(view(name, f"layer {n} {h} data"))}
        assert not data & all_bytes(view(name, "layer 0 K scale"))
    meant = [starts("SCALE-XLAYER", f"layer {layer} K scale, in its cells") for layer in range(3)]
    wrong = [sum(meant[layer][index] != start for index, start in maps[0].items()) for layer in range(3)]
    assert wrong == numbers("SCALE-XLAYER")["wrong_starts"]


def test_the_permuted_scales_are_at_home_in_two_half_blocks():
    name, told_ = "SCALE-PERMUTED", numbers("SCALE-PERMUTED")
    data, scales = starts(name, "kv data"), starts(name, "scales")
    at_home = {(k, b) for (k, b, t, h), s in scales.items() if s == data[k, b, t, h, 0] + 8}
    assert [b for k, b in sorted(at_home) if k == 0] == told_["K_right_in_blocks"]
    assert [b for k, b in sorted(at_home) if k == 1] == told_["V_right_in_blocks"]
    assert [b for b in range(8) if {(0, b), (1, b)} <= at_home] == told_["blocks_with_both_right"]
    assert sorted(scales.values()) == sorted(start + 8 for (*_, byte), start in data.items() if byte == 0)


def test_a_short_copy_cuts_a_cell():
    for told_, copied, page, cell in (
        (numbers("SCALE-TRUNC-XFER"), 128, 192, 12),
        (numbers("SCALE-TRUNC-XFER")["real"], 32_768, 33_792, 132),
    ):
        lost = [cell - max(0, min(cell, copied - start)) for start in range(0, page, cell)]
        assert lost.count(cell) == told_["whole_cells_missing"]
        assert sum(0 < n < cell for n in lost) == told_["cells_cut"]
        assert sum(lost) == told_.get("missing_bytes_per_block", told_.get("missing_bytes"))


def test_a_swizzled_row_shows_the_groups_of_the_report():
    writer = {start: i for i, start in starts("SCALE-SWIZZLE", "writer").items()}
    row = [writer[start] for index, start in starts("SCALE-SWIZZLE", "reader").items() if index[0] == 0]
    assert [high * 4 + low for _, high, low in row] == numbers("SCALE-SWIZZLE")["groups_read_in_token_0"]


def test_the_clear_of_one_block_wipes_two_layers_of_the_next():
    name = "ZERO-PACKED-SPAN"
    cleared = by_block(view(name, "cleared for layer 2"))[2]
    hit = {n: len(cleared & by_block(view(name, f"layer {n}"))[3]) for n in range(4)}
    assert hit == {0: 24, 1: 24, 2: 0, 3: 0}
    for layer in range(4):
        assert max(by_block(view(name, f"cleared for layer {layer}"))[4]) + 1 - 640 == 32 * layer


def test_the_clear_at_its_real_size():
    told_ = numbers("ZERO-PACKED-SPAN")["real"]
    blocks, step = told_["shape"][0], told_["block_stride_bytes"]
    layers = [strided(f"layer {n}", told_["shape"], (step, 584, 1), o) for n, o in enumerate(told_["offsets_bytes"])]
    cleared = [strided(f"cleared {n}", (blocks, step), (step, 1), o) for n, o in enumerate(told_["offsets_bytes"])]
    claims = [Covers(f"cleared {n}", (f"layer {n}",), tuple(v.name for v in layers)) for n in range(4)]
    found = real(told_["storage_bytes"], *layers, *cleared, claims=claims)
    assert blocks * step == told_["storage_bytes"]
    assert [f.bytes for f in found.of_kind("out_of_bounds")] == told_["overrun_bytes"][1:]
    assert [f.bytes for f in found.of_kind("oversized")] == [n * 64 * 584 * (blocks - 1) for n in (1, 2, 3)]


def test_segments_spill_and_amplify():
    name = "XFER-WHOLE-PAGE"
    spill = [max(by_block(view(name, f"layer {n} segment"))[0]) + 1 - 128 for n in range(3)]
    assert spill == numbers(name)["spill_bytes"] and round(128 / 24, 2) == 5.33


def test_descriptors_run_past_the_end():
    name = "XFER-RATIO-12X"
    past = {str(b): max(there) + 1 - 384 for b, there in by_block(view(name, "descriptors")).items()}
    assert {b: n for b, n in past.items() if n > 0} == numbers(name)["past_the_end_bytes"]
    told_ = numbers(name)["real"]
    page, step, ratio = told_["page_bytes"], told_["stride_bytes"], told_["ratio"]
    blocks, sent = strided("blocks", (ratio, step), (step, 1)), strided("sent", (ratio, page), (step, 1))
    found = real(page, blocks, sent, claims=[Covers("sent", ("blocks",))])
    assert page == ratio * step and found.of_kind("out_of_bounds")[0].bytes == told_["past_its_block_bytes"]


def test_what_the_shared_base_costs():
    told_ = numbers("XFER-DEDUP-BASE")
    assert told_["missing_bytes_per_block"] == 32 - 19
    assert told_["real"]["state_bytes"] - told_["real"]["swa_bytes"] == told_["real"]["missing_bytes"]


def test_a_partial_copy_leaves_its_block_from_33_tokens_on():
    told_ = numbers("XFER-KONLY-2X")
    assert next(n for n in range(65) if 2 * n * 8 > 512) == told_["first_token_count_that_leaves"]
    assert told_["foreign_bytes_per_block"] == 2 * 40 * 8 - 512


def test_a_page_that_does_not_divide_is_loud_and_one_that_does_is_silent():
    told_ = numbers("LOUD-MIXED-PAGES")
    with pytest.raises(ValueError, match="reshape"):
        np.zeros(told_["storage_bytes"], np.uint8).reshape(-1, 5, 16)
    size = told_["storage_bytes_where_it_divides"]
    assert size == 5 * (2 * 40 + 3 * 16) and np.zeros(size, np.uint8).reshape(-1, 5, 16).shape == (8, 5, 16)
    home, read = strided("indexer 0", (5, 16), (128, 1), 80), strided("as read", (5, 16), (16, 1), 80)
    (finding,) = real(size, home, read, claims=[BelongsAt("as read", "indexer 0")]).findings
    assert (finding.kind, finding.elements) == ("misplaced", 64)
    deep = told_["real"]
    assert (
        deep["mla_layers"] * deep["mla_page_bytes"] + deep["indexer_layers"] * deep["indexer_page_bytes"]
        == (deep["block_bytes"])
    )
    assert deep["storage_bytes"] % deep["block_bytes"] == 0 and deep["storage_bytes"] // deep["block_bytes"] == 9543
    assert deep["storage_bytes"] % (9543 * deep["indexer_page_bytes"])


def test_the_engine_view_slides_over_the_allocators_blocks():
    name = "PAD-STRIDE-ALLOC"
    owner = {b: block for block, there in by_block(view(name, "allocator's blocks")).items() for b in there}
    seen = {str(b): Counter(owner.get(x) for x in there) for b, there in by_block(view(name, "engine view")).items()}
    assert seen["0"] == {0: 192} and seen["1"] == {1: 128, 2: 64}
    assert seen["2"] == {2: 64, 3: 128} and seen["3"] == {None: 192}
    assert max(all_bytes(view(name, "engine view"))) + 1 == numbers(name)["reaches_byte"]


def test_rows_of_the_kv_first_guess():
    name, told_ = "ORDER-KVFIRST", numbers("ORDER-KVFIRST")
    meant, landed = (starts(name, which) for which in ("block-first cache", "as addressed"))
    pairs = [index for index in meant if index[-1] == 0]
    assert len(pairs) == told_["pairs"]
    assert sum(meant[i] != landed[i] for i in pairs) == told_["misaddressed_pairs"]
    assert len({landed[i] // 8 for i in pairs}) == told_["rows_touched"]
    at = {start: index for index, start in meant.items()}
    assert at[landed[1, 0, 0, 0]] == (0, 1, 0, 0) and at[landed[0, 1, 0, 0]] == (1, 0, 0, 0)


def test_one_block_of_the_split_half():
    name = "ORDER-SPLIT-HALF"
    told_ = numbers(name)["block_1"]
    for which, of in (("sent", "transfer"), ("owned", "cache")):
        assert by_block(view(name, of))[1] == {b for first, stop in told_[which] for b in range(first, stop)}
    planes = {i[:2] for i, there in cells(view(name, "cache")).items() if there.start in range(32, 64)}
    assert planes == {(2, 0), (3, 0)}


def test_half_of_each_head_is_foreign():
    for rank in range(2):
        taken, head = (all_bytes(view("ORDER-TRTLLM-HND", n)) for n in (f"rank {rank} takes", f"head {rank}"))
        assert (len(taken), len(taken - head)) == (32, 16)


def test_two_readings_share_half_of_their_k_planes():
    planes = [
        all_bytes(view("AMBIG-HEADS-2", f"K if {which}")) for which in ("K/V is outside heads", "heads are outside K/V")
    ]
    told_ = numbers("AMBIG-HEADS-2")
    assert [len(plane) for plane in planes] == [told_["K_bytes"]] * 2
    assert len(planes[0] & planes[1]) == told_["shared_K_bytes"] == told_["K_bytes"] // 2
    (finding,) = judged(BY_ID["AMBIG-HEADS-2"]["views_file"]).findings
    assert "they claim 32768 bytes each and share 16384 of them" in finding.text
    (finding,) = judged(BY_ID["AMBIG-MLA-OUTER"]["views_file"]).findings
    assert f"the same {numbers('AMBIG-MLA-OUTER')['shared_bytes']} bytes" in finding.text


def test_a_state_block_meets_two_attention_blocks():
    name = "POOL-GLOBAL-SCALES"
    state, data = (by_block(view(name, which)) for which in ("state", "attention data"))
    meets = {str(g): [a for a in data if data[a] & state[g]] for g in range(8)}
    assert meets == numbers(name)["state_block_meets_data_of_blocks"]


def test_slots_of_two_groups_never_meet_in_different_blocks():
    small, large = (by_block(view("POOL-SLOT-CLAIM", f"blocks of {n}")) for n in (16, 32))
    assert all(bool(small[a] & large[b]) == (a == b) for a in small for b in large)


def test_addressed_kernel_blocks_overlap_by_half():
    sent, meant = (by_block(view("KERNELBLK-NIXL", which)) for which in ("addressed", "logical blocks"))
    told_ = numbers("KERNELBLK-NIXL")
    assert [b for b in sent if sent[b] != meant[b]] == told_["wrong_blocks"]
    assert {len(sent[b] & sent[b + 1]) for b in range(3)} == {told_["shared_bytes_of_neighbouring_descriptors"]}


def test_addresses_in_float32():
    told_, addresses = numbers("ADDR-FP32"), Enumeration(BY_ID["ADDR-FP32"]["views_file"]).addresses("scales")
    bad = {index: address for index, address in addresses.items() if int(np.float32(address)) != address}
    assert (len(bad), len(addresses)) == (told_["inexact"], told_["addresses"])
    assert list(min(bad)) == told_["first_inexact"] and all(address % 2 for address in bad.values())
    assert int(np.float32(told_["address"])) == told_["becomes"] == told_["address"] + 1 == 17_355_648
    assert addresses[2086, 127] == told_["address"]


def test_ids_without_a_slot():
    told_ = numbers("CLIP-OOB-TPU")
    assert [i for i in range(12) if i not in range(3)] == told_["homeless_ids"]
    assert {min(i, 2) for i in told_["homeless_ids"]} == {told_["clipped_to"]}
    (finding,) = judged(BY_ID["CLIP-OOB-TPU"]["views_file"]).findings
    assert "ids 3 to 11 have no place in it" in finding.text


def test_ranks_outside_the_page():
    told_, heads = numbers("TP-GQA-REPLICA"), [all_bytes(view("TP-GQA-REPLICA", f"head {h}")) for h in range(2)]
    writes = [all_bytes(view("TP-GQA-REPLICA", f"rank {r} writes")) for r in range(4)]
    assert [r for r in range(4) if not writes[r] & (heads[0] | heads[1])] == told_["ranks_outside"]
    assert [r for r in range(4) if writes[r] & heads[1 - r // 2]] == told_["ranks_on_another_head"]


def test_bytes_with_another_meaning():
    told_ = numbers("PERSIST-LAYOUT")
    written_, read = (starts("PERSIST-LAYOUT", which) for which in ("written as NHD", "read as HND"))
    assert sum(read[index] != start for index, start in written_.items()) == told_["bytes_with_another_meaning"]
    assert sorted(read.values()) == sorted(written_.values()) and len(read) == told_["bytes"]


def test_aligned_slots():
    rows = Enumeration(BY_ID["ALIGN-ROW-FAULT"]["views_file"]).rows("rows")
    assert [slot for (slot, _), start in rows.items() if start % 16 == 0] == numbers("ALIGN-ROW-FAULT")["aligned_slots"]
    (finding,) = judged(BY_ID["ALIGN-ROW-FAULT"]["views_file"]).findings
    assert "every 4 along slot" in finding.text
    rows = Enumeration(BY_ID["ALIGN-PERF-INLINE"]["views_file"]).rows("cells")
    assert [start % 128 for start in rows.values()] == numbers("ALIGN-PERF-INLINE")["row_starts_mod_128"]


def test_a_declared_overlay_shares_equal_blocks_only():
    state, attention = (by_block(view("STALE-FP32-NAN", which)) for which in ("state", "attention"))
    assert state == attention and not state[0] & state[1]
