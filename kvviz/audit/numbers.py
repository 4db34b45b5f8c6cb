"""Checks on numbers rather than bytes: steps of a copy, ids and tables, address types, alignment, readings."""

from collections.abc import Iterator, Sequence
from math import gcd, prod

import numpy as np

from kvviz.audit.arguments import one_of
from kvviz.audit.byte_sets import Dims, TooMuchWorkError, byte_lanes, nested_parts, normal_dims
from kvviz.audit.claims import Aligned, Declared, Maps
from kvviz.audit.counting import count_congruent, locate
from kvviz.audit.findings import Finding
from kvviz.audit.overlap import place
from kvviz.audit.sweep import Sweep
from kvviz.audit.view import View

SECTOR_BYTES = 32
"""What a GPU's memory moves at once."""

EXACT_FLOAT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
INTEGER_BITS = {"int8": 7, "uint8": 8, "int16": 15, "uint16": 16, "int32": 31, "uint32": 32, "int64": 63}
FLOAT_ENDS = {"float16": 1 << 16}
"""What rounds to this or beyond becomes an infinity, where that can happen to an address."""

ADDRESS_TYPES = (*EXACT_FLOAT_BITS, *INTEGER_BITS)


def step_alike(source: View, target: View) -> Iterator[Finding]:
    """Row width, block stride and block count of the two sides of a copy."""
    names, storage = (source.name, target.name), source.storage.name
    ours, theirs = _row_bytes(source), _row_bytes(target)
    if ours != theirs:
        kind = "truncated" if ours < theirs else "oversized"
        text = f"a block of {source.name} is {ours} bytes and of {target.name} {theirs}"
        blocks = min(_blocks(source), _blocks(target))
        if blocks:
            yield Finding(kind, names, storage, blocks, abs(ours - theirs) * blocks, text=text)
    steps = [view.stride[0] * view.itemsize if _blocks(view) > 1 else None for view in (source, target)]
    if None not in steps and steps[0] != steps[1]:
        text = f"{source.name} steps {steps[0]} bytes from block to block and {target.name} {steps[1]}"
        blocks = min(_blocks(source), _blocks(target)) - 1
        yield Finding("misplaced", names, storage, blocks, blocks * min(ours, theirs), text=text)
    if _blocks(source) != _blocks(target):
        text = f"{source.name} has {_blocks(source)} blocks and {target.name} {_blocks(target)}"
        yield Finding("index_space", names, storage, abs(_blocks(source) - _blocks(target)), None, text=text)


def _blocks(view: View) -> int:
    return view.shape[0] if view.shape else 1


def _row_bytes(view: View) -> int:
    return view.num_elements // max(_blocks(view), 1) * view.itemsize


def ids_in_range(claim: Maps, view: View) -> Iterator[Finding]:
    """Ids beyond the table, and a consumer that steps another distance from id to id."""
    if claim.count < 0 or claim.ratio < 1:
        raise ValueError(f"{claim.name}: {claim.count} ids of {claim.ratio} blocks each make no index space")
    held = _blocks(view) // claim.ratio
    if claim.count > held:
        text = (
            f"{claim.name} counts ids 0 to {claim.count - 1}, and {view.name} holds {held}"
            f" (its {_blocks(view)} blocks, {claim.ratio} an id): {_ids(held, claim.count)} no place in it"
        )
        yield Finding("index_space", (view.name,), view.storage.name, claim.count - held, None, text=text)
    step = view.stride[0] * view.itemsize * claim.ratio if view.shape else 0
    if claim.stride_bytes is not None and claim.stride_bytes != step and claim.count > 1:
        text = f"{claim.name} steps {claim.stride_bytes} bytes from id to id, and an id of {view.name} is {step} bytes"
        wrong = claim.count - 1
        yield Finding("index_space", (view.name,), view.storage.name, wrong, None, text=text)


def _ids(first: int, stop: int) -> str:
    return f"id {first} has" if stop - first == 1 else f"ids {first} to {stop - 1} have"


def addressable(view: View, address_type: str) -> Iterator[Finding]:
    """Element addresses (offset and strides in elements) that a number type cannot hold exactly.

    Raises:
        TooMuchWorkError: the view meets itself too often, or its strides leave too many residues.
    """
    one_of("address_type", address_type, ADDRESS_TYPES)
    if not view.num_elements:
        return
    unit = View(view.name, view.storage, view.shape, view.stride, view.offset)
    low, high = unit.span_bytes
    ranges = list(_inexact_ranges(address_type, low, high))
    parts = _address_parts(unit) if ranges else []
    bad = [_misses(parts, *found) for found in ranges]
    if any(bad):
        first = _first_miss(parts, *next(found for found, count in zip(ranges, bad, strict=True) if count))
        count = sum(bad) * prod(size for step, size in zip(unit.stride, unit.shape, strict=True) if step == 0)
        text = f"element address {first} is the first that {address_type} cannot hold"
        text += f" (it becomes {_rounded(first, address_type)})" if address_type in EXACT_FLOAT_BITS else ""
        places = (place(view, index) for index in (locate(unit, first),) if index is not None)
        yield Finding("index_space", (view.name,), view.storage.name, count, None, tuple(places), text=text)


def _rounded(number: int, address_type: str) -> int | str:
    """What a float makes of an integer: to nearest, ties to even, and an infinity beyond the largest."""
    sign, number = ("-", -number) if number < 0 else ("", number)
    shift = max(number.bit_length() - EXACT_FLOAT_BITS[address_type], 0)
    half, rest = (1 << shift) >> 1, number & ((1 << shift) - 1)
    whole = number >> shift
    rounded = (whole + (rest > half or (rest == half and shift > 0 and whole & 1))) << shift
    if rounded >= FLOAT_ENDS.get(address_type, rounded + 1):
        return f"{sign}inf"
    return -rounded if sign else rounded


def _inexact_ranges(address_type: str, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of addresses, ascending, of which only multiples of a grain are exact; grain 0: none is."""
    if address_type in INTEGER_BITS:
        limit = 1 << INTEGER_BITS[address_type]
        ranges = [(low, 0 if address_type.startswith("u") else -limit, 0), (limit, high, 0)]
    else:
        bits, beyond = EXACT_FLOAT_BITS[address_type], max(high, 1 - low)
        end = min(FLOAT_ENDS.get(address_type, beyond), beyond)
        scales = [(1 << n, min(2 << n, end), 2 << (n - bits)) for n in range(bits, end.bit_length())]
        scales += [(end, beyond, 0)]
        ranges = [*((1 - stop, 1 - start, grain) for start, stop, grain in reversed(scales)), *scales]
    for first, stop, grain in ranges:
        if max(low, first) < min(high, stop):
            yield max(low, first), min(high, stop), grain


def _address_parts(unit: View) -> list[tuple[int, Dims]]:
    """First address and dims of parts in which no address occurs twice; axes of stride 0 are left out."""
    start, dims = normal_dims(unit)
    return [(start + shift, _merged(part)) for shift, part in nested_parts(dims, 1, unit.name)]


def _merged(dims: Dims) -> Dims:
    """Dims of which each continues where the one inside it ends taken together."""
    merged: Dims = []
    for step, size in dims:
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    return merged


def _misses(parts: Sequence[tuple[int, Dims]], start: int, stop: int, grain: int) -> int:
    """How many addresses in ``[start, stop)`` are no multiples of ``grain``; with grain 0 all of them."""
    return sum(
        sign * (_below(*part, end, 1) - (_below(*part, end, grain) if grain else 0))
        for part in parts
        for sign, end in ((1, stop), (-1, start))
    )


def _below(base: int, dims: Dims, stop: int, grain: int) -> int:
    """Addresses of nested dims from ``base`` on that are below ``stop`` and multiples of ``grain``.

    Those below are a box an axis: all outer indices at their last, this one short of its own, the inner ones free.
    """
    count = 0
    for place_, (step, size) in reversed(list(enumerate(dims))):
        if base >= stop:
            return count
        full = min((stop - base) // step, size)
        if full:
            count += count_congruent([(step, full), *dims[:place_]], -base, grain)
        if full == size:
            return count
        base += full * step
    return count + (base < stop and base % grain == 0)


def _first_miss(parts: Sequence[tuple[int, Dims]], start: int, stop: int, grain: int) -> int:
    """The lowest address in ``[start, stop)`` that is no multiple of ``grain``; there is one."""
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _misses(parts, start, middle, grain) else (middle, high)
    return low


def aligned(claim: Aligned, view: View) -> Iterator[Finding]:
    """Rows (all axes but the last) that do not start at a multiple of the boundary, and the sectors that rows touch.

    Raises:
        TooMuchWorkError: the strides leave too many residues of the boundary.
    """
    boundary = claim.boundary_bytes
    if boundary < 1:
        raise ValueError(f"a boundary is at least 1 byte, not {boundary}")
    if not view.num_elements:
        return
    severity = "error" if claim.required else "warning"
    slow = "" if claim.required else ": legal and slow"
    if claim.strides and (told := _lone_strides(view, boundary)):
        text = f"a single index hides {told}, no multiple of {boundary}{slow}"
        yield Finding("unaligned", (view.name,), view.storage.name, None, None, severity=severity, text=text)
    dims = [(step * view.itemsize, size) for step, size in zip(view.stride[:-1], view.shape[:-1], strict=True)]
    rows = prod(size for _, size in dims)
    off = rows - count_congruent(dims, -view.offset * view.itemsize, boundary)
    if not off:
        return
    last = (view.stride[-1] * view.itemsize, view.shape[-1]) if view.shape else (0, 1)
    touched = _sectors(view.offset * view.itemsize, dims, last, view.itemsize)
    text = (
        f"{off} of {rows} rows of {last[1] * view.itemsize} bytes do not start at a multiple of {boundary}; they touch "
        f"{touched} sectors of {SECTOR_BYTES} bytes, and aligned ones would touch "
        f"{rows * _sectors(0, [], last, view.itemsize)}"
    )
    text += _every(view, boundary) + slow
    row = _first_off(view, boundary)
    yield Finding("unaligned", (view.name,), view.storage.name, off, None, row, severity=severity, text=text)


def _sectors(start: int, dims: Dims, last: tuple[int, int], itemsize: int) -> int:
    """Sectors that rows touch, each row's counted by itself.

    A row's elements go upwards, so that each touches as many new ones as its last sector lies beyond its first,
    or beyond the last of the element before.
    """
    step, size = last
    if step < 0:
        start, step = start + (size - 1) * step, -step
    begins = np.arange(SECTOR_BYTES)
    ends = (begins + itemsize - 1) // SECTOR_BYTES
    new = np.minimum(ends + 1, ends - (begins + itemsize - 1 - step) // SECTOR_BYTES)
    return sum(
        int((_residues(first, axes) * fresh).sum())
        for first, axes, fresh in ((start, dims, ends + 1), (start + step, [*dims, (step, size - 1)], new))
    )


def _residues(start: int, dims: Dims) -> np.ndarray:
    """How many sums start at each byte of a sector."""
    return np.array([count_congruent(dims, byte - start, SECTOR_BYTES) for byte in range(SECTOR_BYTES)], object)


def _lone_strides(view: View, boundary_bytes: int) -> str:
    """Strides off the boundary of axes with a single index, in words."""
    names = view.axes or tuple(f"axis {axis}" for axis in range(len(view.shape)))
    lone = zip(names[:-1], view.stride[:-1], view.shape[:-1], strict=True)
    off = [f"a stride of {step * view.itemsize} bytes along {name}" for name, step, size in lone if size == 1
           and step * view.itemsize % boundary_bytes]  # fmt: skip
    return ", ".join(off)


def _every(view: View, boundary_bytes: int) -> str:
    """After how many steps along each axis a row's place behind a boundary comes back."""
    names = view.axes or tuple(f"axis {axis}" for axis in range(len(view.shape)))
    steps = zip(names, view.stride[:-1], view.shape[:-1], strict=False)
    cycles = ((name, boundary_bytes // gcd(step * view.itemsize, boundary_bytes), size) for name, step, size in steps)
    told = [f"{cycle} along {name}" for name, cycle, size in cycles if 1 < cycle < size]
    return f"; the same place behind a boundary comes back every {', '.join(told)}" if told else ""


def _first_off(view: View, boundary_bytes: int) -> tuple:
    """The first row off the boundary, the lowest where strides go upwards: the origin or one step along an axis."""
    origin = (0,) * len(view.shape)
    candidates = [origin]
    for axis in sorted(range(len(view.shape) - 1), key=lambda axis: (abs(view.stride[axis]), -axis)):
        if view.shape[axis] > 1:
            candidates.append(tuple(1 if a == axis else 0 for a in range(len(view.shape))))
    return next(((place(view, i),) for i in candidates if view.start_of(i) % boundary_bytes), ())


def declared(claim: Declared, view: View, readings: Sequence[View]) -> Iterator[Finding]:
    """More than one reading that fits, and no word as which."""
    if claim.declared:
        one_of("declared", claim.declared, claim.readings)
        return
    size = view.storage.nbytes
    fitting = [
        r
        for r in readings
        if r.num_elements and r.storage == view.storage and r.span_bytes[0] >= 0 and r.span_bytes[1] <= size
    ]
    maps = {(r.shape, _normal_stride(r), r.offset, r.itemsize, r.axes) for r in fitting}
    if len(maps) > 1:
        text = f"{len(maps)} readings of shape {view.shape} fit: {', '.join(r.name for r in fitting)}"
        text += f"; {_in_common(fitting)}; declare one"
        names = (view.name, *(r.name for r in fitting if r.name != view.name))
        yield Finding("ambiguous", names, view.storage.name, view.num_elements, None, text=text)


def _normal_stride(view: View) -> tuple[int, ...]:
    """The stride of an axis with a single index says nothing."""
    return tuple(step if size > 1 else 0 for step, size in zip(view.stride, view.shape, strict=True))


def _in_common(readings: Sequence[View]) -> str:
    """Distinct bytes that all readings claim, and how many each one claims."""
    try:
        regions = Sweep([byte_lanes(r) for r in readings], [r.itemsize for r in readings]).regions(1)
    except TooMuchWorkError:
        return "what they share was not counted"
    shared = sum(region.bytes for region in regions if len(region.members) == len(readings))
    own = [sum(region.bytes for region in regions if n in region.members) for n in range(len(readings))]
    if set(own) == {shared}:
        return f"they claim the same {shared} bytes, under another index map each"
    each = f"{own[0]} bytes each" if len(set(own)) == 1 else f"{', '.join(map(str, own[:-1]))} and {own[-1]} bytes"
    return f"they claim {each} and share {shared} of them"
