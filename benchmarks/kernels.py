"""Compare the kernels with the speed of a large copy: python benchmarks/kernels.py [--out FILE] [--plot FILE]

The script needs an NVIDIA GPU, and takes about two minutes on an H200. It first measures the ceilings in GB/s. These
are the speeds of a large copy on the device (bytes read plus bytes written), of a kernel that only reads, and of a
large copy to and from pinned host memory. Then it measures these kernels, and compares them with the ceilings of the
same run. Kernels that write almost nothing are compared with the read ceiling:

* ``write`` quantises and writes 256 to 65,536 tokens. It measures every mode and two layouts (packed NHD, per-layer
  and cross-layer). Blocks have 16 tokens. Slots are random or in order.
* ``write step`` is the same write in five steps. The first step has one program per cell. The last step is the
  kernel of kvviz.
* ``read cells`` reads cells in order or in random order (gathered). The scale lies in the tail, or in another tensor.
* ``decode attention`` has 64 sequences of 8,192 tokens, 32 query heads, 8 KV heads, and head size 128. It measures
  every mode.
* ``decode splits`` is the same attention with other numbers of splits.
* ``decode shapes`` has other numbers of sequences, tokens and heads.
* ``prefill`` is attention for 4 prompts of 1,024 tokens. ``prefill beside`` is PyTorch's attention for prompts of the
  same size in bfloat16. It has no paged cache.
* ``to host`` and ``from host`` move 32 blocks of 28 layers to pinned host memory and back. The blocks are gathered into
  one piece, or moved piece by piece.

Only useful bytes are counted, which are each input once, and each code and scale once. Each time is the median of
several replays of a CUDA graph with 16 to 64 launches. The launches of a graph use different layers, so that the data
do not stay in the L2 cache. Transfers are not in a graph. For them, 16 Python calls are timed together. The script
prints a table and writes JSON.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.engine.block_pool import BlockPool
from kvviz.engine.offload import Offloader
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.attention_tiles import tiled_attention
from kvviz.kernels.checks import cache_halves
from kvviz.kernels.codec import INTERPRETED, tl, triton
from kvviz.kernels.gather import BlockGatherer
from kvviz.kernels.runtime import device
from kvviz.kernels.write import Program, _write_kernel, write_kv
from kvviz.show.figures.canvas import save
from kvviz.show.figures.roofline import roofline

LAYOUTS = {"per-layer": "LBNHC", "cross-layer": "BLNHC"}
BLOCK_SIZE = 16
WRITES = ((256, 8, 128), (1_024, 8, 128), (4_096, 8, 128), (16_384, 8, 128), (65_536, 8, 128), (65_536, 2, 64))
"""The sizes of the writes. Each size has the number of tokens, the number of KV heads, and the head size."""
STEPS = {  # notebook 10 explains these steps
    "a program for each cell": Program(1, 1, wide=256, warps=4, aligned=False, instructions=False),
    "a program for all heads of a token": Program(1, wide=256, warps=4, aligned=False, instructions=False),
    "addresses known to be aligned": Program(1, wide=256, warps=4, instructions=False),
    "a cell in few threads": Program(instructions=False),
    "conversions in one instruction": Program(),
}
CELLS = (
    *((128, stride, True) for stride in (132, 264, 144, 160)), (128, 128, False),
    *((256, stride, True) for stride in (260, 520, 272, 288)), (256, 256, False),
)  # fmt: skip
"""The kinds of cells. Each kind has the number of data bytes, the distance from one cell to the next in bytes, and True
if the scale follows the data."""
NUM_CELLS = 1 << 20
TRANSFERS = 16
"""The number of transfers that are timed together. The launches of one transfer overlap with the copies of another."""
NUM_SEQS, CONTEXT, NUM_QUERY_HEADS, NUM_HEADS, HEAD_SIZE = 64, 8_192, 32, 8, 128
SHAPES = (
    (1, 131_072, 32, 8, 128), (8, 8_192, 32, 8, 128), (256, 1_024, 32, 8, 128), (1, 1_024, 32, 8, 128),
    (64, 8_192, 64, 8, 128), (32, 4_096, 9, 3, 64),
)  # fmt: skip
"""More shapes of a decode: sequences, tokens of each sequence, query heads, KV heads, head size."""
READS = ("decode attention", "decode splits", "decode shapes", "read cells")
"""Kernels that write almost nothing. Their ceiling is the speed of a kernel that only reads."""
READ_BYTES = 1 << 32
"""Bytes that the kernel of the read ceiling reads."""
LAUNCHES, REPLAYS = (16, 64), 25
"""LAUNCHES has the smallest and the largest number of launches in a graph. REPLAYS is how often a graph is replayed."""
DEVICE = device()


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Record all ``calls`` in one CUDA graph, and replay the graph. Return the median microseconds per call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return timed(graph.replay) / len(calls)


def timed(call: Callable[[], object]) -> float:
    """Return the median time of a call in microseconds, by the clock of the GPU. The first fifth is not counted."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[REPLAYS // 5 :])


# Grid:   (number of words / SIZE,) programs.
# Work:   One program adds SIZE words, so that no load is optimised away.
# Reads:  4 * SIZE bytes.
# Writes: One int32 number per program.
# Tiles:  Words (SIZE,).
@triton.jit
def _sum_kernel(word_ptr, out_ptr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(word_ptr + place), axis=0))


def read_ceiling() -> float:
    """Return the GB/s of a kernel that only reads, in the fastest of several launch shapes."""
    words = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=DEVICE).random_()
    sums, speeds = torch.empty(len(words) // 4096, dtype=torch.int32, device=DEVICE), []
    for size, warps in ((4096, 4), (4096, 8), (8192, 4), (8192, 8), (8192, 16), (16384, 8), (16384, 16)):
        grid = (len(words) // size,)
        us = microseconds([lambda g=grid, s=size, w=warps: _sum_kernel[g](words, sums, SIZE=s, num_warps=w)] * 2)
        speeds.append(READ_BYTES / us / 1e3)
    return max(speeds)


def ceilings() -> dict[str, float]:
    """Return the ceilings of this machine.

    ``copy``, ``to host`` and ``from host`` are GB/s of large copies. ``copy`` counts bytes read and bytes written.
    ``read`` is GB/s of a kernel that only reads. ``launch`` is the time in microseconds of a launch with almost no
    work, in a CUDA graph.
    """
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    found = {"copy": 2 * source.numel() / timed(lambda: target.copy_(source)) / 1e3}
    found["read"] = read_ceiling()
    nothing = torch.zeros(1, device=DEVICE)
    found["launch"] = microseconds([lambda: nothing.add_(1)] * 64)
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    part = source[: host.numel()]
    found["to host"] = host.numel() / timed(lambda: host.copy_(part, non_blocking=True)) / 1e3
    found["from host"] = host.numel() / timed(lambda: part.copy_(host, non_blocking=True)) / 1e3
    return found


def scale_views(cache: KVCache) -> list[tuple]:
    """Return the K and V scale views of every layer. In a mode without scales, return ``(None, None)`` per layer."""
    return list(cache.carve_scales()) if cache.spec.is_per_token_head else [(None, None)] * cache.spec.num_layers


def write_row(mode: str, layout: str, size: tuple[int, int, int], step: str = "", order: str = "random") -> dict:
    """Measure write_kv for one size (tokens, KV heads, head size). Each launch writes another layer of one cache."""
    num_tokens, num_heads, head_size = size
    cell = CacheSpec(1, 1, BLOCK_SIZE, num_heads, head_size, mode).cell_bytes
    moved = 2 * num_tokens * num_heads * (2 * head_size + cell) + 8 * num_tokens
    launches = max(LAUNCHES[0], min(LAUNCHES[1], (128 << 20) // moved))
    spec = CacheSpec(launches, max(num_tokens // BLOCK_SIZE, 1), BLOCK_SIZE, num_heads, head_size, mode)
    cache = allocate(spec, LAYOUTS[layout], DEVICE)
    inputs = torch.empty(2, launches, *size, dtype=torch.bfloat16, device=DEVICE).normal_()
    slots = [
        (torch.randperm if order == "random" else torch.arange)(num_tokens, device=DEVICE) for _ in range(launches)
    ]
    calls = [
        lambda layer=layer, scales=scales: write_kv(
            *inputs[:, layer],
            cache.kv_caches[layer],
            slots[layer],
            mode,
            *scales,
            program=STEPS.get(step, Program()),
            slots_checked=True,
        )
        for layer, scales in enumerate(scale_views(cache))
    ]
    kernel = {"kernel": "write step", "step": step} if step else {"kernel": "write", "order": order}
    if step and not INTERPRETED:
        _write_kernel.device_caches.clear()  # so ``compiled`` finds only the kernel of this step
    row = kernel | dict(zip("THD", size, strict=True)) | _row(mode, layout, moved, calls)
    return row | compiled(_write_kernel) if step else row


def compiled(kernel: triton.JITFunction) -> dict[str, int]:
    """Return the number of PTX instructions and of registers per thread, for the kernel that was launched last."""
    if INTERPRETED:
        return {}
    (made,) = kernel.device_caches[torch.cuda.current_device()][0].values()
    lines = [re.sub("//.*", "", line).strip() for line in made.asm["ptx"].splitlines()]
    parts = [part.strip(" {}") for line in lines if not line.startswith((".", "$")) for part in line.split(";")]
    instructions = [part for part in parts if re.match(r"(@!?%p\d+\s+)?[a-z]", part)]
    return {"registers": made.n_regs, "instructions": len(instructions)}


# Grid:   (number of cells / CELLS,) programs.
# Work:   One program reads CELLS cells and their scales. It adds all numbers, so that the compiler keeps every load.
# Reads:  One program reads DATA bytes, one float32 scale, and 8 bytes of the order per cell.
# Writes: One program writes one float32 number.
# Tiles:  The bytes of the cells have shape (CELLS, DATA).
@triton.jit
def _read_kernel(
    cell_ptr, scale_ptr, order_ptr, out_ptr, cell_stride, scale_stride,
    CELLS: tl.constexpr, DATA: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    cell = tl.load(order_ptr + tl.program_id(0) * CELLS + tl.arange(0, CELLS))
    place = tl.multiple_of(cell_ptr + cell * cell_stride, [BYTES])[:, None] + tl.arange(0, DATA)[None, :]
    total = tl.sum(tl.load(place).to(tl.int32), axis=1).to(tl.float32) * tl.load(scale_ptr + cell * scale_stride)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def cell_row(data: int, stride: int, inline: bool, order: str) -> dict:
    """Measure one read of every cell and its scale. The loads are as wide as the stride allows."""
    sets = [torch.zeros(NUM_CELLS * stride, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    apart = torch.zeros(NUM_CELLS, dtype=torch.float32, device=DEVICE)
    numbers = (
        torch.randperm(NUM_CELLS, device=DEVICE) if order == "gathered" else torch.arange(NUM_CELLS, device=DEVICE)
    )
    out, programs = torch.empty(NUM_CELLS // 16, device=DEVICE), (NUM_CELLS // 16,)
    calls = [
        lambda cells=cells: _read_kernel[programs](
            cells, cells.view(torch.float32)[data // 4 :] if inline else apart, numbers, out, stride,
            stride // 4 if inline else 1, CELLS=16, DATA=data, BYTES=math.gcd(16, stride), num_warps=2,
        )
        for cells in sets
    ]  # fmt: skip
    moved = NUM_CELLS * (data + 4)
    sizes = {"data": data, "stride": stride, "inline": inline, "cells": NUM_CELLS}
    return {"kernel": "read cells", "order": order, "bytes": moved, "us": microseconds(calls)} | sizes


def decode_rows(
    mode: str, layout: str, splits: Sequence[int] = (), shape: tuple[int, int, int, int, int] | None = None
) -> list[dict]:
    """Measure paged_attention with one query per sequence. Then measure it for each number of splits in ``splits``.

    Calls use several layers in turn. ``shape`` is a row of ``SHAPES``. Default: the shape of ``decode attention``.
    """
    num_seqs, context, query_heads, num_heads, head_size = shape or (
        NUM_SEQS, CONTEXT, NUM_QUERY_HEADS, NUM_HEADS, HEAD_SIZE
    )  # fmt: skip
    blocks = num_seqs * context // BLOCK_SIZE
    moved = num_seqs * context * num_heads * 2 * CacheSpec(1, 1, BLOCK_SIZE, num_heads, head_size, mode).cell_bytes
    num_layers = max(2, min(LAUNCHES[1], math.ceil((128 << 20) / moved)))  # together larger than the L2 cache
    spec = CacheSpec(num_layers, blocks, BLOCK_SIZE, num_heads, head_size, mode)
    cache = allocate(spec, LAYOUTS[layout], DEVICE)
    scales = scale_views(cache)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)
    for layer, kv in enumerate(cache.kv_caches):
        for part in slots.split(1 << 16):
            key, value = torch.randn(2, len(part), num_heads, head_size, device=DEVICE).to(torch.bfloat16)
            write_kv(key, value, kv, part, mode, *scales[layer], slots_checked=True)
    query = torch.randn(num_seqs, query_heads, head_size, device=DEVICE).to(torch.bfloat16)
    table = torch.randperm(blocks, device=DEVICE).to(torch.int32).view(num_seqs, -1)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    layers = list(zip(cache.kv_caches, scales, strict=True)) * (2 if num_layers < 4 else 1)
    calls = [
        lambda kv=kv, pair=pair: paged_attention(
            query, kv, table, lengths, starts, mode, *pair, max_query_len=1, max_seq_len=context
        )
        for kv, pair in layers
    ]
    sizes = {"S": num_seqs, "T": context, "Hq": query_heads, "H": num_heads, "D": head_size}
    rows = [{"kernel": "decode shapes" if shape else "decode attention"} | sizes | _row(mode, layout, moved, calls)]
    for count in splits:
        calls = [
            lambda kv=kv, pair=pair, count=count: tiled_attention(
                query, *cache_halves(kv, mode), table, lengths, starts, mode, *pair,
                softmax_scale=head_size**-0.5, max_query_len=1, max_seq_len=context, num_splits=count,
            )
            for kv, pair in layers
        ]  # fmt: skip
        rows.append({"kernel": "decode splits", "splits": count} | sizes | _row(mode, layout, moved, calls))
    return rows


def prefill_row(mode: str, layout: str, num_seqs: int = 4, length: int = 1_024) -> dict:
    """Measure paged_attention of whole prompts. Arithmetic limits this speed, and memory does not."""
    blocks = num_seqs * length // BLOCK_SIZE
    spec = CacheSpec(1, blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, mode)
    cache = allocate(spec, LAYOUTS[layout], DEVICE)
    table = torch.arange(blocks, dtype=torch.int32, device=DEVICE).view(num_seqs, -1)
    key, value = torch.randn(2, num_seqs * length, NUM_HEADS, HEAD_SIZE, device=DEVICE).to(torch.bfloat16)
    scales = scale_views(cache)[0]
    write_kv(key, value, cache.kv_caches[0], torch.arange(len(key), device=DEVICE), mode, *scales, slots_checked=True)
    query = torch.randn(num_seqs * length, NUM_QUERY_HEADS, HEAD_SIZE, device=DEVICE).to(torch.bfloat16)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(0, num_seqs * length + 1, length, dtype=torch.int32, device=DEVICE)

    def call() -> torch.Tensor:
        given = (query, cache.kv_caches[0], table, lengths, starts, mode, *scales)
        return paged_attention(*given, max_query_len=length, max_seq_len=length)

    sizes = {"S": num_seqs, "T": length, "Hq": NUM_QUERY_HEADS, "H": NUM_HEADS, "D": HEAD_SIZE}
    moved = num_seqs * length * (2 * NUM_HEADS * spec.cell_bytes + NUM_QUERY_HEADS * HEAD_SIZE * (2 + 4))
    flops = 4 * num_seqs * NUM_QUERY_HEADS * HEAD_SIZE * length * (length + 1) // 2
    return {"kernel": "prefill", "flop": flops} | sizes | _row(mode, layout, moved, [call])


def beside_row(num_seqs: int = 4, length: int = 1_024) -> dict:
    """Measure PyTorch's causal attention over prompts of the same size as in ``prefill_row``, in bfloat16."""
    query = torch.randn(num_seqs, NUM_QUERY_HEADS, length, HEAD_SIZE, device=DEVICE).to(torch.bfloat16)
    key, value = torch.randn(2, num_seqs, NUM_HEADS, length, HEAD_SIZE, device=DEVICE).to(torch.bfloat16)

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    sizes = {"S": num_seqs, "T": length, "Hq": NUM_QUERY_HEADS, "H": NUM_HEADS, "D": HEAD_SIZE}
    moved = 2 * (2 * query.numel() + 2 * key.numel())
    return {"kernel": "prefill beside"} | sizes | _row("bfloat16", "PyTorch's attention", moved, [call] * 4)


def _row(mode: str, layout: str, moved: int, calls: Sequence[Callable[[], object]]) -> dict:
    return {"mode": mode, "layout": layout, "bytes": moved, "us": microseconds(calls)}


def offload_rows(layout: str) -> list[dict]:
    """Measure copies of 32 scattered blocks of 28 layers to pinned memory and back, gathered and piece by piece."""
    spec = CacheSpec(28, 128, BLOCK_SIZE, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, LAYOUTS[layout], DEVICE)
    for storage in cache.storages:
        storage.random_(0, 256)
    offloader = Offloader(cache, BlockPool(128), 32)
    blocks = torch.randperm(128, device=DEVICE)[:32]
    stage = torch.empty(32, offloader.block_bytes, dtype=torch.uint8, device=DEVICE)
    gatherer = BlockGatherer(cache.storages, offloader.pieces_of, offloader.block_bytes)
    host = torch.empty(stage.shape, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    pieces = [(row, piece) for row, block in enumerate(blocks.tolist()) for piece in offloader.pieces_of[block]]

    def piece_by_piece(to_host: bool) -> None:
        for row, (storage, start, stop, at) in pieces:
            ends = host[row, at : at + stop - start], cache.storages[storage][start:stop]
            (ends[0] if to_host else ends[1]).copy_(ends[1] if to_host else ends[0], non_blocking=True)

    def gathered(to_host: bool) -> None:
        if to_host:
            gatherer.gather(blocks, stage, blocks_checked=True)
        (host if to_host else stage).copy_(stage if to_host else host, non_blocking=True)
        if not to_host:
            gatherer.scatter(blocks, stage, blocks_checked=True)

    rows = []
    for way, name in ((gathered, True), (piece_by_piece, False)):
        for to_host in (True, False):
            us = timed(lambda way=way, to_host=to_host: [way(to_host) for _ in range(TRANSFERS)]) / TRANSFERS
            rows.append({"kernel": "to host" if to_host else "from host", "gathered": name, "us": us})
    sizes = {"blocks": 32, "layers": 28, "mode": spec.kv_cache_dtype, "layout": layout, "bytes": stage.numel()}
    return [row | sizes for row in rows]


def measure() -> dict:
    """Measure everything. Each row gets its share of the ceiling that was measured in the same run."""
    limits = ceilings()
    rows = [write_row(mode, layout, size) for size in WRITES for mode in MODES for layout in LAYOUTS]
    for size in WRITES[-2:]:
        rows += [write_row(mode, layout, size, order="in order") for mode in MODES for layout in LAYOUTS]
    stepped = [mode for mode in MODES if MODES[mode].is_per_token_head]
    rows += [write_row(m, "per-layer", (65_536, 8, 128), step) for m in stepped for step in STEPS]
    rows += [cell_row(*cell, order) for cell in CELLS for order in ("in order", "gathered")]
    for mode in MODES:
        for layout in LAYOUTS:
            rows += decode_rows(
                mode, layout, range(1, 9) if (mode, layout) == ("fp8_per_token_head", "per-layer") else ()
            )
    rows += [row for shape in SHAPES for mode in MODES for row in decode_rows(mode, "per-layer", (), shape)]
    rows += [prefill_row(mode, "per-layer") for mode in MODES] + [beside_row()]
    rows += [row for layout in LAYOUTS for row in offload_rows(layout)]
    for row in rows:
        row["GB/s"] = row["bytes"] / row["us"] / 1e3
        row["share"] = row["GB/s"] / ceiling(row, limits)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return {
        "machine": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "script": "benchmarks/kernels.py",
        "versions": versions,
        "ceilings": limits,
        "rows": rows,
    }


def ceiling(row: dict, limits: dict[str, float]) -> float:
    """Return the ceiling in GB/s with which a row is compared."""
    return limits["read"] if row["kernel"] in READS else limits.get(row["kernel"], limits["copy"])


def table(result: dict) -> str:
    """Return the result as text for a terminal."""
    lines = ["{machine}, {date}: copy {copy:,.0f} GB/s, read {read:,.0f} GB/s, to host {to host:.1f}, from host "
             "{from host:.1f}; a launch {launch:.1f} us".format(**result, **result["ceilings"])]  # fmt: skip
    for row in result["rows"]:
        sizes = {
            k: row[k] for k in ("S", "T", "Hq", "H", "D", "blocks", "layers", "data", "stride", "splits") if k in row
        }
        words = [row[name] for name in ("mode", "layout", "step", "order") if name in row]
        if "gathered" in row:
            words.append("gathered" if row["gathered"] else "piece by piece")
        if not row.get("inline", True):
            words.append("scales apart")
        lines.append(
            f"{row['kernel']:16s} {', '.join(words):70s} {' '.join(f'{k}={v:,}' for k, v in sizes.items()):31s} "
            f"{row['us']:10,.1f} us {row['GB/s']:8,.0f} GB/s {row['share']:6.1%}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON; default: print it after the table")
    parser.add_argument("--plot", type=Path, help="file for a roofline figure, .svg or .png")
    options = parser.parse_args()
    if DEVICE.type != "cuda":
        message = "this machine has no NVIDIA GPU, and the interpreter does not show the speed of one: use a GPU"
        print(f"benchmarks/kernels.py: {message}", file=sys.stderr)
        return 2
    result = measure()
    print(table(result))
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    if options.plot:
        save(roofline(result), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
