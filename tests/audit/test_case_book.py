"""The case book: 60 public bugs as views and claims. An enumeration in plain Python checks each number byte by byte.

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
from kvviz.audit.case_book import FAMILIES, SYMPTOMS, cases
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
    "WINDOW-RING-RESTORE",
    "WINDOW-POOL-SPACE",
    "WINDOW-ZERO-TABLE",
    "CTRL-WINDOW-MASK",
    "STATE-PADDED-SCATTER",
    "STATE-K-OVERRUN",
    "STATE-CONV-SECTIONS",
    "STATE-RESUME-COLUMN",
    "CTRL-GRAPH-INDICES",
    "INDEXER-PLANAR",
    "INDEXER-PAGE-ROW",
    "ADDR-INT32-BLOCK",
    "INDEXER-VECTOR-TRUNC",
    "STATE-POOL-UNSENT",
    "CTRL-SCALE-ROUNDED",
    "CTRL-IDLE-DRAFT",
    "NVFP4-HND-AS-NHD",
    "NVFP4-V-BY-K-STRIDES",
    "NVFP4-SCALES-DENSE",
    "NVFP4-SCALES-STAY",
    "KERNEL-PADDED-SPLIT",
    "CHUNK-TOKEN-TABLE",
    "KERNEL-DCP-SLOT",
    "DCP-BLOCK-SPAN",
    "DCP-GLOBAL-SLOT",
    "CORE-HEAD-BOUNDARY",
    "TP-REPLICATED-BC",
]
OLD_CONTROLS = ["CTRL-RACE-STORE", "CTRL-HOSTBUF", "CTRL-HICACHE-WAIT", "CTRL-PREFIX-STALE"]
NEW_CONTROLS = ["CTRL-WINDOW-MASK", "CTRL-GRAPH-INDICES", "CTRL-SCALE-ROUNDED", "CTRL-IDLE-DRAFT"]
CONTROLS = [*OLD_CONTROLS, *NEW_CONTROLS, "STALE-FP32-NAN", "POOL-SLOT-CLAIM", "LOUD-MIXED-PAGES", "ALIGN-PERF-INLINE"]
ITEMSIZE = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}
EVERY = pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
MENDED = pytest.mark.parametrize(
    "case", [c for c in CASES if "fixed_views_file" in c], ids=[c["id"] for c in CASES if "fixed_views_file" in c]
)


# ---------------------------------------------------------------- the enumeration


def item_bytes(dtype: str | dict) -> int:
    return dtype["itemsize"] if isinstance(dtype, dict) else ITEMSIZE[dtype]


def listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def cells(view: dict) -> dict[tuple[int, ...], range]:
    """Return the bytes of each index of a view record."""
    return _cells(json.dumps(view))


@lru_cache(maxsize=256)
def _cells(text: str) -> dict[tuple[int, ...], range]:
    view, found = json.loads(text), {}
    size = item_bytes(view["dtype"])
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
        claimed, times = np.unique(starts[:, None] + np.arange(item_bytes(view["dtype"])), return_counts=True)
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
            places = {index: bytes_.start for index, bytes_ in cells(self.views[claim["rightful"]]).items()}
            if len(self.views[claim["rightful"]]["shape"]) == len(self.views[claim["view"]]["shape"]):
                return places
            return {index[:-1]: start for index, start in places.items() if index[-1] == 0}  # single bytes
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
        size = item_bytes(self.views[name]["dtype"])
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
            aside = {claim[key] for claim in self.claims for key in ("rightful",) if key in claim}
            aside |= {name for claim in self.claims for name in listed(claim.get("extent", []))}
            self._owned = {n: all_bytes(v) for n, v in self.views.items() if n not in aside and n not in moved}
            for name, claim in moved.items():
                size, homes = item_bytes(self.views[name]["dtype"]), self._rightful(claim).values()
                self._owned[claim.get("rightful", name)] = {
                    byte for start in homes for byte in range(start, start + size)
                }
        return self._owned

    def _placing(self) -> list[dict]:
        return [claim for claim in self.claims if claim["kind"] in ("belongs_at", "follows")]

    def _covers(self, extent, content, neighbours=()) -> None:
        taken: dict[int, set[tuple[str, int]]] = {}
        for name in listed(extent):
            for block, there in by_block(self.views[name]).items():
                taken.setdefault(block, set()).update((self.views[name]["storage"], byte) for byte in there)
        blocks = {index[0] for name in (*content, *neighbours) for index in cells(self.views[name])}
        others = {own: set().union(*(there for block, there in taken.items() if block != own)) for own in blocks}
        for kind, names in (("truncated", content), ("oversized", neighbours or content)):
            bad, counts = set(), Counter()
            for name in names:
                for (own, *_), bytes_ in cells(self.views[name]).items():
                    there = {(self.views[name]["storage"], byte) for byte in bytes_}
                    wrong = there - taken.get(own, there) if kind == "truncated" else there & others[own]
                    bad |= wrong
                    counts[name] += bool(wrong)
            if bad:
                views = dict.fromkeys((*listed(extent), *(name for name in names if counts[name])))
                self._add(kind, views, counts.total(), len(bad))

    def _same_bytes(self, part, whole) -> None:
        sides = [listed(part), listed(whole)]
        ours, theirs = (set().union(*(all_bytes(self.views[name]) for name in names)) for names in sides)
        for kind, names, bytes_ in (("oversized", sides[0], ours - theirs), ("truncated", sides[1], theirs - ours)):
            if bytes_:
                touching = sum(bool(bytes_ & set(there)) for n in names for there in cells(self.views[n]).values())
                self._add(kind, [*sides[0], *sides[1]], touching, len(bytes_))

    def _maps(self, name, view, count, ratio=1, stride_bytes=None, table=()) -> None:
        blocks = {block: min(there) for block, there in by_block(self.views[view]).items()}
        ids = table or range(count)
        homeless = [i for i in ids if not set(range(i * ratio, (i + 1) * ratio)) <= set(blocks)]
        if homeless:
            self._add("index_space", [view], len(homeless))
        moved = [i for i in ids if stride_bytes and blocks.get(i * ratio, 0) != blocks[0] + i * stride_bytes]
        if moved:
            self._add("index_space", [view], len(moved))

    def _addressed(self, view, address_type, unit="elements") -> None:
        size = item_bytes(self.views[view]["dtype"]) if unit == "bytes" else 1
        held = [address * size for address in self.addresses(view).values()]
        whole = np.dtype(address_type).kind in "iu"
        top = np.iinfo(address_type).max if whole else None
        bad = [a for a in held if (a > top if whole else int(np.dtype(address_type).type(a)) != a)]
        if bad:
            self._add("index_space", [view], len(bad))

    def addresses(self, name: str) -> dict[tuple[int, ...], int]:
        """Return the address of each element, in elements."""
        size = item_bytes(self.views[name]["dtype"])
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


def test_all_60_are_here():
    assert len(ALL_IDS) == 60 and [case["id"] for case in CASES] == sorted(BY_ID, key=[*BY_ID].index)
    assert sorted(BY_ID) == sorted(ALL_IDS)
    assert {case["kind"] for case in CASES} == set("ABCDEFGHIJKLX")
    assert len({(case["repo"], case["number"]) for case in CASES}) == 60


def test_every_family_and_symptom_has_cases():
    assert {case["family"] for case in CASES} == {*FAMILIES} and {case["seen"] for case in CASES} == {*SYMPTOMS}
    faults = Counter(case["family"] for case in CASES if case["cause"])
    assert min(faults[family] for family in FAMILIES) >= 3


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
    """Both files have the same storages and as many views. The repair may add an extent of bytes that nobody took."""
    mended = case.get("fixed_views_file", case["views_file"])
    assert [s["name"] for s in mended["storages"]] == [s["name"] for s in case["views_file"]["storages"]]
    sick, healthy = (file["views"] for file in (case["views_file"], mended))
    extents = [sum(view["role"] == "extent" for view in views) for views in (sick, healthy)]
    assert len(healthy) - len(sick) == max(0, extents[1] - extents[0])


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_clean(name):
    case = BY_ID[name]
    found = judged(case["views_file"])
    assert found.clean and LOOK_ELSEWHERE.partition(". ")[2] in str(found)
    assert all(finding.severity == "warning" for finding in found.findings)
    assert bool(found.findings) == (name == "ALIGN-PERF-INLINE")


@pytest.mark.parametrize("name", OLD_CONTROLS)
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


@pytest.mark.parametrize("name", NEW_CONTROLS)
def test_a_control_of_a_family_could_fail(name):
    """The audit finds each view that is moved by a block and an element."""
    file = BY_ID[name]["views_file"]
    for number, view in enumerate(file["views"]):
        sick = json.loads(json.dumps(file))
        sick["views"][number]["offset"] += view["stride"][0] + view["stride"][-1]
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


# ---------------------------------------------------------------- further numbers of other kinds of layers


def claim_of(name: str, kind: str, file: str = "views_file") -> dict:
    return next(claim for claim in BY_ID[name][file]["claims"] if claim["kind"] == kind)


def test_cells_of_a_ring():
    told_, size = numbers("WINDOW-RING-RESTORE"), 4
    first, cells_ = told_["first_position"], told_["cells"]
    for name in ("positions 5 to 7", "positions 8 to 12"):
        start = int(name.split()[1])
        assert starts("WINDOW-RING-RESTORE", name)[0, 0] == (start - first) * size
        assert starts("WINDOW-RING-RESTORE", f"{name}, in the ring")[0, 0] == start % cells_ * size
    assert told_["moved_by_bytes"] == first % cells_ * size


def test_slots_of_the_full_pool_have_no_place_in_the_window_pool():
    told_, table = numbers("WINDOW-POOL-SPACE"), claim_of("WINDOW-POOL-SPACE", "maps")["table"]
    assert [i for i in table if i < 8] == told_["translated"] and [i for i in table if i >= 8] == told_["homeless"]


def test_a_zero_of_the_table_is_block_0():
    told_ = numbers("WINDOW-ZERO-TABLE")
    position = told_["window"]
    block = told_["table"][position // told_["block_tokens"]]
    assert min(all_bytes(view("WINDOW-ZERO-TABLE", "positions 32 to 47"))) == block * 8 == 0
    for entry in told_["table"][:2]:
        assert min(all_bytes(view("WINDOW-ZERO-TABLE", f"block {entry}"))) == entry * 8


def test_a_padded_state():
    told_ = numbers("STATE-PADDED-SCATTER")
    state = (
        by_block(view("STATE-PADDED-SCATTER", "conv state"))[0] | by_block(view("STATE-PADDED-SCATTER", "ssm state"))[0]
    )
    assert len(state) == told_["state_bytes"]
    assert min(by_block(view("STATE-PADDED-SCATTER", "ssm state"))[1]) - 8 == told_["block_bytes"]


def test_k_of_block_1_lies_on_the_state_of_block_2():
    real_ = numbers("STATE-K-OVERRUN")["real"]
    assert real_["equal_at_tokens"] * real_["k_bytes_per_token"] == real_["state_bytes"]
    assert real_["block_tokens"] * real_["k_bytes_per_token"] == 2 * real_["state_bytes"]
    k, state = (by_block(view("STATE-K-OVERRUN", name)) for name in ("attention K", "ssm state"))
    assert [block for block in state if state[block] & k[1]] == [2, 3]


def test_a_run_of_the_state_has_the_right_size_and_wrong_bytes():
    told_ = numbers("STATE-CONV-SECTIONS")
    for rank in range(2):
        took = by_block(view("STATE-CONV-SECTIONS", f"rank {rank} takes"))[0]
        owed = [by_block(view("STATE-CONV-SECTIONS", f"{s} of rank {rank}"))[0] for s in ("query", "key", "value")]
        assert len(took) == sum(map(len, owed)) == told_["bytes_each"]
        assert len(took & set().union(*owed)) == told_["right_bytes"]


def test_the_column_counts_small_blocks():
    told_ = numbers("STATE-RESUME-COLUMN")
    for file, block in (("views_file", told_["small_block"]), ("fixed_views_file", told_["state_block"])):
        assert claim_of("STATE-RESUME-COLUMN", "maps", file)["table"] == [(told_["tokens"] - 1) // block]
    real_ = told_["real"]
    columns = [(real_["tokens"] - 1) // real_[block] for block in ("small_block", "state_block")]
    assert columns == [719, 9] and columns[0] >= real_["columns"] > columns[1]


def test_planes_and_rows_of_the_indexer_have_one_size():
    told_ = numbers("INDEXER-PLANAR")
    read, right = (starts("INDEXER-PLANAR", name) for name in ("index values", "index values, in planes"))
    assert [read[0, t, 0] - right[0, t, 0] for t in range(4)] == [told_["drift_per_token"] * t for t in range(4)]
    assert told_["real"]["block_tokens"] * (told_["real"]["values"] + told_["real"]["scale"]) == 256 * 132


def test_a_row_of_the_indexer_is_a_page():
    told_ = numbers("INDEXER-PAGE-ROW")
    page = all_bytes(view("INDEXER-PAGE-ROW", "index values of page 0")) | all_bytes(
        view("INDEXER-PAGE-ROW", "index scales of page 0")
    )
    assert len(page) == told_["row_bytes"] == claim_of("INDEXER-PAGE-ROW", "maps")["stride_bytes"]
    assert view("INDEXER-PAGE-ROW", "index values of page 0")["shape"][0] == told_["page_tokens"]


def test_the_first_block_past_two_gibibytes():
    told_ = numbers("ADDR-INT32-BLOCK")
    assert -(-(2**31) // told_["stride_bytes"]) == told_["first_bad_block"] == 2200 - told_["bad_blocks"]


def test_block_starts_are_cut_down_to_vectors():
    told_ = numbers("INDEXER-VECTOR-TRUNC")
    gathered, keys = starts("INDEXER-VECTOR-TRUNC", "keys as gathered"), starts("INDEXER-VECTOR-TRUNC", "keys")
    for block in range(4):
        assert keys[block, 0, 0] == block * told_["block_bytes"]
        assert gathered[block, 0] == keys[block, 0, 0] // told_["vector_bytes"] * told_["vector_bytes"]


def test_what_stays_behind():
    for name, of in (("STATE-POOL-UNSENT", "window and indexer state"), ("NVFP4-SCALES-STAY", "block scales")):
        assert len(by_block(view(name, of))[0]) == numbers(name)["missing_bytes_per_block"]


def test_sizes_of_the_4_bit_cases():
    told_ = numbers("NVFP4-HND-AS-NHD")
    assert view("NVFP4-HND-AS-NHD", "V scales")["shape"][1:3] == [told_["block_tokens"], told_["heads"]]
    told_ = numbers("NVFP4-V-BY-K-STRIDES")
    rows = [view("NVFP4-V-BY-K-STRIDES", f"{half} data, in its pool")["stride"][1] for half in "KV"]
    assert rows == [told_["K_row_bytes"], told_["V_row_bytes"]]
    told_ = numbers("NVFP4-SCALES-DENSE")
    assert view("NVFP4-SCALES-DENSE", "scales")["stride"][1] == told_["row_bytes"] == 16 + told_["scales_per_row"]


def test_ids_of_kernel_blocks():
    told_ = numbers("KERNEL-PADDED-SPLIT")
    stride = view("KERNEL-PADDED-SPLIT", "kernel blocks")["stride"]
    assert stride[:2] == [told_["ratio"] * told_["page_bytes"], told_["page_bytes"]]
    assert told_["ratio"] * told_["kernel_block_bytes"] <= told_["page_bytes"]
    told_ = numbers("KERNEL-DCP-SLOT")
    assert told_["real"]["user_block"] == told_["ratio"] * told_["real"]["kernel_block"]
    steps = [claim_of("KERNEL-DCP-SLOT", "maps", file)["stride_bytes"] for file in ("views_file", "fixed_views_file")]
    assert steps[0] == told_["ratio"] * steps[1]


def test_pages_of_a_chunk_are_every_fourth_slot():
    told_ = numbers("CHUNK-TOKEN-TABLE")
    slots, page = told_["token_slots"], told_["page_tokens"]
    assert claim_of("CHUNK-TOKEN-TABLE", "maps")["table"] == slots[:2]
    assert claim_of("CHUNK-TOKEN-TABLE", "maps", "fixed_views_file")["table"] == [
        slot // page for slot in slots[::page]
    ]


def test_blocks_and_slots_over_several_ranks():
    told_ = numbers("DCP-BLOCK-SPAN")
    filled = [
        file["views"][0]["shape"][0]
        for file in (BY_ID["DCP-BLOCK-SPAN"][k] for k in ("views_file", "fixed_views_file"))
    ]
    spans = (told_["block_tokens"], told_["block_tokens"] * told_["ranks"])
    assert filled == [told_["tokens"] // span for span in spans]
    told_ = numbers("DCP-GLOBAL-SLOT")
    written_ = [start // 4 for index, start in starts("DCP-GLOBAL-SLOT", "rank 0 writes").items() if index[1] == 0]
    assert written_ == told_["slots_written"] == [token * told_["ranks"] for token in range(4)]


def test_heads_of_the_chunk_and_of_the_cache():
    told_ = numbers("CORE-HEAD-BOUNDARY")
    steps = [view("CORE-HEAD-BOUNDARY", name)["stride"][0] // 8 for name in ("chunk as written", "chunk")]
    assert steps == [told_["chunk_rows"], told_["cache_rows"]]


def test_what_the_ranks_read_in_place_of_b_and_c():
    told_ = numbers("TP-REPLICATED-BC")
    read = {name: all_bytes(view("TP-REPLICATED-BC", name)) for name in ("rank 1 B", "rank 0 C", "rank 1 C")}
    assert read["rank 1 B"] <= all_bytes(view("TP-REPLICATED-BC", told_["rank_1_B_lands_on"]))
    for rank in range(2):
        assert read[f"rank {rank} C"] <= all_bytes(view("TP-REPLICATED-BC", told_["C_lands_on"]))
