"""Tests of copies to host memory and back: all bytes of the blocks, no other byte, in the pieces of the layout."""

import contextlib
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec
from kvviz.engine.block_pool import BlockError, BlockPool
from kvviz.engine.offload import Offloader, TransferError
from kvviz.kernels.runtime import device
from tests.engine.test_block_pool import assert_whole

L, B = 3, 5
PIECES = {
    "NHD": L,
    "HND": L,
    "cross-layer NHD": 1,
    "cross-layer HND": 1,
    "LBHNC": L,
    "LBNHC": L,
    "BLNHC": 1,
    "BLHNC": 1,
}


def filled(layout: str, **more):
    spec = CacheSpec(L, B, 4, 2, 16, "fp8_per_token_head", **more)
    cache = allocate(spec, layout, device())
    torch.manual_seed(1)
    for storage in cache.storages:
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8))
    return cache


def setting(layout: str = "NHD", host_blocks: int = 4, gathered: int = 0, **more):
    cache = filled(layout, **more)
    pool = BlockPool(B)
    return cache, pool, Offloader(cache, pool, host_blocks, gathered=gathered)


def bytes_of_block(cache, block: int) -> dict[str, torch.Tensor]:
    """Return for each storage a mask of the block's K, V and scale bytes, from the views of their owners."""
    masks = {name: torch.zeros(storage.numel(), dtype=torch.bool) for name, storage in cache.storages_by_name().items()}
    for view in cache.owners():
        masks[view.storage.name][torch.from_numpy(view.bytes_of(view.starts[block]).ravel())] = True
    return masks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("gathered", [0, 1, 3])
def test_a_block_comes_back_whole_into_another_and_touches_nothing_else(layout, tail, gathered):
    cache, pool, offloader = setting(layout, tail=tail, gathered=gathered)
    held = pool.allocate(B, "a")
    before = {name: storage.cpu().clone() for name, storage in cache.storages_by_name().items()}
    offloader.store(["x", "y"], [1, 3]).wait()
    offloader.restore(["y", "x"], [0, 4]).wait()
    for name, storage in cache.storages_by_name().items():
        expected = before[name].clone()
        for source, target in ((3, 0), (1, 4)):
            expected[bytes_of_block(cache, target)[name]] = before[name][bytes_of_block(cache, source)[name]]
        assert torch.equal(storage.cpu(), expected)
    assert held and offloader.stored == {"x", "y"} and not pool.in_flight
    if layout in PIECES:
        assert {len(pieces) for pieces in offloader.pieces_of} == {PIECES[layout]}


@pytest.mark.parametrize("count", [0, 2])
def test_a_gathered_transfer_that_fails_midway_is_not_used(count, monkeypatch):
    """The stage has room for two blocks, and the free host slots are not neighbours."""
    cache, pool, offloader = setting(gathered=2)
    offloader.store(["a", "b", "c"], [0, 1, 2]).wait()
    offloader.drop(["b"])
    copy, left = offloader._gatherer.gather, [count]

    def once(*call, **how):
        if not left[0]:
            raise OSError("the link went down")
        left[0] -= 1
        copy(*call, **how)

    monkeypatch.setattr(offloader._gatherer, "gather", once)
    if count:
        offloader.store(["d", "e"], [3, 4]).wait()
        held = pool.allocate(B, "r")
        wanted = cache.storages[0].clone()
        offloader.restore(["e", "d"], [held[4], held[3]]).wait()
        assert torch.equal(cache.storages[0], wanted)
    else:
        with pytest.raises(TransferError, match="failed midway"):
            offloader.store(["d", "e"], [3, 4]).wait()
        assert offloader.stored == {"a", "c"}


def test_padding_stays_behind_and_parts_a_block():
    cache, pool, offloader = setting("cross-layer NHD", page_size_padded=384)
    assert offloader.block_bytes == L * cache.spec.content_page_size_bytes and len(offloader.pieces_of[0]) == L
    whole = Offloader(cache, pool, 1, width_bytes=384)
    assert whole.block_bytes == L * 384 and len(whole.pieces_of[0]) == 1


def test_the_narrow_width_loses_the_end_of_every_page():
    cache = filled("NHD")
    spec, pool = cache.spec, BlockPool(B)
    pool.allocate(B, "a")
    narrow = Offloader(cache, pool, 2, width_bytes=spec.real_page_size_bytes, check_width=False)
    narrow.store(["x"], [1]).wait()
    before = [storage.cpu().clone() for storage in cache.storages]
    narrow.restore(["x"], [2]).wait()
    page = spec.page_size_bytes
    for storage, old in zip(cache.storages, before, strict=True):
        new, kept = storage.cpu()[2 * page : 3 * page], spec.real_page_size_bytes
        assert torch.equal(new[:kept], old[page : page + kept]) and torch.equal(
            new[kept:], old[2 * page + kept : 3 * page]
        )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda c, p, o: o.store("abcde", range(5)),
            r"5 blocks must be stored, but only 4 of the 4 blocks of host memory are free",
        ),
        (lambda c, p, o: o.restore(["never"], [0]), "the block with hash never... was never stored"),
        (
            lambda c, p, o: (o.store("a", [0]).wait(), o.restore("a", [0, 1])),
            "there are 1 hashes for 2 blocks",
        ),
        (
            lambda c, p, o: Offloader(c, p, 1, width_bytes=256),
            "width_bytes is 256, but a page contains 320 bytes of data and scales, so the last 64",
        ),
        (
            lambda c, p, o: Offloader(c, p, 1, width_bytes=500),
            "width_bytes is 500, but it must be 1 to 320, the size of a page",
        ),
        (
            lambda c, p, o: Offloader(filled("BHLNC"), p, 1, width_bytes=256, check_width=False),
            r"width_bytes is 256, but in layout BHLNC a page has \d+ pieces, .*: use width_bytes=320",
        ),
    ],
)
def test_mistakes_are_sentences(call, said):
    with pytest.raises((BlockError, ValueError), match=said):
        call(*setting())


def test_a_host_that_cannot_hold_it():
    cache, pool, _ = setting()
    with pytest.raises(MemoryError, match="cpu has"):
        Offloader(cache, pool, 1 << 40)


def held_back(offloader, monkeypatch) -> threading.Event:
    """Make copies wait until the returned event is set."""
    gate, copy = threading.Event(), offloader._copy_block
    monkeypatch.setattr(offloader, "_copy_block", lambda *call: gate.wait(20) and copy(*call))
    return gate


def test_what_is_in_flight_can_neither_be_freed_nor_moved_again(monkeypatch):
    cache, pool, offloader = setting()
    blocks = pool.allocate(2, "a")
    gate = held_back(offloader, monkeypatch)
    transfer = offloader.store(["x", "y"], blocks)
    with pytest.raises(BlockError, match="in flight"):
        pool.free(blocks, "a")
    with pytest.raises(BlockError, match=r"blocks \[0\] are in flight already"):
        offloader.store(["z"], blocks[:1])
    gate.set()
    transfer.wait()
    transfer.wait()
    pool.free(blocks, "a")
    assert pool.num_free_blocks == B


def fails_after(offloader, monkeypatch, count: int) -> None:
    copy, left = offloader._copy_block, [count]

    def once(*call):
        if not left[0]:
            raise OSError("the link went down")
        left[0] -= 1
        copy(*call)

    monkeypatch.setattr(offloader, "_copy_block", once)


def test_a_restore_that_fails_midway_is_never_found_in_the_prefix_cache(monkeypatch):
    cache, pool, offloader = setting()
    blocks = pool.allocate(3, "a")
    offloader.store(["x", "y"], blocks[:2]).wait()
    pool.free(blocks, "a")
    again = pool.allocate(2, "b")
    fails_after(offloader, monkeypatch, 1)
    with pytest.raises(
        TransferError, match=r"blocks \[3, 4\] back from host memory failed midway \(the link went down\)"
    ):
        offloader.restore(["x", "y"], again).wait()
    pool.free(again, "b")
    assert pool.cached(["x"]) == () and offloader.stored == {"x", "y"} and not pool.in_flight
    monkeypatch.undo()
    offloader.restore(["x", "y"], pool.allocate(2, "c")).wait()
    pool.free((0, 1), "c") if pool._holder.get(0) == "c" else None
    assert len(offloader.stored) == 2


def test_a_store_that_fails_midway_is_not_known_and_loses_nothing(monkeypatch):
    cache, pool, offloader = setting()
    blocks = pool.allocate(3, "a")
    offloader.store(["x"], blocks[:1]).wait()
    kept = offloader.host[offloader._slots["x"]].clone()
    fails_after(offloader, monkeypatch, 1)
    with pytest.raises(TransferError, match="to host memory failed midway"):
        offloader.store(["y", "z"], blocks[1:]).wait()
    assert offloader.stored == {"x"} and torch.equal(offloader.host[offloader._slots["x"]], kept)
    monkeypatch.undo()
    offloader.store(["y", "z"], blocks[1:]).wait()
    offloader.drop(["x"])
    assert offloader.stored == {"y", "z"} and len(offloader._free_slots) == 2


def assert_sound(offloader) -> None:
    """Assert that pool and host memory are consistent, and that exactly the blocks of transfers are in flight."""
    assert_whole(offloader.pool)
    assert sorted([*offloader._slots.values(), *offloader._free_slots]) == list(range(len(offloader.host)))
    moved = {block for transfer in offloader._transfers for block in transfer.blocks}
    assert offloader.pool.in_flight == moved


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda o: o.store(["y"], [B]), "block 5 does not exist: the cache has the blocks 0 to 4"),
        (lambda o: o.store(["y"], [-1]), "block -1 does not exist: the cache has the blocks 0 to 4"),
        (lambda o: o.store(["y"], [True]), "block True does not exist"),
        (lambda o: o.store(["y"], [torch.tensor(1)]), r"block tensor\(1\) does not exist"),
        (lambda o: o.store(["y", "z"], [1]), "there are 2 hashes for 1 block: give one hash per block"),
        (lambda o: o.store(["y", "z"], [1, 1]), "block 1 is named twice"),
        (lambda o: o.store(["y", "y"], [1, 2]), "the hash y... is named twice"),
        (lambda o: o.restore(["x"], [-1]), "block -1 does not exist: the cache has the blocks 0 to 4"),
        (lambda o: o.restore(["x"], [B]), "block 5 does not exist: the cache has the blocks 0 to 4"),
        (lambda o: o.restore(["x", "x"], [1, 1]), "block 1 is named twice"),
        (
            lambda o: o.restore(["x"], [4]),
            "block 4 is kept for the prefix with hash kept..., so it cannot be kept for x... too",
        ),
        (lambda o: o.drop(["x", "never"]), "the block with hash never... was never stored"),
        (lambda o: o.drop(["x", "x"]), "the hash x... is named twice"),
    ],
)
def test_a_hostile_call_moves_nothing_and_loses_nothing(call, said):
    cache, pool, offloader = setting()
    pool.keep(["kept"], [4])
    pool.allocate(2, "a")
    offloader.store(["x"], [0]).wait()
    host, before = offloader.host.clone(), [storage.cpu().clone() for storage in cache.storages]
    with pytest.raises(BlockError, match=said):
        call(offloader).wait()
    assert_sound(offloader)
    assert offloader.stored == {"x"} and torch.equal(offloader.host, host) and pool.cached(["kept"]) == (4,)
    assert all(torch.equal(storage.cpu(), old) for storage, old in zip(cache.storages, before, strict=True))


@pytest.mark.parametrize(
    ("count", "more", "said"),
    [
        (-1, {}, "num_host_blocks is -1, but it must be an integer of at least 0"),
        (1.5, {}, "num_host_blocks is 1.5, but it must be an integer of at least 0"),
        (1, {"width_bytes": 320.0}, "width_bytes is 320.0, but it must be an integer of at least 0"),
        (1, {"width_bytes": -320}, "width_bytes is -320, but it must be an integer of at least 0"),
        (1, {"width_bytes": 0}, "width_bytes is 0, but it must be 1 to 320, the size of a page"),
    ],
)
def test_wrong_sizes_are_refused(count, more, said):
    with pytest.raises(ValueError, match=said):
        Offloader(filled("NHD"), BlockPool(B), count, **more)


def test_numpy_integers_are_blocks_and_sizes():
    cache, pool = filled("NHD"), BlockPool(B)
    offloader = Offloader(cache, pool, np.int64(2), width_bytes=np.int64(320), gathered=np.int64(1))
    offloader.store(["x", "y"], np.array([1, 3])).wait()
    offloader.restore(["y"], np.array([0])).wait()
    assert pool.cached(["y"]) == (0,) and type(pool.cached(["y"])[0]) is int
    assert_sound(offloader)


def test_a_pool_of_another_size():
    with pytest.raises(
        ValueError, match=r"the pool has 6 blocks, but the cache has 5: make the pool with BlockPool\(5\)"
    ):
        Offloader(filled("NHD"), BlockPool(6), 1)


def test_zero_blocks_can_be_moved_and_host_memory_may_have_no_room():
    _, _, offloader = setting(host_blocks=0)
    offloader.store([], []).wait()
    offloader.restore([], []).wait()
    offloader.drop([])
    with pytest.raises(BlockError, match=r"1 block must be stored, but only 0 of the 0 blocks of host memory are free"):
        offloader.store(["x"], [0])
    assert_sound(offloader)


def test_a_block_on_its_way_out_is_not_stored_yet(monkeypatch):
    """The store can still fail. A restore would then read wrong bytes with a right hash."""
    cache, pool, offloader = setting()
    pool.allocate(3, "a")
    gate = held_back(offloader, monkeypatch)
    transfer = offloader.store(["x"], [0])
    assert offloader.stored == frozenset()
    for call in (
        lambda: offloader.restore(["x"], [1]),
        lambda: offloader.store(["x"], [2]),
        lambda: offloader.drop(["x"]),
    ):
        with pytest.raises(BlockError, match="hash x... is (still being copied|in flight).*wait for its"):
            call()
        assert_sound(offloader)
    gate.set()
    transfer.wait()
    assert offloader.stored == {"x"}
    assert_sound(offloader)


def test_room_is_not_given_away_while_it_is_read(monkeypatch):
    cache, pool, offloader = setting(host_blocks=1)
    pool.allocate(3, "a")
    offloader.store(["x"], [0]).wait()
    gate = held_back(offloader, monkeypatch)
    transfer = offloader.restore(["x"], [1])
    with pytest.raises(BlockError, match="hash x... is in flight: wait for its transfer"):
        offloader.drop(["x"])
    gate.set()
    transfer.wait()
    offloader.drop(["x"])
    assert offloader.stored == frozenset()
    assert_sound(offloader)


def test_a_restored_block_that_nobody_holds_is_kept_and_given_to_one_request():
    cache, pool, offloader = setting()
    offloader.store(["x"], [0]).wait()
    offloader.restore(["x"], [3]).wait()
    assert_sound(offloader)
    pool.hold(pool.cached(["x"]), "a")
    assert pool.held_by("a") == (3,) and 3 not in pool.allocate(pool.num_free_blocks, "b")
    assert_sound(offloader)


def test_a_free_block_that_is_being_stored_is_not_given_away(monkeypatch):
    cache, pool, offloader = setting()
    gate = held_back(offloader, monkeypatch)
    transfer = offloader.store(["x"], [0])
    assert 0 not in pool.allocate(pool.num_free_blocks, "a")
    gate.set()
    transfer.wait()
    assert pool.allocate(1, "b") == (0,)
    assert_sound(offloader)


def test_a_transfer_that_failed_says_so_each_time(monkeypatch):
    cache, pool, offloader = setting()
    fails_after(offloader, monkeypatch, 1)
    transfer = offloader.store(["x", "y"], [0, 1])
    for _ in range(2):
        with pytest.raises(TransferError, match="failed midway"):
            transfer.wait()
        assert offloader.stored == frozenset()
        assert_sound(offloader)


@pytest.mark.parametrize("thrown", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_ends_a_copy_ends_the_transfer(thrown, monkeypatch):
    cache, pool, offloader = setting()

    def end(*call):
        raise thrown

    monkeypatch.setattr(offloader, "_copy_block", end)
    with pytest.raises(TransferError, match="failed midway"):
        offloader.store(["x"], [0]).wait()
    assert_sound(offloader)


def test_an_interrupted_wait_can_be_repeated(monkeypatch):
    cache, pool, offloader = setting()
    transfer = offloader.store(["x"], [0])

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for name in ("result", "exception"):
            patch.setattr(Future, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
    assert pool.in_flight == {0} and not offloader.stored
    transfer.wait()
    assert offloader.stored == {"x"}
    assert_sound(offloader)


def test_a_known_block_whose_restore_fails_is_known_no_longer(monkeypatch):
    cache, pool, offloader = setting()
    blocks = pool.allocate(2, "a")
    pool.keep(["x", "y"], blocks)
    offloader.store(["x", "y"], blocks).wait()
    pool.free(blocks[1:], "a")
    fails_after(offloader, monkeypatch, 1)
    with pytest.raises(TransferError, match="failed midway"):
        offloader.restore(["x", "y"], blocks).wait()
    assert pool.cached(["y"]) == () and pool._prefix == {} and offloader.stored == {"x", "y"}
    assert_sound(offloader)


def test_all_transfers_can_be_waited_for(monkeypatch):
    cache, pool, offloader = setting()
    fails_after(offloader, monkeypatch, 1)
    for key, block in (("x", 0), ("y", 1), ("z", 2)):
        offloader.store([key], [block])
    with pytest.raises(TransferError, match=r"blocks \[1\]"):
        offloader.wait_all()
    assert offloader.stored == {"x"} and not pool.in_flight
    offloader.wait_all()
    assert_sound(offloader)


def test_a_gpus_earlier_copies_end_before_their_room_is_given_away(monkeypatch):
    class Stream:
        device, ended = "cuda", False

        def wait_stream(self, other):
            """Do nothing, because no other work was started."""

        def synchronize(self):
            self.ended = True

    cache, pool, offloader = setting()
    offloader._stream = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    fails_after(offloader, monkeypatch, 1)
    with pytest.raises(TransferError):
        offloader.store(["x", "y"], [0, 1]).wait()
    assert offloader._stream.ended
