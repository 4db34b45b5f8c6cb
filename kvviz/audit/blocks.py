"""Checks block by block: may views share bytes only in equal blocks, and does a transfer take exactly its block?

Example: a transfer copies 2048 bytes per block, but blocks are only 1024 bytes apart. It takes the bytes of the next
block as well: that is a finding. The first axis of a view is its block.

Blocks are not listed if all views have the same block stride S. The storage is divided into stretches of S bytes. If a
byte of block 0 lies in stretch k, the same byte of block b lies in stretch b + k. This k is the *block step* of the
byte. In one stretch, two bytes are of the same block exactly if their block steps are equal. So each view is divided
into one part per block step.

If the block strides differ, each block of each view is a part. If these are too many, only the first blocks are
judged. What is found there is reported without counts, and finding nothing there is reported as "not judged".
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvviz.audit.budget import TooMuchWorkError, spend
from kvviz.audit.byte_sets import PATTERN_COST, ByteSet, Pattern, byte_sets
from kvviz.audit.elements import locate, place, place_of_byte
from kvviz.audit.findings import Finding, Place, counted
from kvviz.audit.overlap import by_storage, readers_text
from kvviz.audit.sweep import COMBINATION_COST, MEMBER_COST, Intervals, Sweep
from kvviz.audit.view import MAX_ADDRESS, View

MAX_BLOCKS = 4096
"""Largest number of blocks, over all views of a claim, that are judged one by one if block strides differ."""

FEW_BLOCKS = 1024
"""Number of blocks, over all views of a claim, that are judged if there are more than :data:`MAX_BLOCKS`."""

MOST_NAMES = 6
"""A text gives the number of elements for at most this many views. The other views are only counted."""


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A view by blocks: the first axis of ``by_block`` counts blocks from block ``first`` on.

    ``by_block`` has the elements of ``view``. ``per_block`` entries of the first axis of ``view`` are one block.
    """

    view: View
    by_block: View
    first: int = 0
    per_block: int = 1


@dataclass(frozen=True, eq=False)
class _Part:
    """Some bytes of a view. Two parts have bytes of the same block exactly if their labels are equal.

    Attributes:
        label: the block step of all bytes of the part, or the block if blocks are taken one by one.
        sets: the bytes, as byte sets.
        role: extent, content or neighbour, see :func:`covers`; part or whole, see :func:`same_bytes`.
        per_block: how many entries of the first axis of ``view`` are one block.
    """

    view: View
    label: int
    sets: list[ByteSet]
    role: str = ""
    per_block: int = 1


_Verdicts = Iterator[tuple[Hashable, tuple[int, ...]]]
"""The faults of some bytes: for each fault its key, and the numbers of the parts that the fault affects."""


@dataclass
class _Fault:
    """All bytes that have the same fault.

    Attributes:
        bytes: number of bytes.
        first: the lowest byte.
        elements: for each view, how many of its elements have a byte with this fault.
        members: numbers of all parts that have the lowest byte.
        affected: numbers of those members that the fault affects.
    """

    bytes: int = 0
    first: int = MAX_ADDRESS
    elements: Counter[str] = field(default_factory=Counter)
    members: tuple[int, ...] = ()
    affected: tuple[int, ...] = ()


def overlaid(views: Sequence[View], blocks_per_id: Sequence[int] = ()) -> Iterator[Finding]:
    """Find bytes that different blocks share: one finding for each set of views.

    Args:
        blocks_per_id: for each view, how many of its blocks are one block here. Default: 1.

    Raises:
        ValueError: a view has no axis, so it has no blocks, or the numbers of ``blocks_per_id`` do not fit.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. They have no fault, but later
        blocks may have one.
    """
    per_id = _numbers_by_view(views, blocks_per_id)
    for given in by_storage(views):
        judged, limit = _judged_blocks([(view, per_id[view.name]) for view in given])
        parts, stride, faults = _shared_by_blocks(judged)
        _check_judged(faults, limit, given)
        if not faults:
            continue
        hint = "" if blocks_per_id else _hint_of_ratio(given)
        for names, fault in sorted(faults.items(), key=lambda item: (item[1].first, item[0])):
            example = _colliding_places(parts, fault, stride)
            readers = tuple(view.name for view in given if view.read_only and view.name in names)
            said = "; ".join(filter(None, (readers_text(readers, len(names)), "different block ids share these bytes")))
            storage, counts = given[0].storage.name, (fault.elements.total(), fault.bytes)
            finding = Finding("collision", names, storage, *counts, example, text=said + hint, readers=readers)
            yield _without_counts(finding, limit)


def _numbers_by_view(views: Sequence[View], blocks_per_id: Sequence[int]) -> dict[str, int]:
    """Return the number of blocks per id by the name of the view. Raise a ValueError if they do not fit the views."""
    if blocks_per_id and len(blocks_per_id) != len(views):
        raise ValueError(
            f"blocks_per_id has {counted(len(blocks_per_id), 'number')} for {counted(len(views), 'view')}: give one "
            f"number per view"
        )
    for view, number in zip(views, blocks_per_id, strict=False):
        if number < 1:
            raise ValueError(f"blocks_per_id must be at least 1, but it is {number} for {view.name}")
    return dict.fromkeys((view.name for view in views), 1) | {
        view.name: number for view, number in zip(views, blocks_per_id, strict=False)
    }


def _shared_by_blocks(judged: Sequence[_Blocks]) -> tuple[list[_Part], int | None, dict[Hashable, _Fault]]:
    """Return parts, block stride, and the bytes that different blocks share by the names of the views."""
    stride = _block_stride(judged)
    parts = _parts(judged, stride)

    def different_blocks(members: tuple[int, ...]) -> _Verdicts:
        """Yield a fault if the parts that share some bytes are not all of one block, and one of them writes."""
        if len({parts[m].label for m in members}) > 1 and not all(parts[m].view.read_only for m in members):
            yield tuple(dict.fromkeys(parts[m].view.name for m in members)), members

    return parts, stride, _find_faults(parts, different_blocks)


def _hint_of_ratio(views: Sequence[View]) -> str:
    """Return a text if the views share no bytes of different ids as soon as an id is as long as the longest block."""
    steps = [abs(view.stride[0]) * view.itemsize for view in views]
    if len(set(steps)) == 1 or min(steps) == 0 or any(max(steps) % step for step in steps):
        return ""
    ratios = [max(steps) // step for step in steps]
    judged, limit = _judged_blocks(list(zip(views, ratios, strict=True)))
    if limit is not None or _shared_by_blocks(judged)[-1]:
        return ""
    short, ratio = next((view, ratio) for view, ratio in zip(views, ratios, strict=True) if ratio > 1)
    return (
        f". They would not if an id stood for {counted(max(steps), 'byte')}, which are {ratio} blocks of {short.name}. "
        f"If this is meant, declare blocks_per_id {ratios}"
    )


def covers(
    extents: Sequence[View],
    content: Sequence[View],
    neighbours: Sequence[View],
    extents_per_block: int = 1,
    blocks_per_extent: int = 1,
    cache: dict | None = None,
) -> Iterator[Finding]:
    """Find content that the extents do not cover, and bytes of other blocks that they do cover.

    Elements are counted: those of the content that are not covered completely, and those of neighbours with a
    covered byte. Each storage has findings of its own.

    Args:
        extents: the bytes that a transfer takes of each block.
        content: the views that the extents must cover.
        neighbours: the views that the extents may not take from other blocks.
        extents_per_block, blocks_per_extent: see :class:`~kvviz.audit.claims.Covers`.
        cache: keeps the parts of neighbours for other extents of the same audit.

    Raises:
        ValueError: a view has no axis, so it has no blocks, or an extent is flat and has another number of blocks.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. They have no fault, but later
        blocks may have one.
    """
    for name, number in (("extents_per_block", extents_per_block), ("blocks_per_extent", blocks_per_extent)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, but it is {number}")
    for extent in extents:
        _check_flat(extent, content, extents_per_block, blocks_per_extent)
    cache = {} if cache is None else cache
    for storage in dict.fromkeys(view.storage for view in (*extents, *content, *neighbours)):
        here = [[view for view in views if view.storage == storage] for views in (extents, content, neighbours)]
        if not here[0] and not here[1]:
            continue
        faults, examples, limit = _extent_faults(*here, extents_per_block, blocks_per_extent, cache)
        for kind, views in (("truncated", here[1]), ("oversized", here[2])):
            if kind in faults:
                finding = _extent_finding(kind, here[0] or extents, views, faults[kind], examples[kind])
                hint = _hint_of_counts(extents, here[1], extents_per_block, blocks_per_extent)
                said = f"; no extent lies in {storage.name}" if not here[0] else hint
                yield _without_counts(replace(finding, text=finding.text + said), limit)


def _extent_faults(
    extents: Sequence[View],
    content: Sequence[View],
    neighbours: Sequence[View],
    extents_per_block: int,
    blocks_per_extent: int,
    cache: dict,
) -> tuple[dict[Hashable, _Fault], dict[Hashable, tuple[Place, ...]], int | None]:
    """Return the faults of extents in one storage, an example of each, and how many blocks were judged (None: all)."""
    per_extent = [(view, extents_per_block) for view in extents]
    owed, others = ([(view, blocks_per_extent) for view in views] for views in (content, neighbours))
    limit = _block_limit([one for view, per in (*per_extent, *owed, *others) for one in _by_block(view, per)])
    taken, due, near = (_first_blocks(given, limit) for given in (per_extent, owed, others))
    stride = _block_stride([*taken, *due, *near])
    parts = [replace(part, role="extent") for part in _parts(taken, stride)]
    touched = []
    if parts and any(one.by_block.num_elements for one in near):
        candidates = _neighbour_parts(near, stride, limit, blocks_per_extent, cache)
        touched = _parts_near(parts, candidates, stride)
    parts += [replace(part, role="content") for part in _parts(due, stride)]
    parts += [replace(part, role="neighbour") for part in touched]

    def judge(members: tuple[int, ...]) -> _Verdicts:
        """Yield ``truncated`` if the extent of a block does not cover its content, and ``oversized`` if it covers
        another block."""
        labels = {parts[m].label for m in members if parts[m].role == "extent"}
        missing = tuple(m for m in members if parts[m].role == "content" and parts[m].label not in labels)
        foreign = tuple(m for m in members if parts[m].role == "neighbour" and labels - {parts[m].label})
        yield from (item for item in (("truncated", missing), ("oversized", foreign)) if item[1])

    faults = _find_faults(parts, judge)
    _check_judged(faults, limit, [*extents, *content, *neighbours])
    examples = {kind: _extent_places(kind, parts, fault, stride) for kind, fault in faults.items()}
    return faults, examples, limit


def _check_flat(extent: View, content: Sequence[View], extents_per_block: int, blocks_per_extent: int) -> None:
    """Raise a ValueError if the extent is a flat run of elements that cannot count blocks."""
    if len(extent.shape) != 1 or extent.stride[0] != 1 or extent.shape[0] < 2:
        return
    entries = -(-extent.shape[0] // extents_per_block)
    for view in content:
        if len(view.shape) > 1 and -(-view.shape[0] // blocks_per_extent) != entries:
            blocks = -(-view.shape[0] // blocks_per_extent)
            each, left = divmod(extent.shape[0], blocks)
            example = f"{each}" if not left else f"{each + 1} or fewer"
            raise ValueError(
                f"{extent.name} has one axis of {extent.shape[0]} elements, so each element counts as one block, but "
                f"{view.name} has {counted(view.shape[0], 'block')}: give the extent one axis for blocks and one for "
                f"the elements of a block, or say how many elements are one block (extents_per_block, here {example})"
            )


def _hint_of_counts(
    extents: Sequence[View], content: Sequence[View], extents_per_block: int, blocks_per_extent: int
) -> str:
    """Return a text if extents and content differ in their number of blocks."""
    taken = {-(-view.shape[0] // extents_per_block) for view in extents if view.shape and view.num_elements}
    owed = {-(-view.shape[0] // blocks_per_extent) for view in content if view.shape and view.num_elements}
    if len(taken) != 1 or len(owed) != 1 or taken == owed:
        return ""
    few, many = min(taken | owed), max(taken | owed)
    (num_taken,), (num_owed,) = taken, owed
    what = "extents_per_block" if num_taken > num_owed else "blocks_per_extent"
    declare = "" if many % few else f" (if this is meant, declare {what} {many // few})"
    first = f"{extents[0].name} has" if len(extents) == 1 else "the extents have"
    second = f"{content[0].name} has" if len(content) == 1 else "the content has"
    return f"; {first} {counted(num_taken, 'block')} and {second} {num_owed}{declare}"


def _colliding_places(parts: Sequence[_Part], fault: _Fault, stride: int | None) -> tuple[Place, ...]:
    """Return elements that share a collision's lowest byte: two of different blocks, then one of each other view."""
    blocks = [(part, _block_at(part, fault.first, stride)) for part in (parts[m] for m in fault.members)]
    lowest: dict[str, tuple[_Part, int]] = {}
    for part, block in blocks:
        lowest[part.view.name] = min(lowest.get(part.view.name, (part, block)), (part, block), key=lambda pair: pair[1])
    first, *rest = sorted(lowest.values(), key=lambda pair: pair[0].view.read_only)  # the first one writes
    others = [pair for pair in (*rest, *blocks) if pair[1] != first[1]]
    second = min(others, key=lambda pair: pair[0].view == first[0].view)  # better a block of another view
    shown = [first, second, *(pair for pair in rest if pair[0].view != second[0].view)]
    return tuple(p for part, block in shown for p in _place_in_block(part, block, fault.first))


def _extent_places(kind: str, parts: Sequence[_Part], fault: _Fault, stride: int | None) -> tuple[Place, ...]:
    """Return elements at the lowest byte of an extent's fault.

    ``oversized``: the element of the extent, and the elements of other blocks that it covers. ``truncated``: the
    elements of the content. The extent of their block does not have this byte.
    """
    hit: dict[str, tuple[_Part, int]] = {}
    for part in (parts[m] for m in fault.affected):
        pair = part, _block_at(part, fault.first, stride)
        hit[part.view.name] = min(hit.get(part.view.name, pair), pair, key=lambda pair: pair[1])
    shown = list(hit.values())
    if kind == "oversized":
        extents = [part for part in (parts[m] for m in fault.members) if part.role == "extent"]
        taken = [(part, _block_at(part, fault.first, stride)) for part in extents]
        foreign = [pair for pair in taken if all(pair[1] != other for _, other in shown)]
        # If several blocks of the extent take this byte, some views may be hit in one of these blocks.
        first = min(foreign or [pair for pair in taken if pair[1] != shown[0][1]], key=lambda pair: pair[1])
        shown = [first, *(pair for pair in shown if pair[1] != first[1])]
    return tuple(p for part, block in shown for p in _place_in_block(part, block, fault.first))


def _block_at(part: _Part, byte: int, stride: int | None) -> int:
    """Return the block to which a byte of a part belongs."""
    return byte // stride - part.label if stride else part.label


def _place_in_block(part: _Part, block: int, byte: int) -> tuple[Place, ...]:
    """Find an element of one block that covers ``byte``. Return ``(place,)``, or ``()`` if the search is too long."""
    view, first = part.view, block * part.per_block
    entries = min(part.per_block, view.shape[0] - first)
    index = locate(replace(_block(view, first), shape=(entries, *view.shape[1:])), byte)
    return () if index is None else (place(view, (first + index[0], *index[1:])),)


def _extent_finding(
    kind: str, extents: Sequence[View], views: Sequence[View], fault: _Fault, example: tuple[Place, ...]
) -> Finding:
    """Return the finding of one fault of extents, with the views that it affects."""
    hit = [view for view in views if fault.elements[view.name]]
    storage = views[0].storage
    names = tuple(dict.fromkeys((*(extent.name for extent in extents), *(view.name for view in hit))))
    of_views = dict.fromkeys(view.name for view in hit)
    counts = [f"{counted(fault.elements[name], 'element')} of {name}" for name in of_views]
    if len(counts) > MOST_NAMES:
        counts[MOST_NAMES:] = [f"and {counted(len(counts) - MOST_NAMES, 'more view')}"]
    of_what = {"truncated": ("of the content", "not covered"), "oversized": ("of other blocks", "covered")}[kind]
    verb = "is" if fault.bytes == 1 else "are"
    text = f"{counted(fault.bytes, 'byte')} {of_what[0]} {verb} {of_what[1]}: {', '.join(counts)}"
    return Finding(kind, names, storage.name, fault.elements.total(), fault.bytes, example, text=text)


def same_bytes(part: Sequence[View], whole: Sequence[View]) -> Iterator[Finding]:
    """Find bytes of ``whole`` that ``part`` lacks, and bytes of ``part`` that do not belong to ``whole``.

    Several views count together. Each storage has findings of its own.

    Raises:
        ValueError: no view of ``part`` lies in a storage of ``whole``.
    """
    ours, theirs = (" and ".join(view.name for view in views) for views in (part, whole))
    storages = dict.fromkeys(view.storage for view in (*part, *whole))
    if not {view.storage for view in part} & {view.storage for view in whole}:
        raise ValueError(
            f"{ours} lies in {part[0].storage.name} and {theirs} in {whole[0].storage.name}: "
            f"they must lie in one storage"
        )
    for storage in storages:
        parts = [
            _Part(view, 0, byte_sets(view), role)
            for role, views in (("part", part), ("whole", whole))
            for view in views
            if view.storage == storage and view.num_elements
        ]

        def one_side(members: tuple[int, ...], parts: Sequence[_Part] = parts) -> _Verdicts:
            """Yield ``oversized`` for bytes of the part alone, and ``truncated`` for bytes of the whole alone."""
            roles = {parts[m].role for m in members}
            if len(roles) == 1:
                yield ("oversized" if roles == {"part"} else "truncated"), members

        faults = _find_faults(parts, one_side)
        for kind, fault in sorted(faults.items(), key=lambda item: item[1].first):
            bytes_ = counted(fault.bytes, "byte")
            if kind == "oversized":
                text = f"{ours} {_verb(part, 'has')} {bytes_} that {theirs} {_verb(whole, 'does')} not have"
            else:
                text = f"{ours} {_verb(part, 'lacks')} {bytes_} of {theirs}"
            example = tuple(p for m in fault.affected for p in place_of_byte(parts[m].view, fault.first))
            names = tuple(dict.fromkeys(view.name for view in (*part, *whole)))
            yield Finding(kind, names, storage.name, fault.elements.total(), fault.bytes, example, text=text)


def _verb(views: Sequence[View], singular: str) -> str:
    """Return a verb in the number of the views."""
    return singular if len(views) == 1 else {"has": "have", "lacks": "lack", "does": "do"}[singular]


def _find_faults(parts: Sequence[_Part], judge: Callable[[tuple[int, ...]], _Verdicts]) -> dict[Hashable, _Fault]:
    """Return one sum for each fault: all bytes that have this fault.

    Bytes are grouped by fault and not by owner. So an element with several faulty bytes counts once, even if different
    parts share these bytes.

    Args:
        judge: a function. It gets the index of each part that covers the same bytes, and returns the faults of these
            bytes.
    """
    faults: dict[Hashable, _Fault] = {}
    sweep = Sweep([part.sets for part in parts], [part.view.itemsize for part in parts])
    for table in sweep.intervals():
        for key, affected in _judge_combinations(sweep, table, judge).items():
            bad = table.covered_by({position for positions in affected.values() for position in positions})
            fault = faults.setdefault(key, _Fault())
            fault.bytes += int(bad.sizes.sum()) * table.periods
            if int(bad.starts[0]) < fault.first:
                position = int(bad.combination[0])
                members = sorted({sweep.owner_of[number] for number in table.combinations[position]})
                fault.first, fault.members = int(bad.starts[0]), tuple(members)
                fault.affected = tuple(part for part in members if position in affected.get(part, ()))
            for part, positions in affected.items():
                count = sweep.count_elements(bad, part, positions)
                fault.elements[parts[part].view.name] += count * table.periods
    return faults


def _judge_combinations(
    sweep: Sweep, table: Intervals, judge: Callable[[tuple[int, ...]], _Verdicts]
) -> dict[Hashable, dict[int, list[int]]]:
    """Return the positions of the combinations that have a fault, by fault and by affected part."""
    affected: dict[Hashable, dict[int, list[int]]] = {}
    for position, sets in enumerate(table.combinations):
        spend(MEMBER_COST * len(sets) + COMBINATION_COST)
        members = tuple(sorted({sweep.owner_of[number] for number in sets}))
        for key, parts in judge(members):
            spend(MEMBER_COST * len(parts))
            for part in parts:
                affected.setdefault(key, {}).setdefault(part, []).append(position)
    return affected


def _by_block(view: View, per_block: int) -> list[_Blocks]:
    """Return a view by blocks of ``per_block`` entries of its first axis. A last block of fewer entries is apart."""
    if per_block == 1 or not view.shape:
        return [_Blocks(view, view)]
    whole, rest = divmod(view.shape[0], per_block)
    step, found = view.stride[0], []
    for first, blocks, size in ((0, whole, per_block), (whole, 1, rest)):
        if blocks and size:
            shape, stride = (blocks, size, *view.shape[1:]), (step * per_block, step, *view.stride[1:])
            offset = view.offset + first * per_block * step
            by_block = replace(view, shape=shape, stride=stride, offset=offset, axes=())
            found.append(_Blocks(view, by_block, first, per_block))
    return found


def _judged_blocks(given: Sequence[tuple[View, int]]) -> tuple[list[_Blocks], int | None]:
    """Return the blocks that are judged, and how many these are per view (None if all are).

    Args:
        given: each view, and how many entries of its first axis are one block.
    """
    limit = _block_limit([one for view, per_block in given for one in _by_block(view, per_block)])
    return _first_blocks(given, limit), limit


def _block_stride(judged: Sequence[_Blocks]) -> int | None:
    """Return the block stride in bytes that all views have, or None if they differ.

    Raises:
        ValueError: a view has no axis, so it has no blocks.
    """
    relevant = [one for one in judged if one.by_block.num_elements or not one.view.shape]
    for one in relevant:
        if not one.view.shape:
            raise ValueError(f"{one.view.name} has no axis: its first axis must be the block")
    return _common_stride([one.by_block for one in relevant])


def _common_stride(views: Sequence[View]) -> int | None:
    """Return the block stride in bytes that all views have, or None. It must be a multiple of each element's size."""
    strides = {view.stride[0] * view.itemsize for view in views if view.shape[0] > 1}
    one = len(strides) == 1 and min(strides) > 0 and not any(min(strides) % view.itemsize for view in views)
    return min(strides) if one else None


def _parts(judged: Sequence[_Blocks], stride: int | None) -> list[_Part]:
    """Divide views by block step, or by block if there is no common stride."""
    judged = [one for one in judged if one.by_block.num_elements]
    if stride:
        return [part for one in judged for part in _parts_by_step(one, stride)]
    return [
        _Part(one.view, one.first + block, byte_sets(_block(one.by_block, block)), per_block=one.per_block)
        for one in judged
        for block in range(one.by_block.shape[0])
    ]


def _parts_by_step(blocks: _Blocks, stride: int) -> Iterator[_Part]:
    """Divide a view with a block stride into one part per block step.

    The byte ranges of the first block are cut at multiples of the stride. A range of block b in stretch k of the
    storage has block step k - b. The next blocks repeat it, one stride apart.
    """
    view, sets_of = blocks.by_block, {}
    for byte_set in byte_sets(_block(view, 0)):
        patterns_of: dict[int, list[Pattern]] = {}
        for start, width in _list_ranges(byte_set):
            while width:
                stretch = start // stride
                size = min(width, (stretch + 1) * stride - start)
                pattern = Pattern(start, stride, view.shape[0], np.zeros(1, np.int64), size)
                patterns_of.setdefault(stretch - blocks.first, []).append(pattern)
                start, width = start + size, width - size
        for step, patterns in patterns_of.items():
            sets_of.setdefault(step, []).append(_join_patterns(patterns))
    for step, sets in sorted(sets_of.items()):
        yield _Part(blocks.view, step, sets, per_block=blocks.per_block)


def _list_ranges(byte_set: ByteSet) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the width of each byte range."""
    spend(PATTERN_COST * sum(p.num_ranges for p in byte_set))
    for p in byte_set:
        for copy in range(p.count):
            for start in p.starts.tolist():
                yield p.base + copy * p.step + start, p.width


def _join_patterns(patterns: Sequence[Pattern]) -> ByteSet:
    """Join patterns of one byte range each, all of one step and count: one pattern per width."""
    joined = []
    for width in sorted({p.width for p in patterns}):
        bases = sorted(p.base for p in patterns if p.width == width)
        starts = np.asarray(bases, np.int64) - bases[0]
        joined.append(Pattern(bases[0], patterns[0].step, patterns[0].count, starts, width))
    return joined


@dataclass(frozen=True, eq=False)
class _NeighbourParts:
    """Parts of neighbours, and arrays to find quickly the parts that an extent may touch.

    Attributes:
        starts, stops, part: byte ranges, see :func:`_search_ranges`, and the part of each one: int64, shape (ranges,).
        lows, highs: lowest byte and end of each part: int64, shape (parts,).
    """

    parts: list[_Part]
    starts: np.ndarray
    stops: np.ndarray
    part: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def _neighbour_parts(
    judged: Sequence[_Blocks], stride: int | None, limit: int | None, per_block: int, cache: dict
) -> _NeighbourParts:
    """Return the parts of neighbours, from the cache if they are there."""
    key = (stride, limit, per_block, *(one.view.name for one in judged))
    if key not in cache:
        parts = _parts(judged, stride)
        ranges = [_search_ranges([part], stride) for part in parts]
        part_of = np.repeat(np.arange(len(parts)), [len(starts) for starts, _ in ranges])
        starts, stops = (np.concatenate([np.zeros(0, np.int64), *found]) for found in zip(*ranges, strict=True))
        lows, highs = np.array([_span([part]) for part in parts], np.int64).T
        cache[key] = _NeighbourParts(parts, starts, stops, part_of, lows, highs)
    return cache[key]


def _parts_near(extent: Sequence[_Part], others: _NeighbourParts, stride: int | None) -> list[_Part]:
    """Return the parts that the extent may touch. It cannot touch the others, so they need not be counted."""
    low, high = _span(extent)
    starts, stops = _search_ranges(extent, stride)
    order = np.argsort(starts, kind="stable")
    # highest_stop[n] is the largest stop among the first n + 1 ranges of the extent. A neighbour's range [a, b)
    # overlaps the extent exactly if the largest stop of all ranges that start before b is greater than a.
    starts, highest_stop = starts[order], np.maximum.accumulate(stops[order])
    num_before = np.searchsorted(starts, others.stops)
    touch = (num_before > 0) & (highest_stop[np.maximum(num_before, 1) - 1] > others.starts)
    close = (others.lows < high) & (others.highs > low)
    return [others.parts[number] for number in np.unique(others.part[touch]).tolist() if close[number]]


def _search_ranges(parts: Sequence[_Part], stride: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of ranges that overlap if parts share a byte.

    With a common stride, each byte range counts from the start of its stretch. Otherwise a range spans a pattern.
    """
    patterns = [p for part in parts for byte_set in part.sets for p in byte_set]
    spend(sum(len(p.starts) for p in patterns) + len(patterns))
    if stride:
        ranges = [(p.base % stride + p.starts, p.width) for p in patterns]
    else:
        ranges = [(np.array([p.base]), p.stop - p.base) for p in patterns]
    return np.concatenate([starts for starts, _ in ranges]), np.concatenate(
        [starts + width for starts, width in ranges]
    )


def _span(parts: Sequence[_Part]) -> tuple[int, int]:
    """Return the lowest byte of parts and the end of their highest byte."""
    patterns = [p for part in parts for byte_set in part.sets for p in byte_set]
    return min(p.base for p in patterns), max(p.stop for p in patterns)


def _block_limit(judged: Sequence[_Blocks]) -> int | None:
    """Return how many blocks of each view are judged, or None if all are.

    There is a limit only if the block strides differ and the views have more than :data:`MAX_BLOCKS` blocks in total.
    """
    relevant = [one.by_block for one in judged if one.view.shape and one.by_block.num_elements]
    if sum(view.shape[0] for view in relevant) <= MAX_BLOCKS or _common_stride(relevant):
        return None
    return max(FEW_BLOCKS // len(relevant), 1)


def _first_blocks(given: Sequence[tuple[View, int]], limit: int | None) -> list[_Blocks]:
    """Return the first ``limit`` blocks of each view, or all of them if ``limit`` is None."""
    found = []
    for one in (one for view, per_block in given for one in _by_block(view, per_block)):
        left = limit - one.first if limit is not None else None
        if left is None or not one.view.shape or one.by_block.shape[0] <= left:
            found.append(one)
        elif left > 0:
            found.append(replace(one, by_block=replace(one.by_block, shape=(left, *one.by_block.shape[1:]))))
    return found


def _block(view: View, block: int) -> View:
    """Return one block of a view, as a view of one block."""
    return replace(view, shape=(1, *view.shape[1:]), offset=view.offset + block * view.stride[0])


def _without_counts(finding: Finding, limit: int | None) -> Finding:
    """Return a finding as it is, or without counts if only the first blocks were judged."""
    if limit is None:
        return finding
    where = "first block" if limit == 1 else f"first {limit} blocks"
    text = f"{finding.text} (counted in the {where} of each view only: the block strides differ)"
    return replace(finding, elements=None, bytes=None, text=text)


def _check_judged(faults: dict, limit: int | None, views: Sequence[View]) -> None:
    """Raise TooMuchWorkError if only the first blocks were judged and nothing was found in them."""
    if limit is not None and not faults:
        names = ", ".join(dict.fromkeys(view.name for view in views))
        where = "first block" if limit == 1 else f"first {limit} blocks"
        raise TooMuchWorkError(
            f"the block strides of {names} differ; nothing was found in their {where}, and all blocks together are "
            f"more than the {MAX_BLOCKS} that can be judged one by one; audit views of fewer blocks"
        )
