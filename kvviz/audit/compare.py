"""Judges a transfer between the KV caches of two processes: does each byte of the receiver get the byte that it needs?

Example: a prefill worker holds 8 heads, and each of two decode workers holds 4. The second decode worker must read
heads 4 to 7 of each block. If it reads heads 0 to 3, all bytes arrive intact, but they belong to other heads.

A rank is one process. A transfer lists the ranks of both sides, the blocks of each rank, and pieces. A piece copies a
range of bytes of one block. The comparison computes the address of every copied byte. So it also finds a copy that
leaves its block, for example a copy into a block of another request. Blocks that behave alike are judged once.

Words of this file:

- period: the smallest number of tokens that is a whole number of blocks on every rank. All periods have equal copies.
- phase: the number of a block in its period, counted from 0.
- run: neighbouring periods in which the block ids of every rank rise by equal steps.
- unit, code, place: see :mod:`kvviz.audit.rank_bytes`.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from kvviz.audit.arguments import plain
from kvviz.audit.audit import audit_views
from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.claims import Disjoint
from kvviz.audit.rank_bytes import Rank, RankBytes, blocks_of, common_unit, contents_of
from kvviz.audit.view import View

COMPARISON_FORMAT, COMPARISON_VERSION = "kvviz-comparison", 1

MAX_UNITS = 1 << 22
"""Largest number of units that one comparison follows. Four million units take a few seconds and 400 MB."""

UNITS_PER_STEP = 1 << 8
"""Units that one piece of one period costs in addition to its bytes."""

MAX_REPAIR_PIECES = 1 << 12
"""Largest number of pieces of a repair. A longer repair is not tried."""

OUTCOMES = {
    "right": "get the byte that they need",
    "repeated": "get the byte that they need, more than once",
    "wrong": "get a byte that belongs elsewhere",
    "missing": "get nothing",
    "disputed": "get several copies that differ; the last copy stays",
    "foreign": "are copied over blocks that the transfer does not list",
    "padding": "are copied to bytes of no view",
    "out_of_bounds": "are copied outside the receiver's memory",
    "unreadable": "are read outside the sender's memory",
}
"""What can happen to a byte. The last four outcomes count copied bytes that leave the listed blocks."""

HARMLESS = ("right", "repeated", "padding")


@dataclass(frozen=True)
class Piece:
    """A range of bytes of one block that is copied. Bytes count from the start of the view in the block.

    Args:
        sender, receiver: numbers of the ranks.
        source, target: names of the views.
        from_byte, to_byte: where the range starts.
        nbytes: length of the range. If it is None, the piece copies all bytes of ``source``, without gaps between them.
        from_block, to_block: numbers of the two blocks in their period. If both are None, block n goes to block n.
    """

    sender: int
    receiver: int
    source: str
    target: str
    from_byte: int = 0
    to_byte: int = 0
    nbytes: int | None = None
    from_block: int | None = None
    to_block: int | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            object.__setattr__(self, part.name, plain(getattr(self, part.name)))


@dataclass(frozen=True)
class Transfer:
    """The ranks on both sides and the pieces that are copied between them."""

    senders: tuple[Rank, ...]
    receivers: tuple[Rank, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for part in fields(self):
            object.__setattr__(self, part.name, plain(getattr(self, part.name)))


@dataclass(frozen=True)
class Example:
    """The first place of an outcome, as text. ``needs`` and ``gets`` are empty if the place needs or gets nothing."""

    place: str
    gets: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: what the receivers get.

    Args:
        counts: ``{outcome: bytes}`` for each outcome of :data:`OUTCOMES`.
        first: ``{outcome: first place}`` for each outcome that occurs.
        notes: differences that a copy of bytes cannot remove, for example of element sizes.
        repair: pieces that give every byte what it needs. A comparison of these pieces is clean. ``repair`` is empty
            if the transfer is clean, if no sender holds a needed byte, or if there are too many pieces.
    """

    counts: dict[str, int]
    first: dict[str, Example]
    notes: tuple[str, ...] = ()
    repair: tuple[Piece, ...] = ()

    @property
    def clean(self) -> bool:
        """Return True if every byte of the receivers gets what it needs, and no copy damages any other byte."""
        return not any(count for outcome, count in self.counts.items() if outcome not in HARMLESS)

    def __str__(self) -> str:
        total = sum(self.counts[outcome] for outcome in ("right", "repeated", "wrong", "missing", "disputed"))
        good = self.counts["right"] + self.counts["repeated"]
        head = "clean" if self.clean else "not clean"
        lines = [f"{head}: {good:,} of {total:,} bytes of the receivers get what they need"]
        for outcome, count in self.counts.items():
            if not count or outcome == "right":
                continue
            lines.append(f"{outcome}: {count:,} bytes {OUTCOMES[outcome]}")
            example = self.first[outcome]
            lines += [f"  first  {example.place}"]
            lines += [
                f"  {word:5}  {text}" for word, text in (("gets", example.gets), ("needs", example.needs)) if text
            ]
        lines += [f"note: {note}" for note in self.notes]
        if self.repair:
            pieces = f"{len(self.repair):,} pieces" if len(self.repair) > 1 else "1 piece"
            first = ". The first 3:" if len(self.repair) > 3 else ":"
            lines.append(f"repair: {pieces} per period, tried and clean{first}")
            lines += [f"  {_piece_text(piece)}" for piece in self.repair[:3]]
        return "\n".join(lines)


def _piece_text(piece: Piece) -> str:
    source = f"sender {piece.sender} {piece.source} block {piece.from_block} byte {piece.from_byte}"
    target = f"receiver {piece.receiver} {piece.target} block {piece.to_block} byte {piece.to_byte}"
    return f"{piece.nbytes} bytes from {source} to {target}"


def comparison_json(result: Comparison) -> str:
    """Return a comparison as JSON."""
    head = {"format": COMPARISON_FORMAT, "version": COMPARISON_VERSION, "clean": result.clean}
    return json.dumps(head | asdict(result), indent=1) + "\n"


def default_transfer(sender: Rank, receiver: Rank) -> Transfer:
    """Return the transfer that copies whole blocks of each view to the view of the same name, block n to block n."""
    names = {view.name for view in receiver.views}
    return Transfer((sender,), (receiver,), tuple(Piece(0, 0, v.name, v.name) for v in sender.views if v.name in names))


def compare(transfer: Transfer) -> Comparison:
    """Return what each byte of the receivers gets. The result is exact for any number of blocks.

    Raises:
        ValueError: the transfer does not fit the views, or views of one rank share bytes.
        TooMuchWorkError: the comparison would follow more than :data:`MAX_UNITS` units.
    """
    judged = _Judge(transfer)
    result = judged.result()
    if result.clean:
        return result
    pieces = judged.repair()
    if len(pieces) > MAX_REPAIR_PIECES:
        note = (
            f"A repair needs more than {MAX_REPAIR_PIECES:,} pieces per period, because the two sides order their "
            "elements differently. Give both sides the same order, or rearrange the blocks after the copy."
        )
        return replace(result, notes=(*result.notes, note))
    tried = pieces and _Judge(replace(transfer, pieces=pieces)).result()
    return replace(result, repair=pieces if tried and tried.clean else ())


class _Judge:
    """Does one comparison: follows all copies, counts the outcomes, and looks for a repair."""

    def __init__(self, transfer: Transfer) -> None:
        self.senders, self.receivers = (
            [RankBytes(rank, side, number) for number, rank in enumerate(ranks)]
            for side, ranks in (("sender", transfer.senders), ("receiver", transfer.receivers))
        )
        self.ranks = self.senders + self.receivers
        if not self.senders or not self.receivers:
            raise ValueError("a transfer needs at least one sender and one receiver")
        self.period = lcm(*(rank.span for rank in self.ranks))
        self.periods = self._periods()
        if not self.periods:
            raise ValueError("the ranks list no blocks, so there is nothing to compare; list at least one block")
        self.pieces = [one for piece in transfer.pieces for one in self._placed(piece)]
        self.contents = contents_of(self.ranks, self.period)
        lengths = [n for p in self.pieces for n in (p.from_byte, p.to_byte, p.nbytes or 0)]
        self.unit = common_unit(self.ranks, self.contents, lengths)
        self._refuse_too_much(1)
        for rank in self.ranks:
            _refuse_shared_bytes(rank)
            rank.number_bytes(self.contents, self.period, self.unit)
        self.moves = [self._move(piece) for piece in self.pieces]
        self.rows = self._rows()
        self._refuse_too_much(len(self.rows))

    def _phases(self, rank: RankBytes) -> int:
        """Return the number of blocks that a rank has in one period."""
        return self.period // rank.span

    def _periods(self) -> int:
        """Return the number of periods of the transfer."""
        found = {rank.count * rank.span for rank in self.ranks}
        if len(found) > 1 or max(found) % self.period:
            held = ", ".join(f"{r.label} lists {r.count} blocks of {r.span} tokens" for r in self.ranks)
            raise ValueError(
                f"all ranks must list blocks for the same number of tokens, and {self.period} must divide this "
                f"number, but {held}"
            )
        return found.pop() // self.period

    def _placed(self, piece: Piece) -> list[Piece]:
        """Return the piece with both block numbers. If it has none, return one piece for each block of a period."""
        for number, side, ranks in (
            (piece.sender, "sender", self.senders),
            (piece.receiver, "receiver", self.receivers),
        ):
            if not 0 <= number < len(ranks):
                raise ValueError(f"a piece names {side} {number}, but the transfer has {len(ranks)} ranks on this side")
        one, two = self.senders[piece.sender], self.receivers[piece.receiver]
        for rank, name in ((one, piece.source), (two, piece.target)):
            if name not in rank.views:
                raise ValueError(f"a piece names the view {name!r}, but {rank.label} has no view of this name")
        if piece.nbytes is not None and piece.nbytes < 0:
            raise ValueError(f"the length of a piece must be at least 0, but it is {piece.nbytes}")
        sent, got = self._phases(one), self._phases(two)
        if (piece.from_block is None) != (piece.to_block is None):
            raise ValueError("a piece has only one of from_block and to_block; give both, or none of them")
        if piece.from_block is None:
            if sent != got:
                raise ValueError(
                    f"{one.label} has {sent} blocks per period and {two.label} has {got}; "
                    "give each piece from_block and to_block"
                )
            return [replace(piece, from_block=n, to_block=n) for n in range(sent)]
        first, second = piece.from_block, piece.to_block
        if not (0 <= first < sent and 0 <= second < got):
            raise ValueError(
                f"from_block must be from 0 to {sent - 1} and to_block from 0 to {got - 1}, not {first} and {second}"
            )
        return [replace(piece, from_block=first, to_block=second)]

    def _refuse_too_much(self, rows: int) -> None:
        units = sum(_block_bytes(rank) * self._phases(rank) for rank in self.ranks)
        units += sum(
            _view_bytes(self.senders[p.sender].views[p.source]) if p.nbytes is None else p.nbytes for p in self.pieces
        )
        work = rows * (units // self.unit + UNITS_PER_STEP * len(self.pieces))
        if work > MAX_UNITS:
            raise TooMuchWorkError(
                f"the comparison would take {work:,} units of work of {self.unit} bytes each, more than "
                f"{MAX_UNITS:,}; compare fewer views, or list the blocks of each rank in fewer ranges"
            )

    def _move(self, piece: Piece) -> "_Move":
        one, two = self.senders[piece.sender], self.receivers[piece.receiver]
        source, target = one.views[piece.source], two.views[piece.target]
        if piece.nbytes is None:
            part = one.groups[one.group(source)]
            mine = one.view[part] == one.rank.views.index(source)
            steps = one.offset[part][mine] - one.start(source)
        else:
            steps = np.arange(piece.nbytes // self.unit)
        from_, to = one.start(source) + piece.from_byte // self.unit, two.start(target) + piece.to_byte // self.unit
        groups = one.group(source), two.group(target)
        found = one.own(groups[0], from_ + steps), two.own(groups[1], to + steps)
        return _Move(piece, from_ + steps, to + steps, *groups, *found)

    def _rows(self) -> list["_Row"]:
        """Return the periods that are followed, each with the number of periods that behave like it.

        If no copy leaves its block, all periods behave alike. Otherwise only the periods in the middle of a run do.
        """
        reach = 0
        for move in self.moves:
            for rank, group, offsets, own in (
                (self.senders[move.piece.sender], move.source_group, move.source, move.source_place),
                (self.receivers[move.piece.receiver], move.target_group, move.target, move.target_place),
            ):
                reach = max(reach, rank.away(group, offsets[own < 0]) if (own < 0).any() else 0)
        if not reach:
            return [_Row(0, self.periods, 0)]
        runs = self._runs()
        if not self._even(runs, reach):
            self._refuse_too_much(self.periods)
            return [_Row(period, 1, period) for period in range(self.periods)]
        rows = []
        for start, stop in runs:
            if stop - start <= 6 * reach + 3:
                rows += [_Row(period, 1, period) for period in range(start, stop)]
                continue
            middle = start + 3 * reach + 1
            for period in [*range(start, middle + reach + 1), *range(stop - 2 * reach, stop)]:
                at_an_end = period < start + reach or period >= stop - reach
                rows.append(_Row(period, int(at_an_end), period))
            rows[rows.index(_Row(middle, 0, middle))] = _Row(middle, stop - start - 2 * reach, start + reach)
        return rows

    def _runs(self) -> list[tuple[int, int]]:
        """Return the first period and the stop period of each run."""
        cuts = {0, self.periods}
        for rank in self.ranks:
            phases, position = self._phases(rank), 0
            for ids in rank.blocks:
                cuts |= {position // phases, -(-position // phases)}
                position += len(ids)
        return list(pairwise(sorted(cuts)))

    def _even(self, runs: list[tuple[int, int]], reach: int) -> bool:
        """Return True if no copy of a run reaches blocks of another run, and each storage has one block stride.

        Args:
            reach: how many blocks a copy can be away from its own block.
        """
        for rank in self.ranks:
            storages = [storage for storage, step in rank.groups]
            if len(set(storages)) < len(storages) or len(runs) > 1000:
                return False
            phases, hulls = self._phases(rank), []
            for start, stop in runs:
                first, last = range(start * phases, (start + 1) * phases), range((stop - 1) * phases, stop * phases)
                ids = [rank.block_at(position) for position in (*first, *last)]
                hulls.append((min(ids) - reach, max(ids) + reach))
            if any(one[1] >= two[0] for one, two in pairwise(sorted(hulls))):
                return False
        return True

    def result(self) -> Comparison:
        """Follow every copy, and count what lands where."""
        counts, first = dict.fromkeys(OUTCOMES, 0), {}
        row_of = {row.period: number for number, row in enumerate(self.rows)}
        landed = [_Landed((len(self.rows), self._phases(rank), rank.offset.size)) for rank in self.receivers]
        for number, move in enumerate(self.moves):
            piece, rank = move.piece, self.receivers[move.piece.receiver]
            for row, (period, _, _) in enumerate(self.rows):
                code, come = self._sent(move, period)
                self._count_unreadable(number, row, counts, first)
                inside = move.target_place >= 0
                right = (code == self._needed(rank, move.target_place, piece.to_block)) & (come == period)
                where = row, piece.to_block, move.target_place[inside]
                landed[piece.receiver].take(where, right[inside], number, np.flatnonzero(inside), row)
                if not inside.all():
                    self._stray(number, row, code, come, landed[piece.receiver], row_of, counts, first)
        for number, rank in enumerate(self.receivers):
            self._count(number, rank, landed[number], counts, first)
        return Comparison(counts, first, self._notes())

    def _count_unreadable(self, number: int, row: int, counts: dict[str, int], first: dict[str, Example]) -> None:
        """Count the units that a piece reads outside the sender's memory."""
        move, (period, weight, alike) = self.moves[number], self.rows[row]
        rank, phase = self.senders[move.piece.sender], move.piece.from_block
        away = np.flatnonzero(move.source_place < 0)
        if not away.size or not weight:
            return
        addresses = move.source[away] + rank.block_at(period * self._phases(rank) + phase) * move.source_group[1]
        outside = (addresses < 0) | (addresses >= _storage_bytes(rank, move.source_group[0]) // self.unit)
        if outside.any():
            counts["unreadable"] += int(outside.sum()) * weight * self.unit
            first.setdefault("unreadable", Example(self._origin(number, int(away[np.argmax(outside)]), alike)))

    def _sent(self, move: "_Move", period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the code and the period of each unit that a piece sends. Code -1 means: of no listed block."""
        rank, phase = self.senders[move.piece.sender], move.piece.from_block
        place = move.source_place
        code = np.where(place >= 0, rank.code[place] + phase * rank.per_block[place], -1)
        come = np.full(code.shape, period)
        away = np.flatnonzero(place < 0)
        if away.size:
            found, block, position = self._look_up(rank, move.source_group, move.source[away], period, phase)
            listed = (found >= 0) & (position >= 0)
            then, phases = np.divmod(position, self._phases(rank))
            code[away] = np.where(listed, rank.code[found] + phases * rank.per_block[found], -1)
            come[away] = np.where(listed, then, -1)
        return code, come

    def _look_up(
        self, rank: RankBytes, group: tuple[str, int], offsets: np.ndarray, period: int, phase: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return place, block, and position of this block in the list, for offsets outside their own block."""
        addresses = offsets + rank.block_at(period * self._phases(rank) + phase) * group[1]
        place, block = rank.at(group[0], addresses)
        return place, block, np.where(place >= 0, rank.position(block), -1)

    def _needed(self, rank: RankBytes, place: np.ndarray, phase: int) -> np.ndarray:
        return rank.code[place] + phase * rank.per_block[place]

    def _stray(
        self, number: int, row: int, code: np.ndarray, come: np.ndarray, landed: "_Landed",
        row_of: dict[int, int], counts: dict[str, int], first: dict[str, Example],
    ) -> None:  # fmt: skip
        """Follow those units of a piece that land outside their own block at the receiver."""
        move, (period, weight, alike) = self.moves[number], self.rows[row]
        rank, phase = self.receivers[move.piece.receiver], move.piece.to_block
        away = np.flatnonzero(move.target_place < 0)
        offsets = move.target[away]
        place, block, position = self._look_up(rank, move.target_group, offsets, period, phase)
        addresses = offsets + rank.block_at(period * self._phases(rank) + phase) * move.target_group[1]
        outside = (addresses < 0) | (addresses >= _storage_bytes(rank, move.target_group[0]) // self.unit)
        chosen = {
            "out_of_bounds": outside,
            "padding": ~outside & (place < 0),
            "foreign": ~outside & (place >= 0) & (position < 0),
        }
        for outcome, these in chosen.items():
            if not these.any() or not weight:
                continue
            counts[outcome] += int(these.sum()) * weight * self.unit
            if outcome not in first:
                at = int(np.flatnonzero(these)[0])
                steps = (rank.block_at(n * self._phases(rank) + phase) for n in (period, alike))
                blocks = sum(n * sign for n, sign in zip(steps, (-1, 1), strict=True))
                address = (int(addresses[at]) + blocks * move.target_group[1]) * self.unit
                text = f"{rank.label} byte {address} of storage {move.target_group[0]}"
                if outcome == "foreign":
                    text = rank.text(int(place[at]), int(block[at]) + blocks, self.contents)
                first[outcome] = Example(text, self._origin(number, int(away[at]), alike))
        then, phases = np.divmod(position, self._phases(rank))
        for goal in np.unique(then[position >= 0]):
            if int(goal) not in row_of:
                continue
            for one in np.unique(phases[(then == goal) & (position >= 0)]):
                these = (then == goal) & (phases == one) & (position >= 0)
                right = (code[away] == self._needed(rank, place, int(one))) & (come[away] == goal)
                where = row_of[int(goal)], int(one), place[these]
                landed.take(where, right[these], number, away[these], row)

    def _count(
        self, number: int, rank: RankBytes, landed: "_Landed", counts: dict[str, int], first: dict[str, Example]
    ) -> None:
        hits, good = landed.hits, landed.good
        chosen = {
            "right": (hits == 1) & (good == 1),
            "repeated": (hits > 1) & (good == hits),
            "wrong": (hits == 1) & (good == 0),
            "missing": hits == 0,
            "disputed": (hits > 1) & (good < hits),
        }
        for outcome, these in chosen.items():
            per_row = these.sum(axis=(1, 2))
            count = sum(int(many) * row.weight for many, row in zip(per_row, self.rows, strict=True))
            counts[outcome] += count * self.unit
            if not count or outcome in first or outcome == "right":
                continue
            row = next(n for n, many in enumerate(per_row) if many and self.rows[n].weight)
            phase, place = (int(n) for n in np.argwhere(these[row])[0])
            period, later = self.rows[row].first, self.rows[row].period - self.rows[row].first
            block = rank.block_at(period * self._phases(rank) + phase)
            gets = ""
            if hits[row, phase, place]:
                by, unit = int(landed.piece[row, phase, place]), int(landed.unit[row, phase, place])
                gets = self._origin(by, unit, self.rows[landed.row[row, phase, place]].period - later)
            needs = self._holder(self._needed(rank, np.array([place]), phase), period)
            first[outcome] = Example(rank.text(place, block, self.contents), gets, needs)

    def _origin(self, number: int, unit: int, period: int) -> str:
        """Return a text that names the byte which one unit of a piece reads."""
        move = self.moves[number]
        rank, phase = self.senders[move.piece.sender], move.piece.from_block
        if move.source_place[unit] >= 0:
            block = rank.block_at(period * self._phases(rank) + phase)
            return rank.text(int(move.source_place[unit]), block, self.contents)
        place, block, position = self._look_up(rank, move.source_group, move.source[[unit]], period, phase)
        if place[0] >= 0:
            text = rank.text(int(place[0]), int(block[0]), self.contents)
            return text if position[0] >= 0 else f"{text}, a block that the transfer does not list"
        address = int(move.source[unit]) + rank.block_at(period * self._phases(rank) + phase) * move.source_group[1]
        nbytes = _storage_bytes(rank, move.source_group[0])
        inside = 0 <= address * self.unit < nbytes
        why = "which belongs to no view" if inside else f"which has {nbytes} bytes"
        return f"{rank.label} byte {address * self.unit} of storage {move.source_group[0]}, {why}"

    def _held(self) -> tuple[np.ndarray, ...]:
        """Return four arrays about all units of the senders, sorted by code: code, sender, phase and place."""
        if not hasattr(self, "_held_columns"):
            columns = []
            for number, rank in enumerate(self.senders):
                for phase in range(self._phases(rank)):
                    code = rank.code + phase * rank.per_block
                    many = np.full(code.shape, number), np.full(code.shape, phase)
                    columns.append((code, *many, np.arange(code.size)))
            columns = [np.concatenate(column) for column in zip(*columns, strict=True)]
            order = np.argsort(columns[0], kind="stable")
            self._held_columns = tuple(column[order] for column in columns)
        return self._held_columns

    def _holders(self, codes: np.ndarray) -> np.ndarray:
        known = self._held()[0]
        near = np.minimum(np.searchsorted(known, codes), known.size - 1)
        return np.where(known[near] == codes, near, -1)

    def _holder(self, code: np.ndarray, period: int) -> str:
        """Return a text that names the sender's unit with this code."""
        near = int(self._holders(code)[0])
        if near < 0:
            return "a byte that no sender holds"
        _, number, phase, place = (int(column[near]) for column in self._held())
        rank = self.senders[number]
        return rank.text(place, rank.block_at(period * self._phases(rank) + phase), self.contents)

    def repair(self) -> tuple[Piece, ...]:
        """Return pieces that give every byte of the receivers what it needs.

        If no sender holds a needed byte, return (). If there are more than :data:`MAX_REPAIR_PIECES` pieces, return
        only the first ones.
        """
        found: list[Piece] = []
        for number, rank in enumerate(self.receivers):
            for phase in range(self._phases(rank)):
                for part in rank.groups.values():
                    place = np.arange(part.start, part.stop)
                    near = self._holders(self._needed(rank, place, phase))
                    if (near < 0).any():
                        return ()
                    found += self._merged(number, rank, phase, place, near)
                    if len(found) > MAX_REPAIR_PIECES:
                        return tuple(found)
        return tuple(found)

    def _merged(self, number: int, rank: RankBytes, phase: int, place: np.ndarray, near: np.ndarray) -> Iterable[Piece]:
        """Join units that are neighbours on both sides, and yield one piece for each such range of units."""
        _, sender, sent_phase, sent_place = (column[near] for column in self._held())
        source = np.array([0] * place.size)
        source_view = np.array([0] * place.size)
        for one in np.unique(sender):
            these = sender == one
            source[these] = self.senders[one].offset[sent_place[these]]
            source_view[these] = self.senders[one].view[sent_place[these]]
        keys = np.stack([sender, sent_phase, source_view, rank.view[place], rank.offset[place] - source])
        breaks = (np.diff(keys, axis=1) != 0).any(axis=0) | (np.diff(rank.offset[place]) != 1)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        for start, stop in pairwise([*starts.tolist(), place.size]):
            one, from_phase, view, own, _ = (int(n) for n in keys[:, start])
            given, taken = self.senders[one].rank.views[view], rank.rank.views[own]
            yield Piece(
                one, number, given.name, taken.name,
                (int(source[start]) - self.senders[one].start(given)) * self.unit,
                (int(rank.offset[place[start]]) - rank.start(taken)) * self.unit,
                (stop - start) * self.unit, from_phase, phase,
            )  # fmt: skip

    def _notes(self) -> tuple[str, ...]:
        sent, got = (
            {view.name: rank.key(view) for rank in ranks for view in rank.rank.views}
            for ranks in (self.senders, self.receivers)
        )
        notes = []
        for name in sent.keys() & got.keys():
            (_, size, tokens), (_, other_size, other_tokens) = sent[name], got[name]
            if size != other_size:
                notes.append(
                    f"{name} has elements of {size} bytes at the sender and of {other_size} bytes at the receiver. "
                    "A copy of bytes cannot convert them."
                )
            elif tokens != other_tokens:
                notes.append(
                    f"An element of {name} stands for {tokens} tokens at the sender and for {other_tokens} tokens at "
                    "the receiver. A copy of bytes cannot merge or split them."
                )
        return tuple(sorted(notes))


class _Row(NamedTuple):
    """One period that is followed. It stands for ``weight`` periods that behave alike, the first of them is ``first``.

    A period of weight 0 is not counted. It is followed because its copies may reach a counted period.
    """

    period: int
    weight: int
    first: int


@dataclass(frozen=True)
class _Move:
    """One piece, with arrays of the offset and the place of each unit on both sides.

    The place is -1 if the unit lies outside its own block.
    """

    piece: Piece
    source: np.ndarray
    target: np.ndarray
    source_group: tuple[str, int]
    target_group: tuple[str, int]
    source_place: np.ndarray
    target_place: np.ndarray


class _Landed:
    """What lands on one receiver: arrays of shape (followed periods, blocks per period, units of a block).

    ``hits`` counts copies, and ``good`` counts copies with the right content. ``piece``, ``unit`` and ``row`` say
    where the last copy came from.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.hits, self.good, self.piece, self.unit, self.row = (np.zeros(shape, np.int32) for _ in range(5))

    def take(
        self, where: tuple[int, int, np.ndarray], right: np.ndarray, piece: int, unit: np.ndarray, row: int
    ) -> None:
        """Record one copy of one piece. ``where`` is the row, the phase, and the places, each only once."""
        self.hits[where] += 1
        self.good[where] += right
        self.piece[where], self.unit[where], self.row[where] = piece, unit, row


def _refuse_shared_bytes(rank: RankBytes) -> None:
    found = audit_views(rank.rank.views, [Disjoint(tuple(rank.views))], witnesses=False)
    if not found.clean:
        raise ValueError(
            f"{rank.label}: views share bytes or leave their storage ({found.findings[0].kind}), so the meaning of a "
            f"byte is not clear; run kvviz audit on the views file of this rank first"
        )


def _storage_bytes(rank: RankBytes, name: str) -> int:
    """Return the size of a storage of a rank."""
    return next(view.storage.nbytes for view in rank.rank.views if view.storage.name == name)


def _view_bytes(view: View) -> int:
    """Return the bytes of a view in one block."""
    return prod(view.shape) // max(1, blocks_of(view)) * view.itemsize


def _block_bytes(rank: RankBytes) -> int:
    return sum(map(_view_bytes, rank.rank.views))
