"""Blocks between the places where a layout scatters them and one contiguous staging buffer on the same device.

A copy to host memory costs a fixed time a piece, and a block of a per-layer cache is at least one piece a layer.
Gathered first, any number of blocks of any layout is one piece.
"""

import math
from collections.abc import Sequence

import torch

from kvviz.kernels.codec import INTERPRETED, LARGEST_TENSOR, launching, tl, triton

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
GPU_BYTES = 4096
"""What one program moves there."""
MOST_PARTS = 65_535
"""Programs in the second axis of a grid, on any GPU: parts of one piece."""


# grid   (ceil(blocks * IN_BLOCK / PIECES), ceil(longest piece / WORDS))
# job    WORDS words of PIECES pieces
# reads  8 bytes of the block list and 24 of the table a piece, and its words
# writes as many words
@triton.jit
def _move_kernel(
    cache_ptr, stage_ptr, table_ptr, block_ptr, num_pieces, block_words,
    IN_BLOCK: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, WORD_BYTES: tl.constexpr, BYTES: tl.constexpr,
    TO_STAGE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS).to(tl.int64)
    real, place = piece < num_pieces, (piece // IN_BLOCK).to(tl.int64)
    block = tl.load(block_ptr + place, mask=real, other=0)
    row = table_ptr + (block * IN_BLOCK + piece % IN_BLOCK) * 3
    start = tl.load(row, mask=real, other=0) // WORD_BYTES
    at = tl.load(row + 1, mask=real, other=0) // WORD_BYTES + place * block_words
    length = tl.load(row + 2, mask=real, other=0) // WORD_BYTES
    inside = word[None, :] < length[:, None]
    cache = tl.multiple_of(cache_ptr + start, [BYTES])[:, None] + word[None, :]
    stage = tl.multiple_of(stage_ptr + at, [BYTES])[:, None] + word[None, :]
    if TO_STAGE:
        tl.store(stage, tl.load(cache, mask=inside), mask=inside)
    else:
        tl.store(cache, tl.load(stage, mask=inside), mask=inside)


class BlockGatherer:
    """Knows where the pieces of every block lie, and moves any blocks through a staging buffer.

    Args:
        storages: the cache's buffers, uint8 ``(nbytes,)`` each, on one device.
        pieces_of: of each block, ``(storage, start, stop, at)``: bytes ``[start, stop)`` of a storage lie at byte
            ``at`` of the gathered block.
        block_bytes: bytes of a gathered block.

    Raises:
        ValueError: no pieces, a stretch outside its storage, or pieces that share bytes of a gathered block or
            leave it.
    """

    def __init__(
        self,
        storages: Sequence[torch.Tensor],
        pieces_of: Sequence[Sequence[tuple[int, int, int, int]]],
        block_bytes: int,
    ) -> None:
        if not pieces_of or not all(pieces_of):
            raise ValueError("a block without pieces: there is nothing to move")
        for pieces in pieces_of:
            _check(storages, pieces, block_bytes)
        base, most = storages[0].data_ptr(), max(map(len, pieces_of))
        rows = torch.zeros(len(pieces_of), most, 3, dtype=torch.int64)
        for block, pieces in enumerate(pieces_of):
            rows[block, : len(pieces)] = torch.tensor(
                [(storages[storage].data_ptr() - base + start, at, stop - start) for storage, start, stop, at in pieces]
            )
        self.storages, self.block_bytes = tuple(storages), block_bytes
        self._rows, self._longest = rows.to(storages[0].device), int(rows[..., 2].max())
        self._unit = math.gcd(16, base, block_bytes, *rows.unique().tolist())

    def gather(self, blocks: torch.Tensor, stage: torch.Tensor, *, blocks_checked: bool = False) -> None:
        """Copy blocks, int64 ``(n,)``, into ``stage``, uint8 ``(n or more, block_bytes)``; both on the cache's device.

        Args:
            blocks_checked: the caller vouches that all are blocks of the cache. Looking at them waits for the GPU.

        Raises:
            ValueError: another shape, dtype or device, a block that the cache does not have, or a piece too large.
        """
        self._move(blocks, stage, blocks_checked, to_stage=True)

    def scatter(self, blocks: torch.Tensor, stage: torch.Tensor, *, blocks_checked: bool = False) -> None:
        """Copy gathered blocks out of ``stage`` to where they lie in the cache; else as :meth:`gather`."""
        self._move(blocks, stage, blocks_checked, to_stage=False)

    def _move(self, blocks: torch.Tensor, stage: torch.Tensor, checked: bool, to_stage: bool) -> None:
        if stage.dtype != torch.uint8 or not stage.is_contiguous() or stage.dim() != 2:
            raise ValueError(f"the stage must be contiguous uint8 (n, {self.block_bytes}), not {tuple(stage.shape)}")
        if stage.shape[1] != self.block_bytes or len(stage) < len(blocks) or blocks.dtype != torch.int64:
            raise ValueError(
                f"{len(blocks)} {blocks.dtype} blocks of {self.block_bytes} bytes do not fit a stage of "
                f"{tuple(stage.shape)}: give int64 numbers, and a row each"
            )
        if blocks.dim() != 1 or not blocks.is_contiguous():
            raise ValueError(f"blocks must be contiguous (n,), not {tuple(blocks.shape)} with stride {blocks.stride()}")
        if {stage.device, blocks.device} != {self._rows.device}:
            raise ValueError(f"stage on {stage.device}, blocks on {blocks.device}, cache on {self._rows.device}")
        if not checked and len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(self._rows):
            raise ValueError(f"blocks {blocks.tolist()} are not all among the cache's 0 to {len(self._rows) - 1}")
        unit = math.gcd(self._unit, stage.data_ptr())
        word, in_block = min(unit, 8), self._rows.shape[1]
        count, num_pieces = self._longest // word, len(blocks) * in_block
        wide = triton.next_power_of_2(count)
        words = min(wide, LARGEST_TENSOR if INTERPRETED else GPU_BYTES // word)
        if (parts := triton.cdiv(count, words)) > MOST_PARTS:
            raise ValueError(
                f"a piece of {self._longest} bytes is {parts} parts for programs, and a GPU takes {MOST_PARTS}: "
                f"give it in pieces of at most {MOST_PARTS * words * word} bytes"
            )
        pieces = min(triton.next_power_of_2(max(num_pieces, 1)), LARGEST_TENSOR // words) if INTERPRETED else 1
        both = (self.storages[0], stage.view(-1))
        cache, staged = (t[: t.numel() // word * word].view(WORD_TYPES[word]) for t in both)
        with launching(stage.device):
            _move_kernel[(triton.cdiv(num_pieces, pieces), parts)](
                cache, staged, self._rows, blocks, num_pieces, self.block_bytes // word, IN_BLOCK=in_block,
                PIECES=pieces, WORDS=words, WORD_BYTES=word, BYTES=unit, TO_STAGE=to_stage,
            )  # fmt: skip


def _check(storages: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int, int, int]], block_bytes: int) -> None:
    end = 0
    for storage, start, stop, at in sorted(pieces, key=lambda piece: piece[3]):
        size = storages[storage].numel()
        if not 0 <= start < stop <= size:
            raise ValueError(f"bytes {start} to {stop} are no stretch of storage {storage}, which has {size}")
        if at < end:
            raise ValueError(f"two pieces lie on byte {at} of a gathered block: give each a place of its own")
        end = at + stop - start
    if end > block_bytes:
        raise ValueError(f"the pieces reach byte {end} of a gathered block, which has {block_bytes}")
