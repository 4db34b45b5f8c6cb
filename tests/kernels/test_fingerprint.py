"""Fingerprints change with every change of their chunk."""

import numpy as np
import pytest
import torch

from kvviz.kernels.fingerprint import CHUNK_BYTES, Fingerprints
from kvviz.kernels.runtime import device


def memory(chunks: int, more: int = 0) -> torch.Tensor:
    lot = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (chunks * CHUNK_BYTES + more,), dtype=torch.uint8, generator=lot).to(device())


def reference(words: np.ndarray) -> np.ndarray:
    """Compute the fingerprints of chunks of words, shape (chunks, 512), with plain numpy."""
    place = np.arange(words.shape[1], dtype=np.uint32)
    x = words + place * np.uint32(0x2C1B3C6D)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x297A2D39)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x1B873593)
    low = x.sum(1, dtype=np.uint32).astype(np.int64)
    high = (x * (place * np.uint32(2) + np.uint32(1))).sum(1, dtype=np.uint32).astype(np.int64)
    return (high & 0x7FFFFFFF) << 32 | low


def test_the_kernel_computes_what_numpy_computes():
    flat = memory(300)
    words = flat.cpu().numpy().view(np.uint32).reshape(300, -1)
    assert Fingerprints(flat)._prints.cpu().numpy().tolist() == reference(words).tolist()


def test_only_changed_chunks_are_named_and_only_once():
    flat = memory(5, 100)
    prints = Fingerprints(flat)
    flat[2 * CHUNK_BYTES + 7] ^= 1
    flat[-1] ^= 1
    expected = [*range(2 * CHUNK_BYTES, 3 * CHUNK_BYTES), 5 * CHUNK_BYTES + 99]
    assert prints.changed_bytes(flat).tolist() == expected
    assert len(prints.changed_bytes(flat)) == 0


@pytest.mark.parametrize("change", ["each bit", "two signs", "two words exchanged", "two chunks exchanged"])
def test_small_changes_are_seen(change):
    """Sums of products would miss two equal changes of the highest bits."""
    flat = memory(256)
    chunks, prints = flat.view(-1, CHUNK_BYTES), Fingerprints(flat)
    rows = torch.arange(256)
    if change == "each bit":
        chunks[rows, (rows * 37) % CHUNK_BYTES] ^= (1 << (rows % 8)).to(torch.uint8).to(flat.device)
    elif change == "two signs":
        chunks[:, 3] ^= 128
        chunks[rows, 7 + rows // 2 * 4] ^= 128
    elif change == "two words exchanged":
        chunks[:, :8] = chunks[:, [4, 5, 6, 7, 0, 1, 2, 3]]
    else:
        chunks[:] = chunks.flip(0)
    assert len(prints.changed_bytes(flat)) == flat.numel()


def test_the_extra_memory_is_at_most_half_a_percent():
    flat = memory(1000)
    assert Fingerprints(flat).nbytes <= 0.005 * flat.numel()


def test_memory_on_the_wrong_device_is_an_error():
    if device().type == "cuda":
        with pytest.raises(ValueError, match="the memory is on cpu, but kernels of this process run on the GPU"):
            Fingerprints(torch.zeros(4, dtype=torch.uint8))
    else:
        assert Fingerprints(torch.zeros(4, dtype=torch.uint8)).nbytes == 4
