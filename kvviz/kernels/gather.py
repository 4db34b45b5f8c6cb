"""Copy scattered cache blocks into one contiguous staging buffer on the same device, and back.

A copy to host memory takes a fixed time per piece, and a block of a per-layer cache has at least one piece per layer.
If the blocks are gathered first, any number of blocks is one piece, in every layout.
"""

import math
from collections.abc import Sequence

import torch

from kvviz.kernels.checks import check_device
from kvviz.kernels.codec import INTERPRETED, LARGEST_TENSOR, launching, tl, triton

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The integer type of each word size in bytes. The kernel copies whole words."""
GPU_BYTES = 4096
"""Bytes that one program copies on a GPU."""
MOST_PARTS = 65_535
"""Most programs in the second axis of a grid, on any GPU. One piece is copied by the programs of this axis."""


# Grid:   (ceil(blocks * IN_BLOCK / PIECES), ceil(longest piece / WORDS)) programs.
# Work:   One program copies WORDS words of each of PIECES pieces.
# Reads:  For each piece, 8 bytes of the block list, 24 bytes of the table, and the words of the piece.
# Writes: The same number of words.
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

    # 1. Look up each piece: where it starts in the cache, where it starts in the staging buffer, and its length.
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
    """Copy blocks of a cache to a staging buffer and back, from a table of the pieces of every block.

    Args:
        storages: the buffers of the cache, uint8 ``(nbytes,)`` each, on one device.
        pieces_of: for each block, its pieces ``(storage, start, stop, at)``: bytes ``[start, stop)`` of the storage
            go to byte ``at`` of the gathered block.
        block_bytes: bytes of a gathered block.

    Raises:
        ValueError: a block has no pieces, a piece lies outside its storage, or pieces overlap in the gathered block or
            reach beyond its end.
    """

    def __init__(
        self,
        storages: Sequence[torch.Tensor],
        pieces_of: Sequence[Sequence[tuple[int, int, int, int]]],
        block_bytes: int,
    ) -> None:
        if not pieces_of or not all(pieces_of):
            raise ValueError("a block has no pieces: pass at least one block, and at least one piece per block")
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
            blocks: block numbers, int64 ``(n,)``, on the cache's device.
            stage: uint8 ``(n or more, block_bytes)``, on the cache's device. Row i receives block ``blocks[i]``.
            blocks_checked: True if the caller has checked that the cache has these blocks. Otherwise the numbers are
                read and checked here, which waits for the GPU.

        Raises:
            ValueError: a wrong shape, dtype or device, a block that the cache does not have, or a piece that is too
                large for one launch.
        """
        self._move(blocks, stage, blocks_checked, to_stage=True)

    def scatter(self, blocks: torch.Tensor, stage: torch.Tensor, *, blocks_checked: bool = False) -> None:
        """Copy blocks from a staging buffer back into the cache. Arguments and errors are those of :meth:`gather`."""
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
                f"a piece of {self._longest} bytes needs {parts} programs, but a GPU allows {MOST_PARTS}: "
                f"split it into pieces of at most {MOST_PARTS * words * word} bytes"
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
        if stage.dtype != torch.uint8 or not stage.is_contiguous() or stage.dim() != 2:
            raise ValueError(
                f"stage must be contiguous uint8 of shape (n, {self.block_bytes}), "
                f"not {stage.dtype} of shape {tuple(stage.shape)} with strides {stage.stride()}"
            )
        if stage.shape[1] != self.block_bytes or len(stage) < len(blocks) or blocks.dtype != torch.int64:
            raise ValueError(
                f"{len(blocks)} blocks ({blocks.dtype}) of {self.block_bytes} bytes do not fit into a stage of shape "
                f"{tuple(stage.shape)}: pass int64 block numbers, and one row of {self.block_bytes} bytes per block"
            )
        if blocks.dim() != 1 or not blocks.is_contiguous():
            raise ValueError(
                f"blocks must be contiguous of shape (n,), not of shape {tuple(blocks.shape)} with strides "
                f"{blocks.stride()}"
            )
        if {stage.device, blocks.device} != {self._rows.device}:
            raise ValueError(
                f"stage is on {stage.device} and blocks are on {blocks.device}, but the cache is on "
                f"{self._rows.device}: move them there first"
            )

    def _check_blocks(self, blocks: torch.Tensor) -> None:
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(self._rows):
            missing = [block for block in blocks.tolist() if not 0 <= block < len(self._rows)]
            raise ValueError(f"the cache does not have blocks {missing}: its blocks are 0 to {len(self._rows) - 1}")


def _check_pieces(
    storages: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int, int, int]], block_bytes: int
) -> None:
    end = 0
    for storage, start, stop, at in sorted(pieces, key=lambda piece: piece[3]):
        size = storages[storage].numel()
        if not 0 <= start < stop <= size:
            raise ValueError(
                f"a piece of bytes {start} to {stop} does not lie in storage {storage}, which has {size} bytes"
            )
        if at < 0:
            raise ValueError(f"a piece goes to byte {at} of a gathered block: the first byte is 0")
        if at < end:
            raise ValueError(f"two pieces go to byte {at} of a gathered block: give each piece bytes of its own")
        end = at + stop - start
    if end > block_bytes:
        raise ValueError(
            f"the pieces reach byte {end} of a gathered block, but it has {block_bytes} bytes: make block_bytes larger"
        )
