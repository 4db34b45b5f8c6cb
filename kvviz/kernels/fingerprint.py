"""Fingerprints of memory: 8 bytes say whether 2,048 bytes have changed.

The kernel reads all chunks once. It computes the fingerprint of each chunk, compares it with the fingerprint of the
last time, and stores the new one. So the extra memory is 9 bytes per chunk, which is 0.44 %. A change is missed with a
probability of about 2**-64 per changed chunk.
"""

import numpy as np
import torch

from kvviz.kernels.codec import INTERPRETED, launching, tl, triton

CHUNK_BYTES = 2048
GPU_CHUNKS, CPU_CHUNKS = 16, 256
"""Number of chunks that one program reads. The interpreter needs few, large programs."""
GPU_WARPS = 2
"""Number of warps of one program on a GPU."""


# Grid:   (ceil(chunks / CHUNKS),) programs.
# Work:   One program computes the fingerprints of CHUNKS chunks of WORDS words.
# Reads:  One program reads the words of its chunks, and 8 bytes per chunk.
# Writes: One program writes 9 bytes per chunk.
@triton.jit
def _fingerprint_kernel(word_ptr, print_ptr, changed_ptr, num_chunks, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    real, place = chunk < num_chunks, tl.arange(0, WORDS).to(tl.uint32)[None, :]
    at = word_ptr + chunk[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    x = tl.load(at, mask=real[:, None], other=0).to(tl.uint32, bitcast=True)

    # 1. Mix the bits of each word. Each place in the chunk mixes in its own way, so an exchange of words is seen.
    x += place * 0x2C1B3C6D
    x = (x ^ (x >> 16)) * 0x297A2D39
    x = (x ^ (x >> 15)) * 0x1B873593

    # 2. Add all words in two ways. Each sum has 32 bits.
    low = tl.sum(x, axis=1).to(tl.int64) & 0xFFFFFFFF
    high = tl.sum(x * (place * 2 + 1), axis=1).to(tl.int64) & 0x7FFFFFFF
    now = (high << 32) | low

    # 3. Compare with the last time.
    before = tl.load(print_ptr + chunk, mask=real, other=0)
    tl.store(changed_ptr + chunk, (now != before).to(tl.uint8), mask=real)
    tl.store(print_ptr + chunk, now, mask=real)


class Fingerprints:
    """The fingerprints of one memory.

    Args:
        flat: all bytes of the memory: a uint8 tensor of shape (nbytes,). Its address is a multiple of 4.

    Raises:
        ValueError: kernels run on another device than the memory.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        if flat.is_cuda == INTERPRETED.value:
            runs = "in the interpreter on cpu" if INTERPRETED.value else "on the GPU"
            raise ValueError(
                f"the memory is on {flat.device}, but kernels of this process run {runs}: use watch(..., exact=True)"
            )
        num_chunks = flat.numel() // CHUNK_BYTES
        self._prints = torch.zeros(num_chunks, dtype=torch.int64, device=flat.device)
        self._changed = torch.zeros(num_chunks, dtype=torch.uint8, device=flat.device)
        self._tail = flat[num_chunks * CHUNK_BYTES :].clone()  # shorter than a chunk, so it is copied
        self.update(flat)

    @property
    def nbytes(self) -> int:
        """Return the extra memory in bytes."""
        return self._prints.numel() * 9 + self._tail.numel()

    def update(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute all fingerprints. Return for each chunk 1 if its fingerprint is new, and otherwise 0."""
        num_chunks = len(self._prints)
        if num_chunks:
            words = flat[: num_chunks * CHUNK_BYTES].view(torch.int32)
            chunks = CPU_CHUNKS if INTERPRETED.value else GPU_CHUNKS
            with launching(flat.device):
                _fingerprint_kernel[(triton.cdiv(num_chunks, chunks),)](
                    words,
                    self._prints,
                    self._changed,
                    num_chunks,
                    CHUNKS=chunks,
                    WORDS=CHUNK_BYTES // 4,
                    num_warps=GPU_WARPS,
                )
        return self._changed

    def changed_bytes(self, flat: torch.Tensor) -> np.ndarray:
        """Return all bytes of the chunks whose fingerprints are new, in ascending order. Update the fingerprints."""
        chunks = torch.nonzero(self.update(flat))[:, 0].cpu().numpy()
        at = (chunks[:, None] * CHUNK_BYTES + np.arange(CHUNK_BYTES)).ravel()
        start = len(self._prints) * CHUNK_BYTES
        tail = torch.nonzero(flat[start:] != self._tail)[:, 0].cpu().numpy() + start
        self._tail.copy_(flat[start:])
        return np.concatenate([at, tail])
