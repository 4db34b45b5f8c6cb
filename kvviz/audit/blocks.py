"""Checks claims about blocks: do views share bytes of equal blocks only, and does a transfer take exactly its block?

Example: a transfer copies 2048 bytes per block, but blocks are only 1024 bytes apart. So the transfer also takes bytes
of the next block. This is a finding. The first axis of a view counts blocks. An *extent* is a view of the bytes that a
transfer takes of each block.

If all views have the same block stride S, the blocks are not listed. The storage is divided into *stretches* of S
bytes. If a byte of block 0 lies in stretch k, the same byte of block b lies in stretch b + k. This k is the *block
step* of the byte. If two bytes lie in one stretch and have equal block steps, they belong to the same block. If their
block steps differ, they belong to different blocks. So each view is divided into one *part* per block step.

If the block strides differ, each block of each view is a part. If there are too many blocks, only the first blocks are
judged. A fault in these blocks is reported without counts. If these blocks have no fault, the claim is "not judged".
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
"""If block strides differ, blocks are judged one by one. A claim may have this many blocks, summed over its views."""

FEW_BLOCKS = 1024
"""If a claim has more than :data:`MAX_BLOCKS` blocks, only this many are judged, summed over its views."""

MOST_NAMES = 6
"""A text gives the number of elements for at most this many views. The other views are only counted."""


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Some blocks of a view.

    Attributes:
        view: the view.
        by_block: a view of these blocks. Each index of its first axis is one block.
        first: the first of these blocks.
        per_block: how many indices of the first axis of ``view`` are one block.
    """

    view: View
    by_block: View
    first: int = 0
    per_block: int = 1


@dataclass(frozen=True, eq=False)
class _Part:
    """Some bytes of a view. If two parts share a byte, equal labels mean that the byte is of the same block in both.

    Attributes:
        view: the view.
        label: the block step of all bytes of the part. If blocks are judged one by one, the label is the block.
        sets: the bytes, as byte sets.
        role: ``extent``, ``content`` or ``neighbour`` in :func:`covers`; ``part`` or ``whole`` in :func:`same_bytes`.
        per_block: how many indices of the first axis of ``view`` are one block.
    """

    view: View
    label: int
    sets: list[ByteSet]
    role: str = ""
    per_block: int = 1


_Verdicts = Iterator[tuple[Hashable, tuple[int, ...]]]
"""For each fault of some bytes: a key that names the fault, and the indices of the parts that the fault affects."""


@dataclass
class _Fault:
    """All bytes that have the same fault.

    Attributes:
        bytes: number of bytes.
        first: the lowest byte.
        elements: for each view, how many of its elements have a byte with this fault.
        members: indices of all parts that have the lowest byte.
        affected: indices of the parts that have the lowest byte and are affected by the fault.
    """

    bytes: int = 0
    first: int = MAX_ADDRESS
    elements: Counter[str] = field(default_factory=Counter)
    members: tuple[int, ...] = ()
    affected: tuple[int, ...] = ()


def overlaid(views: Sequence[View], blocks_per_id: Sequence[int] = ()) -> Iterator[Finding]:
    """Find bytes that different blocks share. Each combination of views with such bytes gives one finding.

    Args:
        blocks_per_id: for each view, how many of its blocks have one id. Default: 1.

    Raises:
        ValueError: a view has no axis and therefore no blocks, or ``blocks_per_id`` does not fit the views.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. These blocks have no fault.
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
    """Return ``{view name: blocks per id}``. Raise a ValueError if ``blocks_per_id`` does not fit the views."""
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
    """Return the parts, the block stride, and the bytes that different blocks share, by the names of their views."""
    stride = _block_stride(judged)
    parts = _parts(judged, stride)

    def different_blocks(members: tuple[int, ...]) -> _Verdicts:
        """Yield a fault if the parts belong to different blocks, and the view of at least one part writes."""
        if len({parts[m].label for m in members}) > 1 and not all(parts[m].view.read_only for m in members):
            yield tuple(dict.fromkeys(parts[m].view.name for m in members)), members

    return parts, stride, _find_faults(parts, different_blocks)


def _hint_of_ratio(views: Sequence[View]) -> str:
    """Return a hint if the fault disappears as soon as each id is as long as the longest block. Otherwise return ""."""
    steps = [abs(view.stride[0]) * view.itemsize for view in views]
    if len(set(steps)) == 1 or min(steps) == 0 or any(max(steps) % step for step in steps):
        return ""
    ratios = [max(steps) // step for step in steps]
    judged, limit = _judged_blocks(list(zip(views, ratios, strict=True)))
    if limit is not None or _shared_by_blocks(judged)[-1]:
        return ""
    short, ratio = next((view, ratio) for view, ratio in zip(views, ratios, strict=True) if ratio > 1)
    return (
        f". They would share no bytes if one id stood for {counted(max(steps), 'byte')}, which are {ratio} blocks of "
        f"{short.name}. If this is meant, declare blocks_per_id {ratios}"
    )


def covers(
    extents: Sequence[View],
    content: Sequence[View],
    neighbours: Sequence[View],
    extents_per_block: int = 1,
    blocks_per_extent: int = 1,
    cache: dict | None = None,
) -> Iterator[Finding]:
    """Find content that the extents do not cover, and bytes of other blocks that the extents cover.

    A finding counts elements: elements of the content that are not completely covered, or elements of other blocks
    that have a covered byte. Each storage gets its own findings.

    Args:
        extents: the bytes that a transfer takes of each block.
        content: the views that the extents must cover.
        neighbours: views. The extent of one block must not cover their bytes of another block.
        extents_per_block, blocks_per_extent: see :class:`~kvviz.audit.claims.Covers`.
        cache: a dict for intermediate results. Pass the same dict for all claims of one audit.

    Raises:
        ValueError: a view has no axis and therefore no blocks, or the only axis of an extent does not count blocks.
        TooMuchWorkError: block strides differ, so only the first blocks were checked. These blocks have no fault.
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
    """Return the faults in one storage, an example of each fault, and the number of judged blocks per view.

    The number is None if all blocks were judged.
    """
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
        """Yield ``truncated`` for content that its extent misses, and ``oversized`` for bytes of another block."""
        labels = {parts[m].label for m in members if parts[m].role == "extent"}
        missing = tuple(m for m in members if parts[m].role == "content" and parts[m].label not in labels)
        foreign = tuple(m for m in members if parts[m].role == "neighbour" and labels - {parts[m].label})
        yield from (item for item in (("truncated", missing), ("oversized", foreign)) if item[1])

    faults = _find_faults(parts, judge)
    _check_judged(faults, limit, [*extents, *content, *neighbours])
    examples = {kind: _extent_places(kind, parts, fault, stride) for kind, fault in faults.items()}
    return faults, examples, limit


def _check_flat(extent: View, content: Sequence[View], extents_per_block: int, blocks_per_extent: int) -> None:
    """Raise a ValueError if the extent has only one axis, and this axis has another size than the number of blocks."""
    if len(extent.shape) != 1 or extent.stride[0] != 1 or extent.shape[0] < 2:
        return
    entries = -(-extent.shape[0] // extents_per_block)
    for view in content:
        if not view.num_elements:
            continue  # there is nothing to cover
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
    """Return a hint if extents and content have different numbers of blocks. Otherwise return ""."""
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
    """Return elements that share the lowest byte of a collision.

    The first two elements belong to different blocks. Then follows one element of each other view.
    """
    blocks = [(part, _block_at(part, fault.first, stride)) for part in (parts[m] for m in fault.members)]
    lowest: dict[str, tuple[_Part, int]] = {}
    for part, block in blocks:
        lowest[part.view.name] = min(lowest.get(part.view.name, (part, block)), (part, block), key=lambda pair: pair[1])
    first, *rest = sorted(lowest.values(), key=lambda pair: pair[0].view.read_only)  # first a view that writes
    others = [pair for pair in (*rest, *blocks) if pair[1] != first[1]]
    second = min(others, key=lambda pair: pair[0].view == first[0].view)  # prefer another view
    shown = [first, second, *(pair for pair in rest if pair[0].view != second[0].view)]
    return tuple(p for part, block in shown for p in _place_in_block(part, block, fault.first))


def _extent_places(kind: str, parts: Sequence[_Part], fault: _Fault, stride: int | None) -> tuple[Place, ...]:
    """Return the elements at the lowest byte of a fault.

    For ``truncated``, these are elements of the content. For ``oversized``, the first is the element of the extent,
    and then follow the elements of other blocks at this byte.
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
        # Several blocks of the extent may take this byte. Prefer a block that is not the block of a shown element.
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
    """Return the finding of one fault. It names the extents and the affected views."""
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
    """Find bytes of ``whole`` that ``part`` lacks, and bytes of ``part`` that ``whole`` does not have.

    The views of ``part`` count together, and the views of ``whole`` count together. Each storage gets its own findings.

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
            """Yield ``oversized`` if only ``part`` has the bytes, and ``truncated`` if only ``whole`` has them."""
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
    """Return the verb for one view, or its plural for several views."""
    return singular if len(views) == 1 else {"has": "have", "lacks": "lack", "does": "do"}[singular]


def _find_faults(parts: Sequence[_Part], judge: Callable[[tuple[int, ...]], _Verdicts]) -> dict[Hashable, _Fault]:
    """Return all faults. A fault sums up all bytes that have this fault.

    If an element has several bytes with the same fault, the element counts once.

    Args:
        judge: a function. Its argument is the indices of all parts that cover some bytes. It yields the faults of
            these bytes.
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
    """Return ``{key of the fault: {affected part: positions of the combinations with this fault}}``."""
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
    """Divide a view into blocks of ``per_block`` indices. If the last block is shorter, it gets its own record."""
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
    """Return the blocks that are judged, and the number of judged blocks per view. None means all blocks.

    Args:
        given: pairs: a view, and how many indices of its first axis are one block.
    """
    limit = _block_limit([one for view, per_block in given for one in _by_block(view, per_block)])
    return _first_blocks(given, limit), limit


def _block_stride(judged: Sequence[_Blocks]) -> int | None:
    """Return the block stride in bytes if all views have the same block stride. Otherwise return None.

    Raises:
        ValueError: a view has no axis, so it has no blocks.
    """
    relevant = [one for one in judged if one.by_block.num_elements or not one.view.shape]
    for one in relevant:
        if not one.view.shape:
            raise ValueError(f"{one.view.name} has no axis: its first axis must be the block")
    return _common_stride([one.by_block for one in relevant])


def _common_stride(views: Sequence[View]) -> int | None:
    """Return the block stride in bytes, or None if the views have different block strides.

    Also return None if the block stride is not a multiple of the element size of every view.
    """
    strides = {view.stride[0] * view.itemsize for view in views if view.shape[0] > 1}
    one = len(strides) == 1 and min(strides) > 0 and not any(min(strides) % view.itemsize for view in views)
    return min(strides) if one else None


def _parts(judged: Sequence[_Blocks], stride: int | None) -> list[_Part]:
    """Divide views into one part per block step. If ``stride`` is None, divide them into one part per block."""
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

    The byte ranges of the first block are cut at multiples of the stride. A range of block b in stretch k has block
    step k - b. The next block has the same ranges, one stride further.
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
    """Join patterns of one byte range each, with equal steps and counts. Return one pattern per width."""
    joined = []
    for width in sorted({p.width for p in patterns}):
        bases = sorted(p.base for p in patterns if p.width == width)
        starts = np.asarray(bases, np.int64) - bases[0]
        joined.append(Pattern(bases[0], patterns[0].step, patterns[0].count, starts, width))
    return joined


@dataclass(frozen=True, eq=False)
class _NeighbourParts:
    """Parts of neighbours, and arrays for a quick search of the parts that an extent may touch.

    Attributes:
        parts: the parts.
        starts, stops: byte ranges of all parts, from :func:`_search_ranges`: int64, shape (ranges,).
        part: for each byte range, the index of its part: int64, shape (ranges,).
        lows, highs: first byte and stop byte of each part: int64, shape (parts,).
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
    """Return the parts of neighbours, and keep them in ``cache`` for the next call."""
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
    """Return the parts that may share a byte with the extent. All other parts share no byte with it."""
    low, high = _span(extent)
    starts, stops = _search_ranges(extent, stride)
    order = np.argsort(starts, kind="stable")
    # highest_stop[n] is the largest stop of the first n + 1 ranges of the extent. Take a range [a, b) of a neighbour,
    # and the largest stop of all ranges that start before b. If this stop is greater than a, the ranges overlap.
    starts, highest_stop = starts[order], np.maximum.accumulate(stops[order])
    num_before = np.searchsorted(starts, others.stops)
    touch = (num_before > 0) & (highest_stop[np.maximum(num_before, 1) - 1] > others.starts)
    close = (others.lows < high) & (others.highs > low)
    return [others.parts[number] for number in np.unique(others.part[touch]).tolist() if close[number]]


def _search_ranges(parts: Sequence[_Part], stride: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of ranges. If two parts share a byte, then two of their ranges overlap.

    With a common stride, a range is one byte range, counted from the start of its stretch. Without a common stride, a
    range goes from the first byte of a pattern to its last byte.
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
    """Return the first byte and the stop byte of some parts together."""
    patterns = [p for part in parts for byte_set in part.sets for p in byte_set]
    return min(p.base for p in patterns), max(p.stop for p in patterns)


def _block_limit(judged: Sequence[_Blocks]) -> int | None:
    """Return how many blocks of each view are judged. Return None if all blocks are judged.

    There is a limit only if the block strides differ and the views have more than :data:`MAX_BLOCKS` blocks in total.
    """
    relevant = [one.by_block for one in judged if one.view.shape and one.by_block.num_elements]
    if sum(view.shape[0] for view in relevant) <= MAX_BLOCKS or _common_stride(relevant):
        return None
    return max(FEW_BLOCKS // len(relevant), 1)


def _first_blocks(given: Sequence[tuple[View, int]], limit: int | None) -> list[_Blocks]:
    """Return the first ``limit`` blocks of each view. If ``limit`` is None, return all blocks."""
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
    """Remove the counts of a finding if only the first blocks were judged: if ``limit`` is not None."""
    if limit is None:
        return finding
    where = "first block" if limit == 1 else f"first {limit} blocks"
    text = f"{finding.text} (counted in the {where} of each view only: the block strides differ)"
    return replace(finding, elements=None, bytes=None, text=text)


def _check_judged(faults: dict, limit: int | None, views: Sequence[View]) -> None:
    """Raise TooMuchWorkError if only the first blocks were judged, and these blocks have no fault."""
    if limit is not None and not faults:
        names = ", ".join(dict.fromkeys(view.name for view in views))
        where = "first block" if limit == 1 else f"first {limit} blocks"
        raise TooMuchWorkError(
            f"the block strides of {names} differ; nothing was found in their {where}, and all blocks together are "
            f"more than the {MAX_BLOCKS} that can be judged one by one; audit views of fewer blocks"
        )
