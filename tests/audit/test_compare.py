"""Comparisons of two caches, against a simulation byte by byte and against what the released engine computes."""

import itertools
import json
import random
import re
import time
from collections import Counter
from dataclasses import replace
from math import lcm

import pytest

from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.compare import OUTCOMES, Piece, Transfer, _Judge, compare, default_transfer
from kvviz.audit.rank_bytes import Rank, tokens_of
from kvviz.audit.view import Storage, View
from tests.golden import FOLDER

HEADS = json.loads((FOLDER / "vllm_tp_heads.json").read_text())
SLOTS = [row for row in json.loads((FOLDER / "vllm_dcp_slots.json").read_text()) if row["kind"] == "slots"]
SERVED = [row for row in HEADS if row["kind"] == "heads" and "decode_ranks" in row.get("nixl", {})]


def paged(name, blocks, tokens, heads, width, order="hnd", pad=0, start=0, nbytes=None, step=None):
    """Return a view of one byte per element. ``order`` says which axis of a block lies outside."""
    dense = tokens * heads * width
    inner = (width, tokens * width, 1) if order == "hnd" else (heads * width, width, 1)
    step = step or dense + pad
    storage = Storage("s", nbytes or start + blocks * step)
    return View(name, storage, (blocks, tokens, heads, width), (step, *inner), start, 1,
                ("block", "token", "head", "byte"))  # fmt: skip


def meanings(rank):
    """Return what each address of a rank means, by plain loops: content and place. Unlisted blocks have no token."""
    found = {}
    listed = {block: n for n, block in enumerate(itertools.chain(*rank.blocks))}
    for view in rank.views:
        blocks, tokens, heads, width = view.shape
        for block, t, h, b in itertools.product(range(blocks), range(tokens), range(heads), range(width)):
            slot = (
                t // rank.interleave * rank.interleave * rank.world + rank.place * rank.interleave + t % rank.interleave
            )
            token = listed[block] * tokens * rank.world + slot if block in listed else None
            head = rank.holds["head"][h]
            found[view.start_of((block, t, h, b))] = (view.name, token, head, b), (view.name, block, t, h, b)
    return found


def span(rank):
    """Return the tokens from one block of a rank to its next block."""
    return rank.views[0].shape[1] * rank.world


def simulated(transfer):
    """Copy byte by byte. Return the bytes per outcome, and the place of the first byte per outcome and receiver."""
    period = lcm(*map(span, transfer.senders + transfer.receivers))
    counts = Counter()
    means = {id(rank): meanings(rank) for rank in transfer.senders + transfer.receivers}
    landed = [{} for _ in transfer.receivers]
    for piece in transfer.pieces:
        one, two = transfer.senders[piece.sender], transfer.receivers[piece.receiver]
        source, target = (
            next(view for view in rank.views if view.name == name)
            for rank, name in ((one, piece.source), (two, piece.target))
        )
        ids, goal = [list(itertools.chain(*rank.blocks)) for rank in (one, two)]
        for n in range(len(ids) * span(one) // period):
            p, q = n * (period // span(one)) + piece.from_block, n * (period // span(two)) + piece.to_block
            for k in range(piece.nbytes):
                a = source.start_of((ids[p], 0, 0, 0)) + piece.from_byte + k
                b = target.start_of((goal[q], 0, 0, 0)) + piece.to_byte + k
                sent = means[id(one)].get(a, (None,))[0]
                counts["unreadable"] += not 0 <= a < source.storage.nbytes
                if b in means[id(two)]:
                    landed[piece.receiver].setdefault(b, []).append(sent)
                else:
                    counts["padding" if 0 <= b < target.storage.nbytes else "out_of_bounds"] += 1
    first = {}
    for number, rank in enumerate(transfer.receivers):
        order = {block: n for n, block in enumerate(itertools.chain(*rank.blocks))}
        phases = period // span(rank)
        for b, (meaning, place) in means[id(rank)].items():
            copies = landed[number].get(b, [])
            if meaning[1] is None:
                counts["foreign"] += len(copies)
                continue
            good = sum(copy == meaning for copy in copies)
            outcome = "missing" if not copies else ["wrong", "right"][good] if len(copies) == 1 else None
            outcome = outcome or ("repeated" if good == len(copies) else "disputed")
            counts[outcome] += 1
            position = order[place[1]]
            in_block = b - place[1] * rank.views[0].stride[0]
            key = number, position // phases, position % phases, in_block
            first[outcome] = min(first.get(outcome, (key, place)), (key, place))
    return counts, {outcome: (key[0], place) for outcome, (key, place) in first.items()}


def random_rank(rng, tokens_total, far):
    world = rng.choice((1, 1, 2))
    tokens = rng.choice([n for n in (1, 2, 4) if tokens_total % (n * world) == 0])
    count = tokens_total // (tokens * world)
    heads, width = rng.randint(1, 3), rng.randint(1, 3)
    blocks, order = 2 * count + 2, rng.choice(("hnd", "nhd"))
    page, gap = tokens * heads * width, rng.randint(0, 3)
    views, step = [], 2 * page + gap
    for n, name in enumerate(("K", "V")):
        views.append(paged(name, blocks, tokens, heads, width, order, start=n * page, step=step, nbytes=blocks * step))
    begin = rng.randint(0, 2)
    half = count // 2
    tables = [[range(begin, begin + count)], [range(begin, begin + 2 * count, 2)], [range(count - 1, -1, -1)],
              [range(begin, begin + half), range(begin + half + 1, begin + count + 1)]]  # fmt: skip
    if not far:
        tables += [[range(n, n + 1) for n in rng.sample(range(blocks), count)]]
    interleave = rng.choice([n for n in (1, 2, 4) if tokens % n == 0])
    held = {"head": tuple(rng.sample(range(4), heads))}
    return Rank(tuple(views), held, tuple(rng.choice(tables)), world, rng.randrange(world), interleave)


@pytest.mark.parametrize("part", range(6))
def test_like_a_simulation(part, monkeypatch):
    rng, seen = random.Random(part), Counter()
    far = part >= 4
    if far:  # so few units that periods in the middle of a run must stand for each other
        monkeypatch.setattr("kvviz.audit.compare.MAX_UNITS", 1 << 15)
        monkeypatch.setattr("kvviz.audit.compare.UNITS_PER_STEP", 0)
    shortened = 0
    for _ in range(12 if far else 100):
        total = 480 if far else rng.choice((8, 16))
        sides = [tuple(random_rank(rng, total, far) for _ in range(rng.randint(1, 2))) for _ in range(2)]
        period = lcm(*map(span, sides[0] + sides[1]))
        pieces = []
        for _ in range(rng.randint(1, 5)):
            s, r = rng.randrange(len(sides[0])), rng.randrange(len(sides[1]))
            phases = [period // span(side) for side in (sides[0][s], sides[1][r])]
            names = rng.choice(("KK", "VV", "KV", "VK"))
            pieces.append(Piece(s, r, *names, rng.randint(-9, 9), rng.randint(-9, 9),
                                rng.randint(0, 40), *map(rng.randrange, phases)))  # fmt: skip
        sound = compare(Transfer(*sides, ())).repair
        if sound and rng.random() < 0.7:  # mostly right: the pieces of a repair, some of them repeated or moved
            pieces = [*sound, *rng.choices(sound, k=rng.randint(0, 2)), *pieces[: rng.randint(0, 1)]]
        transfer = Transfer(*sides, tuple(pieces))
        counts, first = simulated(transfer)
        result = compare(transfer)
        assert {k: n for k, n in result.counts.items() if n} == {k: n for k, n in counts.items() if n}
        seen.update({outcome: 1 for outcome, count in result.counts.items() if count})
        shortened += len(_Judge(transfer).rows) < total // period
        for outcome, (number, (name, *index)) in first.items():
            if outcome in result.first and all(view.stride[0] > 0 for view in sides[1][number].views):
                place = result.first[outcome].place
                shown = [int(n) for n in re.findall(r"(?:block|token|head|byte) (\d+)(?! of)", place.split(" [")[1])]
                assert (place.split(" [")[0], shown) == (f"receiver {number} {name}", index)
        if result.repair:
            assert compare(replace(transfer, pieces=result.repair)).clean
    assert all(seen[outcome] for outcome in OUTCOMES if not far)
    assert shortened or not far


def test_repairs_are_found_where_the_senders_hold_everything():
    rng, repaired = random.Random(3), 0
    for _ in range(60):
        sides = [tuple(random_rank(rng, 16, False) for _ in range(rng.randint(1, 2))) for _ in range(2)]
        held = [{(name, token, head, b) for rank in side for (name, token, head, b), _ in meanings(rank).values()
                 if token is not None} for side in sides]  # fmt: skip
        result = compare(Transfer(*sides, ()))
        assert bool(result.repair) == (held[1] <= held[0])
        repaired += bool(result.repair)
    assert repaired > 3


def layers_of(layout, heads, size, width):
    """Return two layers of 12 blocks in one allocation, in the order that the layout names."""
    sizes = dict(L=2, B=12, H=heads, N=size, C=width)
    steps, step = {}, 1
    for letter in reversed(layout):
        steps[letter], step = step, step * sizes[letter]
    return tuple(View(f"L{n}", Storage("s", step), (12, size, heads, width), tuple(steps[x] for x in "BNHC"),
                      n * steps["L"], 1, ("block", "token", "head", "byte")) for n in range(2))  # fmt: skip


def served(row, shift=0):
    """Return the transfer that the engine's byte ranges describe, in each region that it registers."""
    nixl, ranks = row["nixl"], []
    small = row["prefill_block_size"], row["decode_block_size"]
    for side, size in zip(("prefill", "decode"), small, strict=True):
        width = nixl["head_bytes_in_a_block"][side] // size
        ranks.append(tuple(Rank(layers_of(row["layout"], len(heads), size, width), {"head": tuple(heads)},
                                (range(0, 4 * max(small) // size),)) for heads in row[f"{side}_heads"]))  # fmt: skip
    pieces = []
    for reader in nixl["decode_ranks"]:
        for read in reader["reads"]:
            one, two = ranks[0][read["remote_rank"]].views[0], ranks[1][reader["rank"]].views[0]
            names = ["L0"] if len(nixl["prefill_block_len"]) == 1 else ["L0", "L1"]
            heads = range(one.shape[2]) if row["layout"] == "LHBNC" else range(1)
            spans = itertools.zip_longest(read["remote_block_bytes"], read["local_block_bytes"],
                                          fillvalue=read["remote_block_bytes"][-1])  # fmt: skip
            for phase, ((start, n), (to, _)) in enumerate(spans):
                pieces += [Piece(read["remote_rank"], reader["rank"], name, name, start + shift + h * one.stride[2],
                                 to + h * two.stride[2], n, *((phase, 0) if small[0] < small[1] else ()))
                           for name in names for h in heads]  # fmt: skip
    return Transfer(*ranks, tuple(pieces))


EQUAL = [row for row in SERVED if row["prefill_block_size"] == row["decode_block_size"]]


def test_two_blocks_in_one_must_be_rearranged():
    (row,) = [row for row in SERVED if row not in EQUAL]
    result = compare(served(row))
    assert compare(replace(served(row), pieces=result.repair)).clean and result.repair
    counts = result.counts
    assert counts["right"] == counts["wrong"] == 4 * 4 * 2 * 1024 and sum(counts.values()) == 2 * counts["right"]


@pytest.mark.parametrize(
    "row", EQUAL, ids=lambda row: f"{row['total_kv_heads']}-{row['prefill_tp']}-{row['decode_tp']}"
)
def test_served_rows(row):
    transfer = served(row)
    result = compare(transfer)
    assert result.clean, str(result)
    head = row["nixl"]["head_bytes_in_a_block"]["prefill"]
    moved = compare(served(row, shift=head))
    assert moved.counts["wrong"] == result.counts["right"] and not moved.counts["right"]
    few = compare(replace(transfer, pieces=transfer.pieces[1:]))
    assert few.counts["missing"] == 4 * transfer.pieces[0].nbytes


def test_slots():
    checked = 0
    for row in SLOTS:
        if "slots" not in row:
            continue
        size, world, interleave = row["block_size"], row["dcp_world_size"], row["interleave"]
        starts = row["query_start_loc"]
        for place, slots in enumerate(row["slots"]):
            held = tokens_of(size, world, place, interleave)
            for request, table in enumerate(row["block_table"]):
                where = {
                    b * size + t: n * size * world + int(held[t]) for n, b in enumerate(table) for t in range(size)
                }
                for token in range(starts[request], starts[request + 1]):
                    if slots[token] >= 0:
                        checked += 1
                        assert where[slots[token]] == row["positions"][token]
    assert checked == 738


def test_layouts_and_scales():
    sent = [Rank((paged("K", 8, 4, 2, 16, order),)) for order in ("hnd", "nhd")]
    assert compare(default_transfer(sent[0], sent[0])).clean
    assert compare(default_transfer(*sent)).counts["wrong"] == 8 * 96
    storage = Storage("s", 80)
    data = View("K data", storage, (4, 16), (20, 1), 0, 1, ("block", "byte"))
    scale = View("K scale", storage, (4,), (5,), 4, 4, ("block",), "scale")
    rank = Rank((data, scale))
    assert compare(default_transfer(rank, rank)).clean
    left = compare(Transfer((rank,), (rank,), (Piece(0, 0, "K data", "K data", nbytes=16),)))
    assert left.counts["missing"] == 16 and left.first["missing"].place == "receiver 0 K scale [block 0]"
    assert compare(Transfer((rank,), (rank,), (Piece(0, 0, "K data", "K data", nbytes=20),))).clean


def test_many_blocks_take_no_time():
    rank = Rank((paged("K", 10**9, 16, 8, 64),))
    start = time.process_time()
    result = compare(default_transfer(rank, rank))
    assert result.clean and result.counts["right"] == 10**9 * 8192
    assert time.process_time() - start < 1


def test_refusals():
    rank = Rank((paged("K", 8, 4, 2, 16),))
    piece = (Piece(0, 0, "K", "K"),)
    for wrong, words in (
        (replace(rank, interleave=3), "must divide the block size 4, but it is 3"),
        (replace(rank, blocks=(range(9),)), "but it has 8 blocks"),
        (replace(rank, blocks=(range(4), range(4))), "lists block 0 twice"),
        (replace(rank, blocks=(range(3),)), "for the same number of tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            compare(Transfer((rank,), (wrong,), piece))


def test_what_a_copy_of_bytes_cannot_merge():
    """A scale of 32 tokens is not the scale of its first 16 tokens."""
    ranks = []
    for blocks, width in ((4, 16), (2, 32)):
        storage = Storage("s", blocks * (width + 4))
        axes = ("block", "token")
        data = View("K data", storage, (blocks, width), (width + 4, 1), 0, 1, axes)
        scale = View("K scale", storage, (blocks,), (width // 4 + 1,), width // 4, 4, ("block",), "scale")
        ranks.append(Rank((data, scale)))
    pieces = [Piece(0, 0, "K data", "K data", to_byte=16 * n, nbytes=16, from_block=n, to_block=0) for n in (0, 1)]
    pieces.append(Piece(0, 0, "K scale", "K scale", nbytes=4, from_block=0, to_block=0))
    result = compare(Transfer((ranks[0],), (ranks[1],), tuple(pieces)))
    assert not result.clean and (result.counts["right"], result.counts["wrong"]) == (64, 8) and not result.repair
    assert result.notes == (
        "An element of K scale stands for 16 tokens at the sender and for 32 tokens at the receiver. A copy of bytes "
        "cannot merge or split them.",
    )


def test_reading_outside_the_memory_is_not_clean():
    rank = Rank((paged("K", 2, 4, 1, 8, step=64),))
    good = Piece(0, 0, "K", "K")
    for byte in (1000, -8):
        result = compare(Transfer((rank,), (rank,), (good, Piece(0, 0, "K", "K", byte, 32, 8))))
        assert not result.clean and result.counts["right"] == 64
        assert result.counts["unreadable"] == (16 if byte == 1000 else 8)
    assert result.first["unreadable"].place == "sender 0 byte -8 of storage s, which has 128 bytes"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"holds": {"token": (3, 2, 1, 0)}},
            "sender 0 holds numbers of 'token', but its views have no such axis; only the axes byte, head",
        ),
        ({"holds": {"haed": (1, 0)}}, "sender 0 holds numbers of 'haed'"),
        ({"views": (paged("K", 8, 0, 2, 16),)}, "of shape (8, 0, 2, 16) has no elements"),
        (
            {"views": (replace(paged("K", 8, 4, 2, 16), read_only=True, stride=(128, 0, 64, 1)),)},
            "two elements of K share",
        ),
        ({"blocks": ()}, "for the same number of tokens"),
    ],
)
def test_ranks_without_a_meaning_are_refused(change, words):
    rank = Rank((paged("K", 8, 4, 2, 16),))
    with pytest.raises(ValueError, match=re.escape(words)):
        compare(Transfer((replace(rank, **change),), (rank,), (Piece(0, 0, "K", "K"),)))


def test_a_transfer_of_nothing_is_refused():
    rank = Rank((paged("K", 8, 4, 2, 16),), blocks=())
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(Transfer((rank,), (rank,), (Piece(0, 0, "K", "K"),)))


def test_many_small_pieces_are_too_much_work():
    ids = tuple(range(n * 7 % 4000, n * 7 % 4000 + 1) for n in range(3000))
    rank = Rank((View("K", Storage("s", 68000), (4000, 16), (17, 1), axes=("block", "byte")),), blocks=ids)
    pieces = tuple(Piece(0, 0, "K", "K", 3, 15 + n % 3, 1) for n in range(600))
    with pytest.raises(TooMuchWorkError, match="units of work"):
        compare(Transfer((rank,), (rank,), pieces))
