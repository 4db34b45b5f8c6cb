"""Measures how fast fingerprints read memory: python benchmarks/fingerprints.py [--gb 100] [--tiles 2x4,4x4]

The script needs an NVIDIA GPU. It fills memory with random bytes, and measures three passes over all of it: a kernel
that only reads (the *read ceiling*), the fingerprints of ``kvviz.trace.watch``, and a copy and comparison of a part of
the memory. Each time is the median of some passes. Before that, the script checks that fingerprints find a changed bit.

The option ``--tiles`` measures the fingerprints with other numbers of chunks and warps per program, as CHUNKSxWARPS.
The output is JSON. Times are milliseconds, and speeds are GB/s, where 1 GB is 1e9 bytes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from kvviz.kernels import fingerprint
from kvviz.kernels.codec import tl, triton
from kvviz.kernels.fingerprint import CHUNK_BYTES, Fingerprints
from kvviz.kernels.runtime import device

PASSES = 9
"""The number of passes of which the median time is taken."""
TILE = 8192
"""Number of words that one program of the read ceiling reads."""


# Grid:   (words / TILE,) programs.
# Work:   One program adds TILE words.
# Reads:  One program reads TILE words.
# Writes: One program writes one word.
@triton.jit
def _read_kernel(word_ptr, sum_ptr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    words = tl.load(word_ptr + program * TILE + tl.arange(0, TILE))
    tl.store(sum_ptr + program, tl.sum(words))


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a pass. The first two passes do not count."""
    times = []
    for _ in range(PASSES + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def row(what: str, nbytes: int, call: Callable[[], object]) -> dict:
    """Measure a pass over ``nbytes`` bytes, and return its row of the output."""
    time = milliseconds(call)
    return {"what": what, "ms": round(time, 2), "gb_per_s": round(nbytes / time / 1e6)}


def measure(num_bytes: int, tiles: list[tuple[int, int]]) -> dict:
    """Measure everything, and return the output."""
    flat = torch.empty(num_bytes // (4 * TILE) * (4 * TILE), dtype=torch.uint8, device=device())
    words = flat.view(torch.int32)
    words.random_()
    sums = torch.empty(len(words) // TILE, dtype=torch.int32, device=flat.device)
    rows = [row("read only", flat.numel(), lambda: _read_kernel[(len(sums),)](words, sums, TILE=TILE, num_warps=8))]
    prints = Fingerprints(flat)
    flat[flat.numel() // 2 + 1] ^= 4
    if prints.update(flat).sum() != 1 or prints.update(flat).any():
        raise RuntimeError("the fingerprints did not find the changed bit")
    rows.append(row("fingerprints", flat.numel(), lambda: prints.update(flat)))
    for chunks, warps in tiles:
        fingerprint.GPU_CHUNKS, fingerprint.GPU_WARPS = chunks, warps
        rows.append(row(f"fingerprints {chunks}x{warps}", flat.numel(), lambda: prints.update(flat)))
    part = flat[: flat.numel() // 16]
    copied = part.clone()
    rows.append(row("copy and comparison", part.numel(), lambda: (part != copied).any()))
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bytes": flat.numel(),
        "chunk_bytes": CHUNK_BYTES,
        "extra_memory": prints.nbytes / flat.numel(),
        "share_of_read": rows[1]["gb_per_s"] / rows[0]["gb_per_s"],
        "rows": rows,
    }


def main() -> int:
    """Print JSON, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=100.0, help="GB of memory to read")
    parser.add_argument("--tiles", default="", help="for example 2x4,8x8")
    given = parser.parse_args()
    if device().type != "cuda":
        print("benchmarks/fingerprints.py needs an NVIDIA GPU", file=sys.stderr)
        return 2
    tiles = [tuple(map(int, one.split("x"))) for one in given.tiles.split(",") if one]
    print(json.dumps(measure(int(given.gb * 1e9), tiles)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
