"""Test that the kernel copies blocks in pieces into a staging buffer and back."""

import numpy as np
import pytest
import torch

from kvviz.kernels.gather import BlockGatherer
from kvviz.kernels.runtime import device

DEVICE = device()


def buffers(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).to(DEVICE) for size in sizes]


def int64(*numbers):
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16, 48])
def test_blocks_in_pieces_of_several_storages_come_and_go(unit):
    """The blocks have one, two or three pieces; three of the four blocks are copied, in another order."""
    storages = buffers(100 * unit, 64 * unit, 1000 * unit)
    pieces_of = [
        [(2, 10, 700, 0), (0, 0, 1, 690), (1, 3, 64, 700)],
        [(0, 50, 100, 800)],
        [(0, 1, 50, 0)],
        [(2, 999, 1000, 691), (1, 0, 3, 3)],
    ]
    pieces_of = [[(s, *(n * unit for n in numbers)) for s, *numbers in pieces] for pieces in pieces_of]
    gatherer = BlockGatherer(storages, pieces_of, 850 * unit)
    stage = torch.zeros(4, 850 * unit, dtype=torch.uint8, device=DEVICE)
    gatherer.gather(int64(3, 0, 1), stage)
    want = torch.zeros_like(stage)
    for row, block in enumerate((3, 0, 1)):
        for storage, start, stop, at in pieces_of[block]:
            want[row, at : at + stop - start] = storages[storage][start:stop]
    assert torch.equal(stage, want)
    before = [storage.clone() for storage in storages]
    gatherer.scatter(int64(3, 0, 1), 255 - stage)
    for block in (3, 0, 1):
        for storage, start, stop, _ in pieces_of[block]:
            before[storage][start:stop] = 255 - before[storage][start:stop]
    assert all(torch.equal(*pair) for pair in zip(before, storages, strict=True))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "block 1 has 0 pieces"),
        ([(0, 4, 4, 0)], "from byte 4 to byte 4 does not lie in storage 0: .* this storage has 64 bytes"),
        ([(0, 60, 65, 0)], "from byte 60 to byte 65 does not lie in storage 0: use 0 <= start < stop <= 64"),
        ([(0, -1, 5, 0)], "from byte -1 to byte 5"),
        ([(0, 0, 8, -1)], "a piece starts at byte -1 of a gathered block: start at byte 0 or later"),
        ([(0, 0, 8, 0), (0, 8, 16, 7)], "two pieces overlap at byte 7 .*: start the second piece at byte 8"),
        (
            [(0, 0, 32, 1)],
            "ends at byte 33 of a gathered block, but block_bytes is 32: use a block_bytes of at least 33",
        ),
    ],
)
def test_tables_that_cannot_be(pieces, message):
    with pytest.raises(ValueError, match=message):
        BlockGatherer(buffers(64), [[(0, 0, 32, 0)], pieces], 32)


def test_a_table_without_blocks():
    with pytest.raises(ValueError, match="pieces_of has 0 blocks"):
        BlockGatherer(buffers(64), [], 32)


def test_stages_and_blocks_that_do_not_fit():
    gatherer = BlockGatherer(buffers(64), [[(0, 0, 32, 0)]], 32)
    one = torch.zeros(1, 32, dtype=torch.uint8, device=DEVICE)
    wrong = [
        (int64(0), one[0], r"stage has shape \(32,\): pass a tensor with 2 axes"),
        (int64(0), one.float(), "stage has dtype torch.float32: pass a tensor of dtype torch.uint8"),
        (int64(0), torch.cat([one, one], 1)[:, ::2], r"stage has strides \(64, 2\): pass a contiguous tensor"),
        (int64(0), one[:, :31].contiguous(), "rows of 31 bytes, but a gathered block has 32 bytes"),
        (int64(0, 0), one, "stage has 1 rows, but 2 blocks are given"),
        (int64(0).int(), one, "blocks has dtype torch.int32: pass a tensor of dtype torch.int64"),
    ]
    for blocks, stage, message in wrong:
        with pytest.raises(ValueError, match=message):
            gatherer.gather(blocks, stage)


def test_pieces_larger_than_one_program():
    storages = buffers(3 << 20)
    gatherer = BlockGatherer(storages, [[(0, 1, (2 << 20) + 2, 5)]], (2 << 20) + 6)
    stage = torch.zeros(1, (2 << 20) + 6, dtype=torch.uint8, device=DEVICE)
    gatherer.gather(int64(0), stage)
    assert torch.equal(stage[0, 5:], storages[0][1 : (2 << 20) + 2]) and not stage[0, :5].any()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 2], r"blocks \[2\] do not exist: the cache has the blocks 0 to 1"),
        ([-1, 0], r"blocks \[-1\] do not exist"),
    ],
)
def test_blocks_that_the_cache_does_not_have(blocks, message):
    gatherer = BlockGatherer(buffers(64), [[(0, 0, 32, 0)], [(0, 32, 64, 0)]], 32)
    stage = torch.zeros(2, 32, dtype=torch.uint8, device=DEVICE)
    for move in (gatherer.gather, gatherer.scatter):
        with pytest.raises(ValueError, match=message):
            move(int64(*blocks), stage)


def test_lists_of_blocks_with_steps_are_refused():
    gatherer = BlockGatherer(buffers(64), [[(0, 0, 32, 0)], [(0, 32, 64, 0)]], 32)
    stage = torch.zeros(2, 32, dtype=torch.uint8, device=DEVICE)
    wrong = [
        (int64(0, 1, 1, 0)[::2], r"blocks has strides \(2,\): pass a contiguous tensor"),
        (int64(0, 1).view(2, 1), r"blocks has shape \(2, 1\): pass a tensor with 1 axis"),
    ]
    for blocks, message in wrong:
        with pytest.raises(ValueError, match=message):
            gatherer.gather(blocks, stage)


def test_a_piece_of_too_many_parts_is_refused(monkeypatch):
    gatherer = BlockGatherer(buffers(70_001), [[(0, 1, 70_000, 0)]], 70_001)
    monkeypatch.setattr("kvviz.kernels.gather.LARGEST_TENSOR", 1)
    monkeypatch.setattr("kvviz.kernels.gather.GPU_BYTES", 1)
    with pytest.raises(ValueError, match="a piece of 69999 bytes needs 69999 programs, .* at most 65535 bytes"):
        gatherer.gather(int64(0), torch.zeros(1, 70_001, dtype=torch.uint8, device=DEVICE))


def test_meta_tensors_are_refused():
    meta = torch.zeros(64, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="storage 0 is a meta tensor, which has no memory"):
        BlockGatherer([meta], [[(0, 0, 32, 0)]], 32)
    gatherer = BlockGatherer(buffers(64), [[(0, 0, 32, 0)]], 32)
    with pytest.raises(ValueError, match="stage is on meta"):
        gatherer.gather(int64(0), torch.zeros(1, 32, dtype=torch.uint8, device="meta"))


def test_numbers_may_be_numpy_integers():
    storages, pieces = buffers(64), [[tuple(np.array([0, 8, 24, 16]))]]
    stage = torch.zeros(1, 32, dtype=torch.uint8, device=DEVICE)
    BlockGatherer(storages, pieces, np.int64(32)).gather(int64(0), stage)
    assert torch.equal(stage[0, 16:], storages[0][8:24]) and not stage[0, :16].any()
