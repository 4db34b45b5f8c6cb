"""Block ids: each has one holder, prefixes are found again, and what is in flight stays where it is."""

import pytest

from kvviz.engine.blocks import BlockError, BlockPool, block_hashes


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
        (BlockPool(3), lambda p: p.allocate(4, "a"), "request 'a' needs 4 blocks and 3 of 3 are free"),
        (in_flight(), lambda p: p.free([0], "a"), "block 0 is in flight: wait for its transfer"),
        (in_flight(), lambda p: p.free([1], "a"), "request 'a' frees block 1, which nobody holds"),
        (in_flight(), lambda p: p.free([0], "b"), "request 'b' frees block 0, which request 'a' holds"),
        (in_flight(), lambda p: p.hold([0], "b"), "block 0 is held by request 'a': request 'b' would write the same"),
        (kept_in_flight(), lambda p: p.reset_prefix_cache(), r"blocks \[0\] are in flight"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(pool, call, said):
    free = pool.num_free_blocks
    with pytest.raises(BlockError, match=said):
        call(pool)
    assert pool.num_free_blocks == free


def test_an_order_that_is_none():
    with pytest.raises(BlockError, match="each of the blocks 0 to 2 once"):
        BlockPool(3, order=[0, 0, 1])
