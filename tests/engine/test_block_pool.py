"""Tests of the block pool: a block has one holder, prefixes are found again, blocks in flight are not handed out."""

import random

import numpy as np
import pytest

from kvviz.engine.block_pool import BlockError, BlockPool, block_hashes


def assert_whole(pool: BlockPool) -> None:
    """Assert that each block is free, held or only kept, and has at most one hash."""
    kept = list(pool._prefix.values())
    assert len(set(kept)) == len(kept)
    only_kept = [block for block in kept if block not in pool._holder]
    assert sorted([*pool._free, *pool._holder, *only_kept]) == list(range(pool.num_blocks))
    assert pool.num_free_blocks == len(({*pool._free, *only_kept}) - pool.in_flight)


def test_hashes_are_of_everything_up_to_a_blocks_end():
    tokens = list(range(50))
    hashes = block_hashes(tokens, 16)
    assert len(hashes) == 3 and len(set(hashes)) == 3
    assert block_hashes(tokens[:40], 16) == hashes[:2] and block_hashes(tokens[:15], 16) == ()
    assert block_hashes([9, *tokens[1:]], 16)[1:] != hashes[1:]


def test_blocks_go_out_once_and_come_back():
    pool = BlockPool(6, order=[5, 2, 0, 1, 3, 4])
    first, second = pool.allocate(2, "a"), pool.allocate(3, "b")
    assert first == (5, 2) and second == (0, 1, 3) and pool.num_free_blocks == 1
    pool.free(first, "a")
    assert pool.num_free_blocks == 3 and set(pool.allocate(3, "c")) == {4, 5, 2}


def test_a_prefix_is_found_until_the_reset():
    pool, keys = BlockPool(4), ("x", "y", "z")
    blocks = pool.allocate(3, "a")
    pool.keep(keys, blocks)
    assert pool.cached(keys) == ()  # still held
    pool.free(blocks, "a")
    assert (
        pool.cached(keys) == blocks and pool.cached(("x", "other", "z")) == blocks[:1] and pool.cached(("y",)) == (1,)
    )
    assert pool.num_free_blocks == 4
    pool.hold(blocks[:2], "b")
    assert pool.num_free_blocks == 2
    pool.free(blocks[:2], "b")
    pool.reset_prefix_cache()
    assert pool.cached(keys) == () and sorted(pool.allocate(4, "c")) == [0, 1, 2, 3]


def test_kept_blocks_are_given_away_when_nothing_else_is_left():
    pool = BlockPool(3)
    blocks = pool.allocate(2, "a")
    pool.keep(("x", "y"), blocks)
    pool.free(blocks, "a")
    assert pool.allocate(2, "b") == (2, 0) and pool.cached(("x",)) == ()


def in_flight() -> BlockPool:
    pool = BlockPool(3)
    pool.keep(("x",), pool.allocate(1, "a"))
    pool.in_flight.add(0)
    return pool


def kept_in_flight() -> BlockPool:
    pool = BlockPool(3)
    pool.keep(("x",), pool.allocate(1, "a"))
    pool.free([0], "a")
    pool.in_flight.add(0)
    return pool


@pytest.mark.parametrize(
    ("pool", "call", "said"),
    [
        (BlockPool(3), lambda p: p.allocate(4, "a"), "request 'a' needs 4 blocks, but the cache has only 3: shorten"),
        (in_flight(), lambda p: p.allocate(3, "b"), "request 'b' needs 3 blocks, but only 2 of 3 blocks are free"),
        (in_flight(), lambda p: p.free([0], "a"), "block 0 is in flight: wait for its transfer"),
        (in_flight(), lambda p: p.free([1], "a"), "request 'a' cannot free block 1, because nobody holds this block"),
        (
            in_flight(),
            lambda p: p.free([0], "b"),
            "request 'b' cannot free block 0, because request 'a' holds this block",
        ),
        (
            in_flight(),
            lambda p: p.hold([0], "b"),
            "block 0 is held by request 'a', so request 'b' cannot use it",
        ),
        (kept_in_flight(), lambda p: p.reset_prefix_cache(), r"blocks \[0\] are in flight"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(pool, call, said):
    free = pool.num_free_blocks
    with pytest.raises(BlockError, match=said):
        call(pool)
    assert pool.num_free_blocks == free


def test_an_order_must_name_each_block_once():
    with pytest.raises(BlockError, match="each of the blocks 0 to 2 once"):
        BlockPool(3, order=[0, 0, 1])


def kept() -> BlockPool:
    """Return a pool in which blocks 0 and 1 are kept, 2 is held, 3 and 4 are free."""
    pool = BlockPool(5)
    pool.keep(("x", "y"), pool.allocate(2, "a"))
    pool.allocate(1, "b")
    pool.free((0, 1), "a")
    return pool


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda p: p.allocate(-1, "c"),
            "request 'c' asks for -1 blocks, but this number must be an integer of at least 0",
        ),
        (lambda p: p.allocate(1.5, "c"), "request 'c' asks for 1.5 blocks"),
        (lambda p: p.allocate(True, "c"), "request 'c' asks for True blocks"),
        (
            lambda p: p.allocate(5, "c"),
            "request 'c' needs 5 blocks, but only 4 of 5 blocks are free: wait until another",
        ),
        (lambda p: p.hold([0, 3], "c"), "block 3 is not kept for a prefix, so request 'c' cannot hold it"),
        (lambda p: p.hold(iter([0, 2]), "c"), "block 2 is held by request 'b'"),
        (lambda p: p.hold([0, 7], "c"), "block 7 does not exist: the cache has the blocks 0 to 4"),
        (lambda p: p.hold([0, 0], "c"), "block 0 is named twice"),
        (lambda p: p.free([2, 2], "b"), "block 2 is named twice"),
        (lambda p: p.free([2, -1], "b"), "block -1 does not exist: the cache has the blocks 0 to 4"),
        (lambda p: p.free([3], None), "request None cannot free block 3, because nobody holds this block"),
        (lambda p: p.keep(["z", "w"], [2]), "there are 2 hashes for 1 block: give one hash per block"),
        (lambda p: p.keep(["z", "w"], [2, 2]), "block 2 is named twice"),
        (
            lambda p: p.keep(["z", "w"], [2, 0]),
            "block 0 is kept for the prefix with hash x..., so it cannot be kept for w... too",
        ),
        (lambda p: p.keep(["z"], [5]), "block 5 does not exist: the cache has the blocks 0 to 4"),
    ],
)
def test_a_hostile_call_changes_nothing(call, said):
    pool = kept()
    before = [list(pool._free), dict(pool._holder), dict(pool._prefix)]
    with pytest.raises(BlockError, match=said):
        call(pool)
    assert [list(pool._free), dict(pool._holder), dict(pool._prefix)] == before
    assert_whole(pool)


def test_zero_blocks_can_be_allocated_and_freed():
    pool = kept()
    assert pool.allocate(0, "c") == () and pool.cached(()) == ()
    for call in (pool.free, pool.hold):
        call((), "c")
    pool.keep((), ())
    assert_whole(pool)


def test_an_iterator_of_blocks_is_held():
    pool = kept()
    pool.hold(iter([0, 1]), "c")
    assert pool.held_by("c") == (0, 1)
    assert_whole(pool)


def test_a_free_block_that_is_kept_is_given_to_one_request():
    pool = BlockPool(3)
    pool.keep(["x"], [1])
    assert_whole(pool)
    pool.hold(pool.cached(["x"]), "a")
    assert pool.num_free_blocks == 2 and pool.allocate(2, "b") == (0, 2)
    assert_whole(pool)


def test_a_free_block_in_flight_is_not_given_away():
    pool = BlockPool(3)
    pool.in_flight.add(1)
    assert pool.num_free_blocks == 2 and pool.allocate(2, "a") == (0, 2)
    with pytest.raises(BlockError, match="needs 1 block, but only 0 of 3 blocks are free"):
        pool.allocate(1, "b")
    pool.in_flight.clear()
    assert pool.allocate(1, "b") == (1,)
    assert_whole(pool)


def test_a_kept_block_in_flight_is_neither_held_nor_forgotten():
    pool = kept_in_flight()
    for call in (lambda: pool.hold([0], "b"), pool.reset_prefix_cache):
        with pytest.raises(BlockError, match="in flight"):
            call()
        assert_whole(pool)


def test_nothing_is_reset_while_a_held_block_is_in_flight():
    pool = in_flight()
    with pytest.raises(BlockError, match=r"blocks \[0\] are in flight"):
        pool.reset_prefix_cache()
    assert pool._prefix == {"x": 0}


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3"])
def test_a_pool_must_have_a_block(count):
    with pytest.raises(BlockError, match="num_blocks must be an integer of at least 1"):
        BlockPool(count)


@pytest.mark.parametrize(
    ("tokens", "size", "said"),
    [
        ([1, -2], 1, "token 1 is -2, but a token id must be an integer of at least 0"),
        ([1.5, 2], 1, "token 0 is 1.5"),
        ([1, 2], 0, "block_size is 0, but it must be at least 1"),
        ([1, 2], -2, "block_size is -2, but it must be at least 1"),
    ],
)
def test_tokens_without_a_hash(tokens, size, said):
    with pytest.raises(ValueError, match=said):
        block_hashes(tokens, size)


def test_numpy_integers_are_integers():
    pool, three = BlockPool(np.int64(3), order=np.array([2, 0, 1])), np.int32(3)
    blocks = pool.allocate(three, "a")
    assert blocks == (2, 0, 1) and {type(block) for block in (*blocks, pool.num_blocks)} == {int}
    pool.keep(("x",), np.array([2]))
    pool.free(np.array([0, 2]), "a")
    pool.hold(np.array([2]), "b")
    assert pool.held_by("b") == (2,) and type(pool.held_by("b")[0]) is int
    assert block_hashes(np.array([1, 2, 3]), 2) == block_hashes([1, 2, 3], 2)
    for block in (np.int64(3), np.int64(-1), np.float64(1), np.bool_(True)):
        with pytest.raises(BlockError, match="does not exist"):
            pool.check([block])
    assert_whole(pool)


def test_any_order_of_calls_leaves_the_pool_whole():
    lot, pool = random.Random(7), BlockPool(6)
    refused = 0
    for step in range(4000):
        blocks = [lot.randrange(-1, 7) for _ in range(lot.randrange(4))]
        name, count = lot.choice("ab"), lot.randrange(-1, 4)
        keys = [lot.choice("uvwxyz") for _ in blocks[: lot.randrange(1, 5)]]
        calls = [
            lambda n=count, r=name: pool.allocate(n, r),
            lambda b=blocks, r=name: pool.hold(b, r),
            lambda b=blocks, r=name: pool.free(b, r),
            lambda b=blocks, k=keys: pool.keep(k, b),
            lambda k=keys, r=name: pool.hold(pool.cached(k), r),
            lambda r=name: pool.free(pool.held_by(r), r),
            lambda b=blocks: pool.in_flight.update({*b} & {*range(6)}),
            pool.in_flight.clear,
            lambda b=blocks: [pool.forget(block) for block in b],
        ]
        try:
            lot.choice(calls if step % 50 else [pool.reset_prefix_cache])()
        except BlockError:
            refused += 1
        assert_whole(pool)
    assert 500 < refused < 3500
