"""Copy cache blocks into one contiguous staging buffer on the same device, and back.

A copy to host memory takes a fixed time per piece, and a block of a per-layer cache has at least one piece per layer.
In a staging buffer, all pieces of all blocks are adjacent. So one copy to host memory is enough.
"""

import math
from collections.abc import Sequence

import torch

from kvviz.kernels.checks import check_device
from kvviz.kernels.codec import INTERPRETED, LARGEST_TENSOR, launching, tl, triton

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""For the size of a word in bytes, the integer type of the word. The kernel copies whole words."""
GPU_BYTES = 4096
"""Number of bytes that one program copies on a GPU."""
MOST_PARTS = 65_535
"""The most programs in the second axis of a grid. All programs of this axis together copy one piece."""


# Grid:   (ceil(blocks * IN_BLOCK / PIECES), ceil(longest piece / WORDS)) programs.
# Work:   One program copies up to WORDS words of each of PIECES pieces.
# Reads:  One program reads for each piece 8 bytes of the block list, 24 bytes of the table, and the words to copy.
# Writes: One program writes the words that it has read.
# Tiles:  The words have shape (PIECES, WORDS). Each number per piece has shape (PIECES,).
@triton.jit
def _move_kernel(
    cache_ptr, stage_ptr, table_ptr, block_ptr, num_pieces, block_words,
    IN_BLOCK: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, WORD_BYTES: tl.constexpr, BYTES: tl.constexpr,
    TO_STAGE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS).to(tl.int64)
    real, place = piece < num_pieces, (piece // IN_BLOCK).to(tl.int64)

    # 1. Look up each piece: `start` in the cache, place `at` in the staging buffer, and `length`, all in words.
    block = tl.load(block_ptr + place, mask=real, other=0)
    row = table_ptr + (block * IN_BLOCK + piece % IN_BLOCK) * 3
    start = tl.load(row, mask=real, other=0) // WORD_BYTES
    at = tl.load(row + 1, mask=real, other=0) // WORD_BYTES + place * block_words
    length = tl.load(row + 2, mask=real, other=0) // WORD_BYTES
    inside = word[None, :] < length[:, None]

    # 2. Copy the words.
    cache = tl.multiple_of(cache_ptr + start, [BYTES])[:, None] + word[None, :]
    stage = tl.multiple_of(stage_ptr + at, [BYTES])[:, None] + word[None, :]
    if TO_STAGE:
        tl.store(stage, tl.load(cache, mask=inside), mask=inside)
    else:
        tl.store(cache, tl.load(stage, mask=inside), mask=inside)


class BlockGatherer:
    """Copies blocks of a cache to a staging buffer and back. A table contains the pieces of every block.

    Args:
        storages: the buffers of the cache. Each buffer is a uint8 tensor of shape ``(nbytes,)``. All buffers are on one
            device.
        pieces_of: for each block, the pieces ``(storage, start, stop, at)`` of the block. ``storage`` is an index into
            ``storages``. The bytes ``[start, stop)`` of this storage are copied to the bytes of the gathered block that
            start at byte ``at``.
        block_bytes: size of a gathered block in bytes.

    Raises:
        ValueError: a block has no pieces. Or a piece does not lie in its storage. Or a piece does not lie in the
            gathered block. Or two pieces overlap in the gathered block.
    """

    def __init__(
        self,
        storages: Sequence[torch.Tensor],
        pieces_of: Sequence[Sequence[tuple[int, int, int, int]]],
        block_bytes: int,
    ) -> None:
        if not pieces_of:
            raise ValueError("pieces_of has 0 blocks: pass the pieces of at least one block")
        for block, pieces in enumerate(pieces_of):
            if not pieces:
                raise ValueError(f"block {block} has 0 pieces: pass at least one piece for each block")
        for number, storage in enumerate(storages):
            check_device(f"storage {number}", storage)
        for pieces in pieces_of:
            _check_pieces(storages, pieces, block_bytes)
        base, most = storages[0].data_ptr(), max(map(len, pieces_of))
        rows = torch.zeros(len(pieces_of), most, 3, dtype=torch.int64)
        for block, pieces in enumerate(pieces_of):
            rows[block, : len(pieces)] = torch.tensor(
                [(storages[storage].data_ptr() - base + start, at, stop - start) for storage, start, stop, at in pieces]
            )
        self.storages, self.block_bytes = tuple(storages), int(block_bytes)
        self._rows, self._longest = rows.to(storages[0].device), int(rows[..., 2].max())
        self._unit = math.gcd(16, base, self.block_bytes, *rows.unique().tolist())

    def gather(self, blocks: torch.Tensor, stage: torch.Tensor, *, blocks_checked: bool = False) -> None:
        """Copy blocks of the cache into a staging buffer.

        Args:
            blocks: the numbers of the blocks, an int64 tensor of shape ``(n,)`` on the device of the cache.
            stage: the staging buffer, a uint8 tensor on the device of the cache. It has at least n rows of
                ``block_bytes`` bytes. Row i receives block ``blocks[i]``.
            blocks_checked: True if the caller has checked that the cache has these blocks. Otherwise this method reads
                and checks the numbers, which waits for the GPU.

        Raises:
            ValueError: a tensor has a wrong shape, dtype or device. Or the cache does not have one of the blocks. Or a
                piece is too large for one launch.
        """
        self._move(blocks, stage, blocks_checked, to_stage=True)

    def scatter(self, blocks: torch.Tensor, stage: torch.Tensor, *, blocks_checked: bool = False) -> None:
        """Copy blocks from a staging buffer back into the cache.

        The arguments and errors are described at :meth:`gather`. Row i of ``stage`` goes to block ``blocks[i]``.
        """
        self._move(blocks, stage, blocks_checked, to_stage=False)

    def _move(self, blocks: torch.Tensor, stage: torch.Tensor, checked: bool, to_stage: bool) -> None:
        self._check_tensors(blocks, stage)
        if not checked:
            self._check_blocks(blocks)
        unit = math.gcd(self._unit, stage.data_ptr())
        word, in_block = min(unit, 8), self._rows.shape[1]
        longest, num_pieces = self._longest // word, len(blocks) * in_block
        words = min(triton.next_power_of_2(longest), LARGEST_TENSOR if INTERPRETED else GPU_BYTES // word)
        if (parts := triton.cdiv(longest, words)) > MOST_PARTS:
            raise ValueError(
                f"a piece of {self._longest} bytes needs {parts} programs, but a launch allows only {MOST_PARTS}: "
                f"divide the piece into pieces of at most {MOST_PARTS * words * word} bytes"
            )
        pieces = min(triton.next_power_of_2(max(num_pieces, 1)), LARGEST_TENSOR // words) if INTERPRETED else 1
        buffers = (self.storages[0], stage.view(-1))
        cache, staged = (t[: t.numel() // word * word].view(WORD_TYPES[word]) for t in buffers)
        with launching(stage.device):
            _move_kernel[(triton.cdiv(num_pieces, pieces), parts)](
                cache, staged, self._rows, blocks, num_pieces, self.block_bytes // word, IN_BLOCK=in_block,
                PIECES=pieces, WORDS=words, WORD_BYTES=word, BYTES=unit, TO_STAGE=to_stage,
            )  # fmt: skip

    def _check_tensors(self, blocks: torch.Tensor, stage: torch.Tensor) -> None:
        for name, tensor, dtype, axes in (("stage", stage, torch.uint8, 2), ("blocks", blocks, torch.int64, 1)):
            if tensor.dtype != dtype:
                raise ValueError(f"{name} has dtype {tensor.dtype}: pass a tensor of dtype {dtype}")
            if tensor.dim() != axes:
                wanted = "2 axes" if axes == 2 else "1 axis"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: pass a tensor with {wanted}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}: pass a contiguous tensor")
            if tensor.device != self._rows.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, but the cache is on {self._rows.device}: move {name} there"
                )
        if stage.shape[1] != self.block_bytes:
            raise ValueError(
                f"stage has rows of {stage.shape[1]} bytes, but a gathered block has {self.block_bytes} bytes: pass a "
                f"stage of shape ({len(blocks)}, {self.block_bytes})"
            )
        if len(stage) < len(blocks):
            raise ValueError(
                f"stage has {len(stage)} rows, but {len(blocks)} blocks are given: pass a stage with one row per block"
            )

    def _check_blocks(self, blocks: torch.Tensor) -> None:
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(self._rows):
            missing = [block for block in blocks.tolist() if not 0 <= block < len(self._rows)]
            raise ValueError(f"blocks {missing} do not exist: the cache has the blocks 0 to {len(self._rows) - 1}")


def _check_pieces(
    storages: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int, int, int]], block_bytes: int
) -> None:
    end = 0
    for storage, start, stop, at in sorted(pieces, key=lambda piece: piece[3]):
        size = storages[storage].numel()
        if not 0 <= start < stop <= size:
            raise ValueError(
                f"a piece from byte {start} to byte {stop} does not lie in storage {storage}: use 0 <= start < stop <= "
                f"{size}, because this storage has {size} bytes"
            )
        if at < 0:
            raise ValueError(f"a piece starts at byte {at} of a gathered block: start at byte 0 or later")
        if at < end:
            raise ValueError(
                f"two pieces overlap at byte {at} of a gathered block: start the second piece at byte {end} or later"
            )
        end = at + stop - start
    if end > block_bytes:
        raise ValueError(
            f"the last piece ends at byte {end} of a gathered block, but block_bytes is {block_bytes}: use a "
            f"block_bytes of at least {end}"
        )
