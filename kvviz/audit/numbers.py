"""Checks claims about numbers: strides of a copy, block ids, address types, alignment and ambiguous shapes.

Example: a kernel keeps addresses in float32, which holds whole numbers exactly only up to 2**24. An element at
address 2**24 + 1 is then read from the wrong place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, prod

import numpy as np

from kvviz.audit.arguments import one_of
from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import Dims, byte_sets, merge_dims, nested_parts, normal_dims
from kvviz.audit.claims import Addressed, Aligned, Declared, Maps
from kvviz.audit.counting import count_congruent
from kvviz.audit.elements import locate, place
from kvviz.audit.findings import Finding, Place, counted
from kvviz.audit.sweep import Sweep
from kvviz.audit.view import Storage, View

SECTOR_BYTES = 32
"""Bytes that the memory of an NVIDIA GPU moves at once. A row that touches more sectors than it needs is slow."""

EXACT_FLOAT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Bits of the significand. A float type with n bits holds every whole number up to 2**n exactly."""

INTEGER_BITS = {"int8": 7, "uint8": 8, "int16": 15, "uint16": 16, "int32": 31, "uint32": 32, "int64": 63}
"""Bits of the largest value. An integer type with n bits holds addresses below 2**n."""

FLOAT_ENDS = {"float16": 1 << 16}
"""Numbers that round to this or more become infinite. The other float types end far beyond any address."""

ADDRESS_BASES, ADDRESS_UNITS = ("storage", "view"), ("elements", "bytes")
"""Where address 0 can be, and what addresses can count."""

REGION_COST, MEMBER_COST = 50, 3
"""Work of one region that several readings share, and of one reading there, in units of the work limit."""

ADDRESS_TYPES = (*EXACT_FLOAT_BITS, *INTEGER_BITS)
"""Number types in which a kernel may keep addresses."""


def step_alike(source: View, target: View) -> Iterator[Finding]:
    """Find differences of row width, block stride and number of blocks between the two sides of a copy."""
    names, storage = (source.name, target.name), source.storage.name
    source_row, target_row = _row_bytes(source), _row_bytes(target)
    if source_row != target_row:
        kind = "truncated" if source_row < target_row else "oversized"
        text = f"a block of {source.name} has {counted(source_row, 'byte')} and a block of {target.name} {target_row}"
        blocks = min(_blocks(source), _blocks(target))
        if blocks:
            yield Finding(kind, names, storage, blocks, abs(source_row - target_row) * blocks, text=text)
    steps = [view.stride[0] * view.itemsize if _blocks(view) > 1 else None for view in (source, target)]
    if None not in steps and steps[0] != steps[1]:
        text = (
            f"the block stride of {source.name} is {counted(steps[0], 'byte')}, "
            f"but the block stride of {target.name} is {steps[1]}"
        )
        blocks = min(_blocks(source), _blocks(target)) - 1
        yield Finding("misplaced", names, storage, blocks, blocks * min(source_row, target_row), text=text)
    if _blocks(source) != _blocks(target):
        text = f"{source.name} has {counted(_blocks(source), 'block')} and {target.name} has {_blocks(target)}"
        yield Finding("index_space", names, storage, abs(_blocks(source) - _blocks(target)), None, text=text)


def _blocks(view: View) -> int:
    """Return the number of blocks: the size of the first axis."""
    return view.shape[0] if view.shape else 1


def _row_bytes(view: View) -> int:
    """Return the number of bytes of one block, without gaps."""
    return view.num_elements // max(_blocks(view), 1) * view.itemsize


def ids_in_range(claim: Maps, view: View) -> Iterator[Finding]:
    """Find ids that have no block in the view. Also find a wrong assumption about the distance between two ids."""
    if claim.count < 0 or claim.ratio < 1:
        raise ValueError(
            f"{claim.name}: count must be at least 0 and ratio at least 1, but count is {claim.count} and ratio is "
            f"{claim.ratio}"
        )
    held = _blocks(view) // claim.ratio
    room = f"{view.name} has room for {held} ({counted(_blocks(view), 'block')}, {claim.ratio} per id)"
    if claim.table:
        yield from _table_in_range(claim, view, held, room)
    elif claim.count > held:
        last = f"id {held} has" if claim.count - held == 1 else f"ids {held} to {claim.count - 1} have"
        text = f"{claim.name} has {counted(claim.count, 'id')}, but {room}: {last} no place in it"
        yield Finding("index_space", (view.name,), view.storage.name, claim.count - held, None, text=text)
    step = view.stride[0] * view.itemsize * claim.ratio if view.shape else 0
    if claim.stride_bytes is not None and claim.stride_bytes != step and claim.count > 1:
        text = (
            f'"{claim.name}" assumes that ids are {counted(claim.stride_bytes, "byte")} apart, '
            f"but in {view.name} they are {counted(step, 'byte')} apart"
        )
        yield Finding("index_space", (view.name,), view.storage.name, claim.count - 1, None, text=text)


def _table_in_range(claim: Maps, view: View, held: int, room: str) -> Iterator[Finding]:
    """Find entries of a table that are neither a hole (-1) nor an id in the view."""
    if claim.count != len(claim.table):
        raise ValueError(
            f"{claim.name}: count is {claim.count}, but the table has {len(claim.table)} entries: they must be equal"
        )
    wrong = [entry for entry, number in enumerate(claim.table) if not -1 <= number < held]
    if wrong:
        has = "1 entry has" if len(wrong) == 1 else f"{len(wrong)} entries have"
        text = (
            f"{room}, but {has} no place in it: entry {wrong[0]} of {claim.name} is {claim.table[wrong[0]]}"
            f" (-1 would mean that the entry has no block)"
        )
        yield Finding("index_space", (view.name,), view.storage.name, len(wrong), None, text=text)


def addressable(claim: Addressed, view: View) -> Iterator[Finding]:
    """Find element addresses that a number type cannot hold exactly.

    Raises:
        ValueError: the claim has an unknown address type, base or unit.
        TooMuchWorkError: too many elements overlap, or counting aligned addresses would take too much work.
    """
    address_type = one_of("address_type", claim.address_type, ADDRESS_TYPES)
    base, counted_in = one_of("base", claim.base, ADDRESS_BASES), one_of("unit", claim.unit, ADDRESS_UNITS)
    if not view.num_elements:
        return
    # In this view, the first byte of an element is the element's address.
    scale, offset = view.itemsize if counted_in == "bytes" else 1, view.offset if base == "storage" else 0
    unit = replace(view, stride=tuple(step * scale for step in view.stride), offset=offset * scale, itemsize=1)
    low, high = unit.span_bytes
    ranges = list(_inexact_ranges(address_type, low, high))
    parts = _address_parts(unit) if ranges else []
    inexact = [_count_inexact(parts, *found) for found in ranges]
    if any(inexact):
        first = _first_inexact(parts, *next(r for r, count in zip(ranges, inexact, strict=True) if count))
        repeats = prod(size for step, size in zip(unit.stride, unit.shape, strict=True) if step == 0)
        kind = "element" if counted_in == "elements" else "byte"
        text = f"{kind} address {first} is the first that {address_type} cannot hold"
        text += f" (it becomes {_rounded(first, address_type)})" if address_type in EXACT_FLOAT_BITS else ""
        text += "; addresses count from the first element of the view" if base == "view" else ""
        index = locate(unit, first)
        example = () if index is None else (place(view, index),)
        yield Finding("index_space", (view.name,), view.storage.name, sum(inexact) * repeats, None, example, text=text)


def _rounded(number: int, address_type: str) -> int | str:
    """Return the float that is nearest to an integer. Beyond the largest float, return inf.

    If two floats are equally near, return the float whose last bit is 0.
    """
    sign, number = ("-", -number) if number < 0 else ("", number)
    shift = max(number.bit_length() - EXACT_FLOAT_BITS[address_type], 0)  # low bits that do not fit
    half, rest = (1 << shift) >> 1, number & ((1 << shift) - 1)
    kept = number >> shift
    rounded = (kept + (rest > half or (rest == half and shift > 0 and kept & 1))) << shift
    if rounded >= FLOAT_ENDS.get(address_type, rounded + 1):
        return f"{sign}inf"
    return -rounded if sign else rounded


def _inexact_ranges(address_type: str, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges ``(first, stop, grain)`` of addresses, ascending. In a range, only multiples of ``grain`` are exact.

    Grain 0 means that no address in the range is exact. Example: float32 holds all whole numbers up to 2**24. From
    2**24 to 2**25 it holds the multiples of 2, and from 2**25 to 2**26 the multiples of 4.
    """
    if address_type in INTEGER_BITS:
        limit = 1 << INTEGER_BITS[address_type]
        ranges = [(low, 0 if address_type.startswith("u") else -limit, 0), (limit, high, 0)]
    else:
        bits, beyond = EXACT_FLOAT_BITS[address_type], max(high, 1 - low)
        end = min(FLOAT_ENDS.get(address_type, beyond), beyond)
        positive = [(1 << n, min(2 << n, end), 2 << (n - bits)) for n in range(bits, end.bit_length())]
        positive += [(end, beyond, 0)]
        ranges = [*((1 - stop, 1 - start, grain) for start, stop, grain in reversed(positive)), *positive]
    for first, stop, grain in ranges:
        if max(low, first) < min(high, stop):
            yield max(low, first), min(high, stop), grain


def _address_parts(unit: View) -> list[tuple[int, Dims]]:
    """Split a view into parts in which no address occurs twice. Return the first address and the dims of each part."""
    start, dims = normal_dims(unit)
    return [(start + shift, merge_dims(part)) for shift, part in nested_parts(dims, 1, unit.name)]


def _count_inexact(parts: Sequence[tuple[int, Dims]], start: int, stop: int, grain: int) -> int:
    """Count the addresses in ``[start, stop)`` that are not multiples of ``grain``. If grain is 0, count all."""
    return sum(
        sign * (_count_below(*part, end, 1) - (_count_below(*part, end, grain) if grain else 0))
        for part in parts
        for sign, end in ((1, stop), (-1, start))
    )


def _count_below(base: int, dims: Dims, stop: int, grain: int) -> int:
    """Count the addresses that are below ``stop`` and multiples of ``grain``. The lowest address is ``base``.

    The dims are nested, so addresses rise in the order of the indices. Count dim by dim, the largest step first. For
    indices that lie completely below ``stop``, one call of count_congruent counts all addresses. One more index may lie
    below ``stop`` only in part. Keep this index, and count the next smaller dim in the same way.

    Example: rows [0, 4), [10, 14), [20, 24) and stop 12. Row 0 lies completely below 12. Of row 1, the columns 0 and 1
    lie below 12. The count for grain 1 is 4 + 2.
    """
    count = 0
    for axis, (step, size) in reversed(list(enumerate(dims))):
        if base >= stop:
            return count
        complete = min((stop - base) // step, size)
        if complete:
            count += count_congruent([(step, complete), *dims[:axis]], -base, grain)
        if complete == size:
            return count
        base += complete * step
    return count + (base < stop and base % grain == 0)


def _first_inexact(parts: Sequence[tuple[int, Dims]], start: int, stop: int, grain: int) -> int:
    """Return the lowest address in ``[start, stop)`` that is not a multiple of ``grain``. There must be one."""
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _count_inexact(parts, start, middle, grain) else (middle, high)
    return low


def aligned(claim: Aligned, view: View) -> Iterator[Finding]:
    """Find rows that do not start at a multiple of the boundary, and count the sectors that rows touch.

    A row is one index of all axes but the last. A sector is 32 bytes that a GPU moves together. If the address of the
    storage is not known, the check uses offsets from its first byte.

    Raises:
        TooMuchWorkError: the view has too many different strides to count its rows.
    """
    boundary = claim.boundary_bytes
    if boundary < 1:
        raise ValueError(f"boundary_bytes must be at least 1, not {boundary}")
    if not view.num_elements:
        return
    severity = "error" if claim.required else "warning"
    slow = "" if claim.required else ": legal and slow"
    if claim.strides and (strides := _hidden_strides(view, boundary)):
        text = f"{strides}, not a multiple of {boundary}; no row moves, because the axis has only one index{slow}"
        yield Finding("unaligned", (view.name,), view.storage.name, None, None, severity=severity, text=text)
    dims = [(step * view.itemsize, size) for step, size in zip(view.stride[:-1], view.shape[:-1], strict=True)]
    rows, start = prod(size for _, size in dims), view.offset * view.itemsize
    address, address_in_sector = (view.storage.address_modulo(size) or 0 for size in (boundary, SECTOR_BYTES))
    off = rows - count_congruent(dims, -address - start, boundary)
    if not off:
        return
    last = (view.stride[-1] * view.itemsize, view.shape[-1]) if view.shape else (0, 1)
    touched = _count_sectors(address_in_sector + start, dims, last, view.itemsize)
    at_best = rows * _count_sectors(0, [], last, view.itemsize)
    row_bytes = counted(last[1] * view.itemsize, "byte")
    text = (
        f"{off} of {counted(rows, 'row')} of {row_bytes} {'does' if off == 1 else 'do'} not start at a multiple of "
        f"{boundary}; all rows together touch {counted(touched, 'sector')} of {SECTOR_BYTES} bytes, and would touch "
        f"{at_best} if aligned{_repetition(view, boundary)}{slow}{_address_words(view.storage, boundary)}"
    )
    row = _first_unaligned(view, boundary, address)
    yield Finding("unaligned", (view.name,), view.storage.name, off, None, row, severity=severity, text=text)


def _address_words(storage: Storage, boundary: int) -> str:
    """Return a text about the address of the storage."""
    address = storage.address_modulo(boundary)
    if address is None:
        return f"; {offsets_only(storage, boundary)}"
    return (
        f"; storage {storage.name} starts {counted(address, 'byte')} after a multiple of {boundary}" if address else ""
    )


def offsets_only(storage: Storage, boundary: int) -> str:
    """Return the text about a storage whose address is not known."""
    known = "" if storage.address is None else f" modulo {boundary}"
    return f"only offsets were judged: the address of storage {storage.name} is not known{known}"


def _count_sectors(start: int, dims: Dims, last: tuple[int, int], itemsize: int) -> int:
    """Count the sectors that each row touches, and add the counts of all rows.

    Go through a row element by element, and count only new sectors. At the first element, all its sectors are new. At
    a later element, only the sectors after the last sector of the previous element are new. The number of new sectors
    depends only on the position of the element in its first sector: a byte from 0 to 31. So count the elements at each
    position, and multiply each count by the number of new sectors.

    Args:
        start: first byte of row 0.
        dims: axes of the rows, in bytes.
        last: step in bytes and size of the axis inside a row.
    """
    step, size = last
    if step < 0:  # go through the row in ascending order
        start, step = start + (size - 1) * step, -step
    position = np.arange(SECTOR_BYTES)
    last_sector = (position + itemsize - 1) // SECTOR_BYTES  # the sector of the first byte has number 0
    sectors_of_first = last_sector + 1
    last_sector_before = (position - step + itemsize - 1) // SECTOR_BYTES  # of the previous element
    sectors_of_later = np.minimum(sectors_of_first, last_sector - last_sector_before)
    first_elements = _count_positions(start, dims)
    later_elements = _count_positions(start + step, [*dims, (step, size - 1)])
    return int((first_elements * sectors_of_first).sum() + (later_elements * sectors_of_later).sum())


def _count_positions(start: int, dims: Dims) -> np.ndarray:
    """Return how many elements start at each byte of a sector: Python integers, shape (SECTOR_BYTES,)."""
    return np.array([count_congruent(dims, byte - start, SECTOR_BYTES) for byte in range(SECTOR_BYTES)], object)


def _axis_names(view: View) -> tuple[str, ...]:
    """Return the names of the axes, or ``axis 0``, ``axis 1``, ... if the view has no names."""
    return view.axes or tuple(f"axis {axis}" for axis in range(len(view.shape)))


def _hidden_strides(view: View, boundary_bytes: int) -> str:
    """Return a text about axes with only one index, if their strides are not multiples of the boundary."""
    axes = zip(_axis_names(view)[:-1], view.stride[:-1], view.shape[:-1], strict=True)
    strides = ((name, step * view.itemsize) for name, step, size in axes if size == 1)
    off = [f"{name} has a stride of {counted(step, 'byte')}" for name, step in strides if step % boundary_bytes]
    return ", ".join(off)


def _repetition(view: View, boundary_bytes: int) -> str:
    """Return a text that says for each axis after how many steps the distance from a boundary repeats."""
    axes = zip(_axis_names(view), view.stride[:-1], view.shape[:-1], strict=False)
    cycles = ((name, boundary_bytes // gcd(step * view.itemsize, boundary_bytes), size) for name, step, size in axes)
    steps = [f"{cycle} along {name}" for name, cycle, size in cycles if 1 < cycle < size]
    return f"; the distance from a boundary repeats every {', '.join(steps)}" if steps else ""


def _first_unaligned(view: View, boundary_bytes: int, address: int) -> tuple[Place, ...]:
    """Return a row that is not aligned, or (). Try row 0 first, then one step along each axis, smallest stride first.

    Args:
        address: the address of the storage modulo the boundary.
    """
    origin = (0,) * len(view.shape)
    candidates = [origin]
    for axis in sorted(range(len(view.shape) - 1), key=lambda axis: (abs(view.stride[axis]), -axis)):
        if view.shape[axis] > 1:
            candidates.append(tuple(1 if a == axis else 0 for a in range(len(view.shape))))
    return next(((place(view, i),) for i in candidates if (address + view.start_of(i)) % boundary_bytes), ())


def declared(claim: Declared, view: View, readings: Sequence[View]) -> Iterator[Finding]:
    """Find a shape that can be understood in several ways, if the claim does not say which way is meant."""
    if claim.declared:
        one_of("declared", claim.declared, claim.readings)
        return
    size = view.storage.nbytes
    fitting = [
        reading
        for reading in readings
        if reading.num_elements
        and reading.storage == view.storage
        and reading.span_bytes[0] >= 0
        and reading.span_bytes[1] <= size
    ]
    maps = {(r.shape, _relevant_stride(r), r.offset, r.itemsize, r.axes) for r in fitting}
    if len(maps) > 1:
        text = f"{len(maps)} readings of shape {view.shape} fit: {', '.join(r.name for r in fitting)}"
        text += f"; {_describe_shared(fitting)}; declare one"
        names = (view.name, *(r.name for r in fitting if r.name != view.name))
        yield Finding("ambiguous", names, view.storage.name, view.num_elements, None, text=text)


def _relevant_stride(view: View) -> tuple[int, ...]:
    """Return the strides. If an axis has only one index, its stride changes no address, so return 0 for it."""
    return tuple(step if size > 1 else 0 for step, size in zip(view.stride, view.shape, strict=True))


def _describe_shared(readings: Sequence[View]) -> str:
    """Return a text that says how many bytes each reading has, and how many bytes all readings share."""
    shared, own = 0, [0] * len(readings)
    try:
        for region in Sweep([byte_sets(r) for r in readings], [r.itemsize for r in readings]).regions(1):
            spend(REGION_COST + MEMBER_COST * len(region.members))
            shared += region.bytes if len(region.members) == len(readings) else 0
            for member in region.members:
                own[member] += region.bytes
    except TooMuchWorkError as error:
        return f"the bytes that they share were not counted: {error}"
    if set(own) == {shared}:
        return f"they claim the same {counted(shared, 'byte')} in another order of the indices"
    if len(set(own)) == 1:
        return f"they claim {counted(own[0], 'byte')} each and share {shared} of them"
    return f"they claim {', '.join(map(str, own[:-1]))} and {own[-1]} bytes and share {shared} of them"
