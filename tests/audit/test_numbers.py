"""Copy strides, ids, address types, alignment, readings and scale places, compared with plain Python."""

import random
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.causes import diagnose
from kvviz.audit.claims import Addressed, Aligned, Declared, Follows, Maps, Overlay, StepAlike
from kvviz.audit.numbers import ADDRESS_TYPES, EXACT_FLOAT_BITS, INTEGER_BITS, addressable
from kvviz.audit.view import Storage, View
from kvviz.show.nearby import map_around

SEEDS = range(250)
POOL = Storage("pool", 1 << 14)


def indices(view: View):
    return product(*map(range, view.shape))


def elems(view: View, index: tuple[int, ...]) -> int:
    """Return the address of an element, counted in elements."""
    return view.offset + sum(i * step for i, step in zip(index, view.stride, strict=True))


def claimed(views, claim) -> list:
    """Return the findings of the claim, without those of the views alone."""
    alone = set(audit_views(views).findings)
    return [finding for finding in audit_views(views, [claim]).findings if finding not in alone]


def random_view(draw: random.Random, name: str = "v", reach: int = 40, storage: Storage = POOL) -> View:
    shape = tuple(draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(1, 3)))
    stride = tuple(draw.choice((0, 1, 2, 3, 4, 6, 8, draw.randint(-reach, reach))) for _ in shape)
    low = sum(min(step, 0) * (size - 1) for step, size in zip(stride, shape, strict=True))
    return View(name, storage, shape, stride, draw.randint(0, reach) - low, draw.choice((1, 2, 4, 8)))


def exact(number: int, address_type: str) -> bool:
    """Return True if a type holds a whole number: a float by its number of bits, an integer by its range."""
    if address_type in INTEGER_BITS:
        return (
            (0 if address_type.startswith("u") else -(1 << INTEGER_BITS[address_type]))
            <= number
            < 1 << INTEGER_BITS[address_type]
        )
    if address_type == "float16" and abs(number) >= 65_520:
        return False
    bits = f"{abs(number):b}"
    return len(bits.rstrip("0")) <= EXACT_FLOAT_BITS[address_type]


@pytest.mark.parametrize("seed", SEEDS)
def test_addressed_is_that_of_the_account(seed):
    draw = random.Random(seed)
    address_type = draw.choice(("bfloat16", "float16", "int8", "uint8", "int16", "uint16"))
    view = random_view(draw, reach=draw.choice((60, 300, 3000, 9000)), storage=Storage("wide", 1 << 22))
    view = replace(view, offset=view.offset - draw.choice((0, 0, 200, 2000, 20_000)))
    base, unit = draw.choice(("storage", "view")), draw.choice(("elements", "bytes"))
    origin, size = (view.offset if base == "view" else 0), (view.itemsize if unit == "bytes" else 1)
    addresses = {index: (elems(view, index) - origin) * size for index in indices(view)}
    bad = {index: address for index, address in addresses.items() if not exact(address, address_type)}
    found = claimed([view], Addressed("v", address_type, base, unit))
    assert [(f.kind, f.views, f.elements, f.bytes) for f in found] == (
        [("index_space", ("v",), len(bad), None)] * bool(bad)
    )
    for finding in found:
        (place,) = finding.example
        assert bad[place.index] == min(bad.values())
        assert place.start_bytes == elems(view, place.index) * view.itemsize
        assert f"{unit[:-1]} address {min(bad.values())} is the first" in finding.text
        assert ("count from the first element of the view" in finding.text) == (base == "view")


@pytest.mark.parametrize("address_type", ["float16", "float32", "float64"])
def test_exactness_is_that_of_numpy(address_type):
    draw = random.Random(7)
    edge = 1 << EXACT_FLOAT_BITS[address_type]
    for number in (edge - 1, edge, edge + 1, edge + 2, *(draw.randrange(edge * 8) for _ in range(200))):
        assert exact(number, address_type) == (int(np.dtype(address_type).type(number)) == number)


@pytest.mark.parametrize("address_type", ADDRESS_TYPES)
def test_every_type_ends_where_its_numbers_end(address_type):
    last = (1 << {**EXACT_FLOAT_BITS, **INTEGER_BITS}[address_type]) - (address_type in INTEGER_BITS)
    if last > 1 << 60:
        return
    view = View("v", Storage("huge", last + 9), (3,), (1,), last - 1)
    (finding,) = claimed([view], Addressed("v", address_type))
    assert (finding.elements, finding.example[0].index) == (1, (2,))
    assert not claimed([View("v", Storage("huge", last + 9), (2,), (1,), last - 1)], Addressed("v", address_type))


def test_addresses_count_from_the_view_or_the_storage_in_elements_or_bytes():
    """A view of 2**30 elements of 4 bytes in the upper half of a storage of 8 GiB, addressed in 32 bits."""
    view = View("v", Storage("s", 1 << 33), (1 << 30,), (1,), 1 << 30, 4)
    wrong = {
        ("storage", "elements"): 0,
        ("view", "elements"): 0,
        ("storage", "bytes"): 1 << 30,
        ("view", "bytes"): 1 << 29,
    }
    for (base, unit), elements in wrong.items():
        found = claimed([view], Addressed("v", "int32", base, unit))
        assert [finding.elements for finding in found] == [elements] * bool(elements)
    (finding,) = claimed([view], Addressed("v", "int32", "view", "bytes"))
    assert finding.example[0].index == (1 << 29,)
    assert finding.text == (
        "byte address 2147483648 is the first that int32 cannot hold; "
        "addresses count from the first element of the view"
    )


def test_an_address_in_float32_is_rounded_as_numpy_rounds():
    view = View("scales", Storage("cache", 2100 * 8320 * 4), (2100, 128), (8320, 1), 0, 4, ("block", "entry"))
    (finding,) = claimed([view], Addressed("scales", "float32"))
    assert (finding.elements, finding.example[0].index) == (5312, (2017, 1))
    first = 2017 * 8320 + 1
    assert f"{first} is the first that float32 cannot hold (it becomes {int(np.float32(first))})" in finding.text


@pytest.mark.parametrize("seed", SEEDS)
def test_aligned_is_that_of_the_account(seed):
    draw = random.Random(seed)
    boundary = draw.choice((1, 2, 4, 8, 12, 16, 32, 128))
    address, modulus = draw.choice((None, 0, 8, draw.randrange(64))), draw.choice((64, 4096))
    view = random_view(draw, storage=Storage("pool", 1 << 14, address, modulus))
    known = address is not None and modulus % boundary == 0
    base, in_sector = (address if known else 0), (address or 0)
    rows = [index for index in indices(View("v", POOL, (*view.shape[:-1], 1), view.stride, view.offset))]
    starts = {index: elems(view, index) * view.itemsize for index in rows}
    off = {index for index, start in starts.items() if (base + start) % boundary}
    width = view.shape[-1] * view.itemsize
    sectors: dict[tuple[int, ...], set[int]] = {}
    for index in indices(view):
        start = elems(view, index) * view.itemsize + in_sector
        sectors.setdefault(index[:-1], set()).update(byte // 32 for byte in range(start, start + view.itemsize))
    touched = sum(map(len, sectors.values()))
    for required, severity in ((True, "error"), (False, "warning")):
        found = claimed([view], Aligned("v", boundary, required))
        expected = [("unaligned", ("v",), len(off), None, severity)] if off else []
        assert [(f.kind, f.views, f.elements, f.bytes, f.severity) for f in found] == expected
        for finding in found:
            assert finding.example[0].index in off
            assert f"{len(off)} of {len(rows)} row{'s' * (len(rows) > 1)} of {width} byte" in finding.text
            assert f"all rows together touch {touched} sector" in finding.text
            assert ("legal and slow" in finding.text) == (not required)
            assert ("only offsets were judged" in finding.text) == (not known)
        notes = audit_views([view], [Aligned("v", boundary, required)]).notes
        assert any("only offsets were judged" in note for note in notes) == (not known and not off and boundary > 1)


def test_rows_are_aligned_by_the_address_of_their_storage():
    """The storage starts 64 bytes after a multiple of 4096. Rows at multiples of 4096 inside the storage are off."""
    storage = Storage("pool", 5 * 4096, 64, 4096)
    inside = View("v", storage, (3, 64), (4096, 1))
    (finding,) = claimed([inside], Aligned("v", 4096))
    assert (finding.kind, finding.elements, finding.example[0].index) == ("unaligned", 3, (0, 0))
    assert "storage pool starts 64 bytes after a multiple of 4096" in finding.text
    (diagnosis,) = diagnose([inside], [Aligned("v", 4096)])
    assert diagnosis.proved and diagnosis.repaired[0].offset == 4096 - 64
    result = audit_views(diagnosis.repaired, [Aligned("v", 4096)])
    assert result.clean and not result.notes and "1 view has all rows at multiples of 4096 bytes" in result.checked


def test_without_an_address_only_offsets_are_judged():
    views = [
        View(name, Storage("pool", 5 * 4096), (3, 64), (4096, 1), offset) for name, offset in (("a", 0), ("b", 64))
    ]
    said = "only offsets were judged: the address of storage pool is not known"
    clean = audit_views(views, [Aligned("a", 4096)])
    assert clean.clean and clean.notes == (f"a: {said}",)
    assert "1 view has all rows at multiples of 4096 bytes (only offsets were judged)" in clean.checked
    (finding,) = claimed(views, Aligned("b", 4096))
    assert finding.text.endswith(said) and "only offsets were judged" in diagnose(views, [Aligned("b", 4096)])[0].text
    known = replace(views[0], storage=Storage("pool", 5 * 4096, 64, 1024))
    (note,) = audit_views([known], [Aligned("a", 4096)]).notes
    assert note == f"a: {said} modulo 4096"


@pytest.mark.parametrize(
    ("address", "modulus", "said"),
    [
        (64, 48, "address_modulus must be a power of two, not 48"),
        (64, 0, "address_modulus must be a power of two, not 0"),
        (64, True, "address_modulus must be a power of two, not True"),
        (4160, 4096, "address must be an integer from 0 to 4095, not 4160: give the remainder"),
        (-1, 4096, "address must be an integer from 0 to 4095, not -1"),
    ],
)
def test_an_address_is_a_remainder(address, modulus, said):
    with pytest.raises(ValueError, match=f"storage s: {said}"):
        Storage("s", 64, address, modulus)


@pytest.mark.parametrize(("step", "bytes_"), [(1, 2), (8, 16), (12, 24)])
def test_the_stride_of_a_single_index_counts_on_request(step, bytes_):
    view = View("rows", Storage("cache", 4 * 64), (4, 1, 8), (32, step, 1), 0, 2, ("slot", "head", "d"))
    assert not claimed([view], Aligned("rows", 16))
    found = claimed([view], Aligned("rows", 16, strides=True))
    said = f"head has a stride of {bytes_} bytes, not a multiple of 16; no row moves, because the axis has only one "
    said += "index"
    assert [(f.kind, f.text) for f in found] == [("unaligned", said)] * bool(bytes_ % 16)


def test_aligned_says_how_often_a_row_is_right():
    view = View("rows", Storage("cache", 16 * 92), (16, 1, 46), (46, 46, 1), 0, 2, ("slot", "head", "d"))
    (finding,) = claimed([view], Aligned("rows", 16))
    assert finding.elements == 12 and "the distance from a boundary repeats every 4 along slot;" in finding.text
    assert finding.example[0].index == (1, 0, 0)
    assert [slot for slot in range(16) if slot * 92 % 16 == 0] == [0, 4, 8, 12]


@pytest.mark.parametrize("seed", SEEDS)
def test_ids_are_those_of_the_account(seed):
    """An id stands for ``ratio`` blocks. All must exist, and the consumer must expect the first one at its place."""
    draw = random.Random(seed)
    view = View("v", POOL, (draw.randint(1, 12), 4), (draw.choice((4, 6)), 1), 0, draw.choice((1, 2)))
    ratio, count = draw.randint(1, 4), draw.randint(0, 8)
    step = draw.choice((None, view.stride[0] * view.itemsize * ratio, view.stride[0] * view.itemsize, 24))
    expected = []
    without_blocks = [i for i in range(count) if (i + 1) * ratio > view.shape[0]]
    if without_blocks:
        expected.append((len(without_blocks), None))
    moved = [] if step is None else [i for i in range(count) if i * step != i * ratio * view.stride[0] * view.itemsize]
    if moved:
        expected.append((len(moved), None))
    found = claimed([view], Maps("ids", "v", count, ratio, step))
    assert [(f.elements, f.bytes) for f in found] == expected
    assert all((f.kind, f.views) == ("index_space", ("v",)) for f in found)
    if without_blocks:
        told = (
            f"id {without_blocks[0]} has"
            if len(without_blocks) == 1
            else f"ids {without_blocks[0]} to {without_blocks[-1]} have"
        )
        assert f"{told} no place in it" in found[0].text


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_a_copy_are_those_of_the_account(seed):
    draw = random.Random(seed)
    sides = []
    for name in ("source", "target"):
        shape = (draw.choice((1, 2, 3, 3)), draw.choice((2, 4, 4)))
        sides.append(View(name, POOL, shape, (draw.choice((4, 8, 8)), 1), 0, draw.choice((1, 1, 2))))
    rows = [view.shape[1] * view.itemsize for view in sides]
    blocks = [view.shape[0] for view in sides]
    steps = [view.stride[0] * view.itemsize for view in sides]
    expected = Counter()
    if rows[0] != rows[1]:
        kind = "truncated" if rows[0] < rows[1] else "oversized"
        expected[kind, min(blocks), abs(rows[0] - rows[1]) * min(blocks)] += 1
    if steps[0] != steps[1] and min(blocks) > 1:
        expected["misplaced", min(blocks) - 1, (min(blocks) - 1) * min(rows)] += 1
    if blocks[0] != blocks[1]:
        expected["index_space", abs(blocks[0] - blocks[1]), None] += 1
    found = claimed(sides, StepAlike("source", "target"))
    assert Counter((f.kind, f.elements, f.bytes) for f in found) == expected
    assert all(f.views == ("source", "target") and str(rows[0]) in f.text for f in found if "bytes and of" in f.text)


@pytest.mark.parametrize("seed", SEEDS)
def test_scales_follow_as_in_the_account(seed):
    """Each scale belongs ``at_bytes`` after its cell. Some random views have another block stride or offset."""
    draw = random.Random(seed)
    shape = (draw.randint(1, 4), draw.randint(1, 3), 8)
    cell, at_bytes = draw.choice((12, 16)), draw.choice((8, 8, 4, 7))
    data = View("data", POOL, shape, (draw.choice((40, 48, 56)), cell, 1), draw.choice((0, 4)), 1)
    stride = [data.stride[0] // 4, cell // 4]
    stride[draw.randint(0, 1)] += draw.choice((0, 0, 1, -1))
    scale = View("scale", POOL, shape[:-1], tuple(stride), (data.offset + 8) // 4 + draw.choice((0, 0, 1)), 4)
    wrong = {}
    for block, token in indices(scale):
        meant = data.offset + block * data.stride[0] + token * cell + at_bytes
        if elems(scale, (block, token)) * 4 != meant:
            wrong[block, token] = elems(scale, (block, token)) * 4
    found = claimed([data, scale], Follows("scale", "data", at_bytes))
    assert [(f.views, f.elements) for f in found] == ([(("scale",), len(wrong))] if wrong else [])
    for finding in found:
        assert finding.kind in ("misplaced", "permuted")
        assert finding.bytes == len({byte for start in wrong.values() for byte in range(start, start + 4)})
        assert sum(count for _, count in finding.hits) == len(wrong)
        lies, belongs, *_ = finding.example
        assert lies.start_bytes == min(wrong.values())
        block, token = belongs.index
        meant = data.offset + block * data.stride[0] + token * cell + at_bytes
        assert (belongs.start_bytes, belongs.stop_bytes) == (meant, meant + 4)


def test_a_place_off_the_multiples_of_a_scale_has_all_its_bytes():
    """Cells are 10 bytes apart, so the second of every two scales of 4 bytes cannot start at a multiple of 4."""
    storage = Storage("s", 20)
    views = [View("K data", storage, (2, 6), (10, 1)), View("K scale", storage, (2,), (2,), 2, 4, role="scale")]
    claims = [Follows("K scale", "K data", 6)]
    result = audit_views(views, claims)
    (finding,) = result.findings
    assert (finding.kind, finding.elements, finding.bytes) == ("misplaced", 1, 4)
    assert [(p.index, p.start_bytes, p.stop_bytes) for p in finding.example] == [
        ((0,), 8, 12),
        ((0,), 6, 10),
        ((0,), 6, 10),
    ]
    assert finding.hits == (("K scale, at another index", 1),)
    (diagnosis,) = diagnose(views, claims, result)
    (repaired,) = diagnosis.repaired
    assert diagnosis.proved and sorted(repaired.all_bytes) == [6, 7, 8, 9, 16, 17, 18, 19]
    assert audit_views([views[0], repaired], claims).clean
    assert map_around(finding, views, claims).at(7).owner.view == "K scale"


def test_a_scale_given_as_bytes_follows_its_data():
    storage = Storage("s", 30)
    data, scale = View("data", storage, (3, 6), (10, 1)), View("scale", storage, (3, 4), (10, 1), 6)
    assert not claimed([data, scale], Follows("scale", "data", 6))
    (finding,) = claimed([data, replace(scale, offset=5)], Follows("scale", "data", 6))
    assert (finding.kind, finding.elements, finding.bytes) == ("misplaced", 12, 12)
    assert finding.hits == (("scale, at another index", 9), ("data", 3))


def reading(name: str, shape, stride, offset: int = 0, storage: Storage = POOL, axes=()) -> View:
    return View(name, storage, shape, stride, offset, 1, axes)


@pytest.mark.parametrize("seed", SEEDS)
def test_readings_are_those_of_the_account(seed):
    """The finding names the readings that fit, and the number of bytes that they share."""
    draw, page = random.Random(seed), Storage("page", 24)
    views = [reading("as given", (4, 6), (6, 1), storage=page)]
    for n in range(draw.randint(1, 3)):
        shape, stride = draw.choice((((4, 6), (6, 1)), ((4, 6), (1, 4)), ((4, 3), (6, 1)), ((4, 1, 6), (6, 9, 1))))
        views.append(reading(f"r{n}", shape, stride, draw.choice((0, 0, 1)), page))
    bytes_of = {v.name: {elems(v, index) for index in indices(v)} for v in views[1:]}
    fitting = [v for v in views[1:] if max(bytes_of[v.name]) < page.nbytes]
    maps = {(v.shape, tuple(elems(v, index) for index in indices(v))) for v in fitting}
    found = claimed(views, Declared("as given", tuple(v.name for v in views[1:])))
    names = ("as given", *(v.name for v in fitting))
    assert [(f.kind, f.views, f.elements) for f in found] == ([("ambiguous", names, 24)] if len(maps) > 1 else [])
    for finding in found:
        shared = set.intersection(*(bytes_of[v.name] for v in fitting))
        sizes = {len(bytes_of[v.name]) for v in fitting}
        same = sizes == {len(shared)}
        told = f"they claim the same {len(shared)} bytes" if same else f"share {len(shared)} of them"
        assert told in finding.text and "declare one" in finding.text
    for view in views[1:]:
        assert not claimed(views, Declared("as given", tuple(v.name for v in views[1:]), view.name))


def test_share_of_a_seed_is_balanced():
    """Between a tenth and nine tenths of the random views have a fault, and the others have none."""
    faulty = 0
    for seed in SEEDS:
        view = random_view(random.Random(seed))
        faulty += bool(claimed([view], Aligned("v", 16)))
    assert Fraction(1, 10) < Fraction(faulty, len(SEEDS)) < Fraction(9, 10)


ROWS = View("rows", POOL, (4, 8), (8, 1), 0, 2, ("block", "d"))


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (Addressed("rows", "float33"), "address_type 'float33' does not exist.*did you mean 'float32'"),
        (Addressed("rows", "int32", "page"), "base 'page' does not exist: it is one of storage, view"),
        (Addressed("rows", "int32", "view", "byte"), "unit 'byte' does not exist.*did you mean 'bytes'"),
        (Aligned("rows", 0), "boundary_bytes must be at least 1, not 0"),
        (Maps("ids", "rows", -1), "ids: count must be at least 0 and ratio at least 1, but count is -1 and ratio is 1"),
        (
            Maps("ids", "rows", 4, 0),
            "ids: count must be at least 0 and ratio at least 1, but count is 4 and ratio is 0",
        ),
        (Declared("rows", ("rows",), "row"), "declared 'row' does not exist: it is one of rows"),
        (
            Follows("rows", "rows", 8),
            r"one element per cell of rows: shape \(4,\), but it has shape \(4, 8\)",
        ),
        (StepAlike("rows", "z"), "names the view 'z', which is not among the 1 views"),
    ],
)
def test_errors_say_what_does_not_fit(claim, said):
    with pytest.raises(ValueError, match=said):
        audit_views([ROWS], [claim])


def test_the_first_row_off_a_boundary_is_the_lowest():
    """Heads come before tokens in memory here, so the second token lies before the second head."""
    view = View("v", Storage("s", 96), (1, 2, 2, 12), (96, 12, 36, 1))
    (finding,) = audit_views([view], [Aligned("v", 16)]).findings
    assert finding.example[0].start_bytes == 12


def test_a_huge_boundary_needs_no_table_and_nothing_is_aligned():
    view = View("v", Storage("s", 1000), (10, 4), (32, 1))
    (finding,) = audit_views([view], [Aligned("v", (1 << 59) + 1)]).findings
    assert finding.elements == 9 and finding.example[0].index == (1, 0)
    empty = View("e", Storage("s", 1000), (10, 0), (3, 1))
    assert audit_views([empty], [Aligned("e", 32)]).clean


@pytest.mark.parametrize("boundary", [1 << 16, 1 << 20, 1 << 21, (1 << 21) - 1])
def test_boundaries_of_pages(boundary):
    view = View("v", Storage("s", 1 << 30), (1 << 20, 8), (9, 1))
    pages = View("p", Storage("t", 1 << 40), (3000, 2, 40), ((5 << 19) + 64, 1 << 19, 1), 1 << 20)
    for rows in (view, pages):
        starts = np.add.outer(*(np.arange(n) * step for n, step in zip(rows.shape[:2], rows.stride[:2], strict=True)))
        starts = (starts[:, :1] if rows is view else starts) + rows.offset
        off = int((starts % boundary != 0).sum())
        (finding,) = audit_views([rows], [Aligned(rows.name, boundary)]).findings
        assert finding.elements == off > 0 and f"{off} of {starts.size} rows" in finding.text


def test_a_last_axis_with_gaps_touches_a_sector_an_element():
    view = View("v", Storage("s", 4096), (2, 4), (132, 32), 1, 4)
    (finding,) = claimed([view], Aligned("v", 16))
    assert "all rows together touch 8 sectors of 32 bytes, and would touch 8 if aligned" in finding.text


@pytest.mark.parametrize("sign", [1, -1])
def test_float16_ends_at_infinity(sign):
    """Numbers from 65520 on round to infinity. The largest exact number is 65504."""
    first = {}
    for offset in (65_504, 65_505, 65_519, 65_520, 65_536, 131_072):
        view = View("v", Storage("s", 1 << 20), (1,), (1,), sign * offset)
        (finding,) = claimed([view], Addressed("v", "float16")) or (None,)
        first[offset] = finding and finding.text.split("becomes ")[1][:-1]
    infinity = "inf" if sign == 1 else "-inf"
    edge = str(sign * 65_504)
    assert first == {65_504: None, 65_505: edge, 65_519: edge, **dict.fromkeys((65_520, 65_536, 131_072), infinity)}
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(65_520)) and int(np.float16(65_519)) == 65_504


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 20, 32), (32, 1)),
        ((1 << 28,), (1,)),
        ((1 << 40,), (1,)),
        ((2000, 2, 16, 8, 128), (32_768, 16_384, 1024, 128, 1)),
        ((50_269, 16, 8, 128), (16 * 8 * 132 * 200, 8 * 132, 132, 1)),
    ],
)
@pytest.mark.parametrize("address_type", ["bfloat16", "float32", "int32"])
def test_addresses_are_counted_and_not_listed(shape, stride, address_type):
    view = View("v", Storage("s", 1 << 42), shape, stride)
    begun = time.process_time()
    found = list(addressable(Addressed("v", address_type), view))
    assert time.process_time() - begun < 0.2
    if view.num_elements <= 1 << 25:
        assert sum(finding.elements for finding in found) == _bad_addresses(view.starts, address_type)


def _bad_addresses(starts: np.ndarray, address_type: str) -> int:
    if address_type in INTEGER_BITS:
        return int((starts >= 1 << INTEGER_BITS[address_type]).sum())
    single = starts.astype(np.float32)
    cut = (single.view(np.uint32) & 0xFFFF != 0) & (address_type == "bfloat16")
    return int((cut | (single.astype(np.int64) != starts)).sum())


def test_a_million_million_addresses():
    """Of the addresses 0 to 2**40, float32 holds the first 2**24, and 2**23 more in each doubling."""
    (finding,) = addressable(Addressed("v", "float32"), View("v", Storage("s", 1 << 42), (1 << 40,), (1,)))
    assert finding.elements == (1 << 40) - (1 << 24) - 16 * (1 << 23)
    assert finding.example[0].index == ((1 << 24) + 1,)


def test_an_empty_side_of_a_copy_lacks_nothing():
    sides = [View("source", POOL, (0, 4), (4, 1)), View("target", POOL, (3, 8), (8, 1))]
    (finding,) = claimed(sides, StepAlike("source", "target"))
    assert (finding.kind, finding.elements) == ("index_space", 3)


def test_an_overlay_of_nobody_is_clean():
    assert audit_views([View("v", Storage("s", 8), (8,), (1,))], [Overlay(())]).clean


def test_one_row_does_not_start_and_two_rows_do_not():
    one, two = View("one", POOL, (2, 8), (9, 1)), View("two", POOL, (3, 8), (9, 1))
    (finding,) = claimed([one], Aligned("one", 8))
    assert finding.text == (
        "1 of 2 rows of 8 bytes does not start at a multiple of 8; all rows together touch 2 sectors of 32 bytes, and "
        "would touch 2 if aligned; only offsets were judged: the address of storage pool is not known"
    )
    (finding,) = claimed([two], Aligned("two", 8))
    assert finding.text.startswith("2 of 3 rows of 8 bytes do not start at a multiple of 8")


def test_a_table_may_have_holes_and_repeat_ids_but_not_leave_the_view():
    """Rank 0 of two holds every second pair of tokens: the others are holes. Slot 12 is outside the 12 slots."""
    view = View("K", Storage("s", 48), (12, 4), (4, 1))
    slots = (0, 1, -1, -1, 2, 3, -1, -1)
    ring = tuple(position % 12 for position in range(30))
    good = [Maps("rank 0", "K", 8, table=slots), Maps("ring", "K", 30, table=ring)]
    assert audit_views([view], good).clean
    (finding,) = audit_views([view], [Maps("rank 0", "K", 5, table=(0, 12, -1, -2, 11))]).findings
    assert (finding.kind, finding.elements) == ("index_space", 2)
    assert (
        "2 entries have no place in it: entry 1 of rank 0 is 12 (-1 would mean that the entry has no block)"
        in finding.text
    )
    (diagnosis,) = diagnose([view], [Maps("rank 0", "K", 5, table=(0, 12, -1, -2, 11))])
    assert diagnosis.cause == "block_unit" and not diagnosis.proved and "The table names id 12" in diagnosis.text
    assert diagnose([view], [Maps("rank 0", "K", 2, table=(0, -2))])[0].cause == "unknown"
    with pytest.raises(ValueError, match="rank 0: count is 3, but the table has 2 entries: they must be equal"):
        audit_views([view], [Maps("rank 0", "K", 3, table=(0, 1))])
