"""Checks on numbers rather than bytes: steps of a copy, ids and tables, address types, alignment, readings."""

from collections.abc import Iterator, Sequence
from math import gcd, lcm

import numpy as np

from kvviz.memory.claims import Aligned, Declared, Maps
from kvviz.memory.disputes import place
from kvviz.memory.extents import Sweep, TooMuchWorkError, byte_lanes, start_lanes
from kvviz.memory.finding import Finding
from kvviz.memory.maps import locate
from kvviz.memory.spec import one_of
from kvviz.memory.view import View

SECTOR_BYTES = 32
"""What a GPU's memory moves at once."""

EXACT_FLOAT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
INTEGER_BITS = {"int8": 7, "uint8": 8, "int16": 15, "uint16": 16, "int32": 31, "uint32": 32, "int64": 63}
ADDRESS_TYPES = (*EXACT_FLOAT_BITS, *INTEGER_BITS)


def step_alike(source: View, target: View) -> Iterator[Finding]:
    """Row width, block stride and block count of the two sides of a copy."""
    names, storage = (source.name, target.name), source.storage.name
    ours, theirs = _row_bytes(source), _row_bytes(target)
    if ours != theirs:
        kind = "truncated" if ours < theirs else "oversized"
        text = f"a block of {source.name} is {ours} bytes and of {target.name} {theirs}"
        blocks = min(_blocks(source), _blocks(target))
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
    """Element addresses (offset and strides in elements) that a number type cannot hold exactly."""
    one_of("address_type", address_type, ADDRESS_TYPES)
    if not view.num_elements:
        return
    unit = View(view.name, view.storage, view.shape, view.stride, view.offset)
    low, high = unit.span_bytes
    count, first = 0, None
    for start, stop, grain in _inexact_ranges(address_type, low, high):
        bad, lowest = _misses(unit, start, stop, grain)
        count += bad
        first = lowest if first is None or (lowest is not None and lowest < first) else first
    if count:
        index = locate(unit, first)
        text = f"element address {first} is the first that {address_type} cannot hold"
        text += f" (it becomes {_rounded(first, address_type)})" if address_type in EXACT_FLOAT_BITS else ""
        yield Finding("index_space", (view.name,), view.storage.name, count, None, (place(view, index),), text=text)


def _rounded(number: int, address_type: str) -> int:
    """What a float of that many exact bits makes of an integer: to nearest, ties to even."""
    if number < 0:
        return -_rounded(-number, address_type)
    shift = max(number.bit_length() - EXACT_FLOAT_BITS[address_type], 0)
    half, rest = (1 << shift) >> 1, number & ((1 << shift) - 1)
    whole = number >> shift
    return (whole + (rest > half or (rest == half and shift > 0 and whole & 1))) << shift


def _inexact_ranges(address_type: str, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of addresses of which only multiples of a grain are exact; grain 0: none is."""
    if address_type in INTEGER_BITS:
        limit = 1 << INTEGER_BITS[address_type]
        lowest = 0 if address_type.startswith("u") else -limit
        if low < lowest:
            yield low, min(lowest, high), 0
        if high > limit:
            yield max(low, limit), high, 0
        return
    bits = EXACT_FLOAT_BITS[address_type]
    while 1 << bits < max(high, 1 - low):
        start, grain = 1 << bits, 1 << (bits + 1 - EXACT_FLOAT_BITS[address_type])
        for first, stop in ((1 - 2 * start, 1 - start), (start, 2 * start)):
            if max(low, first) < min(high, stop):
                yield max(low, first), min(high, stop), grain
        bits += 1


def _misses(unit: View, start: int, stop: int, grain: int) -> tuple[int, int | None]:
    """How many addresses in ``[start, stop)`` are no multiples of ``grain``, and the lowest of them."""
    count, lowest = 0, None
    for lane in start_lanes(unit):
        for p in lane:
            begins = (p.base + p.starts[:, None] + np.arange(p.width)).ravel()
            first = np.clip(-(-(start - begins) // p.step), 0, p.count)
            last = np.clip(-(-(stop - begins) // p.step), 0, p.count)
            total = last - first
            for begin, low, n in zip(begins.tolist(), first.tolist(), total.tolist(), strict=True):
                if n <= 0:
                    continue
                good, bad = _multiples(begin + low * p.step, p.step, n, grain)
                count += n - good
                if bad is not None and (lowest is None or bad < lowest):
                    lowest = bad
    return count, lowest


def _multiples(begin: int, step: int, count: int, grain: int) -> tuple[int, int | None]:
    """Of ``begin + k * step`` how many are multiples of ``grain`` (0: none), and the first that is not."""
    if grain == 0:
        return 0, begin
    cycle = grain // np.gcd(step, grain)
    hits = [k for k in range(min(cycle, count)) if (begin + k * step) % grain == 0]
    if not hits:
        return 0, begin
    good = (count - 1 - hits[0]) // cycle + 1
    bad = next((begin + k * step for k in range(min(2, count)) if (begin + k * step) % grain), None)
    return good, bad


def aligned(claim: Aligned, view: View) -> Iterator[Finding]:
    """Rows (all axes but the last) that do not start at a multiple of the boundary, and the sectors that rows touch."""
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
    modulus = lcm(boundary, SECTOR_BYTES)
    if modulus > 1 << 20:
        raise TooMuchWorkError(f"a boundary of {boundary} bytes is too large to be tabled")
    counts = _residues(view, modulus)
    starts = np.arange(modulus)
    off = int(counts[starts % boundary != 0].sum())
    if not off:
        return
    width = (view.shape[-1] if view.shape else 1) * view.itemsize
    rows = int(counts.sum())
    touched = int((counts * -(-(starts % SECTOR_BYTES + width) // SECTOR_BYTES)).sum())
    text = (
        f"{off} of {rows} rows of {width} bytes do not start at a multiple of {boundary}; they touch {touched} "
        f"sectors of {SECTOR_BYTES} bytes, and aligned ones would touch {rows * -(-width // SECTOR_BYTES)}"
    )
    text += _every(view, boundary) + slow
    row = _first_off(view, boundary)
    yield Finding("unaligned", (view.name,), view.storage.name, off, None, row, severity=severity, text=text)


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


def _residues(view: View, modulus: int) -> np.ndarray:
    """How many rows start at each residue: one cyclic convolution a dim."""
    counts = np.zeros(modulus, object)
    counts[view.offset * view.itemsize % modulus] = 1
    for step, size in zip(view.stride[:-1], view.shape[:-1], strict=True):
        steps = np.zeros(modulus, object)
        cycle = modulus // int(np.gcd(step * view.itemsize, modulus))
        whole, rest = divmod(size, cycle)
        for k in range(min(cycle, size)):
            steps[k * step * view.itemsize % modulus] += whole + (k < rest)
        used = np.flatnonzero(steps)
        counts = sum((np.roll(counts, int(r)) * steps[r] for r in used), np.zeros(modulus, object))
    return counts


def _first_off(view: View, boundary_bytes: int) -> tuple:
    """The first row off the boundary, by index order: the origin or one step along an axis."""
    origin = (0,) * len(view.shape)
    candidates = [origin]
    for axis in reversed(range(len(view.shape) - 1)):
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
