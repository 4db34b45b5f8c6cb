"""How near the kernels come to the memory's limit: python benchmarks/kernels.py [--out FILE] [--plot FILE]

Needs an NVIDIA GPU; takes about a minute on an H200. In one run it measures the ceilings (a large copy on the device,
bytes read and written counted; a large copy to and from pinned host memory), and then each kernel against them:

* quantise-and-write of every mode, per-layer and cross-layer (packed NHD, blocks of 16), few to many tokens at
  random slots;
* decode attention of 64 sequences of 8,192 tokens, 32 query and 8 KV heads of 128, in every mode;
* 32 blocks of 28 layers to pinned memory and back: gathered into one piece, and piece by piece.

Bytes are the useful ones: inputs once, codes and scales once. A time is the median of graph replays, each of several
launches over different inputs and layers, which together are larger than the L2 cache. Prints a table, and writes JSON.
"""

import argparse
import datetime
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvviz.engine.attention import paged_attention
from kvviz.engine.blocks import BlockPool
from kvviz.engine.gather import BlockGatherer
from kvviz.engine.mode import device
from kvviz.engine.offload import Offloader
from kvviz.engine.write import write_kv
from kvviz.memory.buffers import KVCache, allocate
from kvviz.memory.spec import MODES, CacheSpec

LAYOUTS = {"per-layer": "LBNHC", "cross-layer": "BLNHC"}
BLOCK_SIZE, NUM_LAYERS = 16, 4
WRITES = ((256, 8, 128), (1_024, 8, 128), (4_096, 8, 128), (16_384, 8, 128), (65_536, 8, 128), (65_536, 2, 64))
"""Tokens, KV heads, head size."""
NUM_SEQS, CONTEXT, NUM_QUERY_HEADS, NUM_HEADS, HEAD_SIZE = 64, 8_192, 32, 8, 128
REPLAYS = 25


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of ``calls``, which are recorded together in a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
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
    """Median microseconds of a call, on the device's clock."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[REPLAYS // 5 :])


def ceilings() -> dict[str, float]:
    """GB/s of a copy on the device (read and written bytes), to pinned host memory, and back."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = {"copy": 2 * source.numel() / timed(lambda: target.copy_(source)) / 1e3}
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    part = source[: host.numel()]
    found["to host"] = host.numel() / timed(lambda: host.copy_(part, non_blocking=True)) / 1e3
    found["from host"] = host.numel() / timed(lambda: part.copy_(host, non_blocking=True)) / 1e3
    return found


def scale_views(cache: KVCache) -> list[tuple]:
    """K and V scale views of every layer, or None twice."""
    return list(cache.carve_scales()) if cache.spec.is_per_token_head else [(None, None)] * cache.spec.num_layers


def write_row(mode: str, layout: str, num_tokens: int, num_heads: int, head_size: int) -> dict:
    """One size of write_kv, into layer after layer of one cache."""
    spec = CacheSpec(NUM_LAYERS, max(num_tokens // BLOCK_SIZE, 1), BLOCK_SIZE, num_heads, head_size, mode)
    cache = allocate(spec, LAYOUTS[layout], "cuda")
    key, value = torch.randn(2, NUM_LAYERS, num_tokens, num_heads, head_size, device="cuda").to(torch.bfloat16)
    slots = [torch.randperm(num_tokens, device="cuda") for _ in range(NUM_LAYERS)]
    calls = [
        lambda layer=layer, scales=scales: write_kv(
            key[layer], value[layer], cache.kv_caches[layer], slots[layer], mode, *scales, slots_checked=True
        )
        for layer, scales in enumerate(scale_views(cache))
    ]
    cells = 2 * num_tokens * num_heads
    moved = cells * (2 * head_size + spec.cell_bytes) + 8 * num_tokens
    return {"kernel": "write", "T": num_tokens, "H": num_heads, "D": head_size} | _row(mode, layout, moved, calls)


def decode_row(mode: str, layout: str) -> dict:
    """paged_attention of one query a sequence, over two layers of one cache in turn."""
    blocks = NUM_SEQS * CONTEXT // BLOCK_SIZE
    spec = CacheSpec(2, blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, mode)
    cache = allocate(spec, LAYOUTS[layout], "cuda")
    scales = scale_views(cache)
    every = torch.randperm(blocks * BLOCK_SIZE, device="cuda")
    for layer, kv in enumerate(cache.kv_caches):
        for part in every.split(1 << 16):
            key, value = torch.randn(2, len(part), NUM_HEADS, HEAD_SIZE, device="cuda").to(torch.bfloat16)
            write_kv(key, value, kv, part, mode, *scales[layer], slots_checked=True)
    query = torch.randn(NUM_SEQS, NUM_QUERY_HEADS, HEAD_SIZE, device="cuda").to(torch.bfloat16)
    table = torch.randperm(blocks, device="cuda").to(torch.int32).view(NUM_SEQS, -1)
    lengths = torch.full((NUM_SEQS,), CONTEXT, dtype=torch.int32, device="cuda")
    starts = torch.arange(NUM_SEQS + 1, dtype=torch.int32, device="cuda")
    calls = [
        lambda kv=kv, pair=pair: paged_attention(
            query, kv, table, lengths, starts, mode, *pair, max_query_len=1, max_seq_len=CONTEXT
        )
        for kv, pair in zip(cache.kv_caches, scales, strict=True)
    ]
    moved = NUM_SEQS * CONTEXT * NUM_HEADS * 2 * spec.cell_bytes
    sizes = {"S": NUM_SEQS, "T": CONTEXT, "Hq": NUM_QUERY_HEADS, "H": NUM_HEADS, "D": HEAD_SIZE}
    return {"kernel": "decode attention"} | sizes | _row(mode, layout, moved, calls)


def _row(mode: str, layout: str, moved: int, calls: Sequence[Callable[[], object]]) -> dict:
    return {"mode": mode, "layout": layout, "bytes": moved, "us": microseconds(calls)}


def offload_rows(layout: str) -> list[dict]:
    """32 scattered blocks of 28 layers to pinned memory and back, gathered and piece by piece."""
    spec = CacheSpec(28, 128, BLOCK_SIZE, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, LAYOUTS[layout], "cuda")
    for storage in cache.storages:
        storage.random_(0, 256)
    offloader = Offloader(cache, BlockPool(128), 32)
    blocks = torch.randperm(128, device="cuda")[:32]
    stage = torch.empty(32, offloader.block_bytes, dtype=torch.uint8, device="cuda")
    gatherer = BlockGatherer(cache.storages, offloader.pieces_of, offloader.block_bytes)
    host = torch.empty(stage.shape, dtype=torch.uint8, pin_memory=True)
    pieces = [(row, piece) for row, block in enumerate(blocks.tolist()) for piece in offloader.pieces_of[block]]

    def piece_by_piece(to_host: bool) -> None:
        for row, (storage, start, stop, at) in pieces:
            ends = host[row, at : at + stop - start], cache.storages[storage][start:stop]
            (ends[0] if to_host else ends[1]).copy_(ends[1] if to_host else ends[0], non_blocking=True)

    def out() -> None:
        gatherer.gather(blocks, stage)
        host.copy_(stage, non_blocking=True)

    def back() -> None:
        stage.copy_(host, non_blocking=True)
        gatherer.scatter(blocks, stage)

    ways = {("to host", True): out, ("from host", True): back}
    ways |= {("to host", False): lambda: piece_by_piece(True), ("from host", False): lambda: piece_by_piece(False)}
    row = {"blocks": 32, "layers": 28, "mode": spec.kv_cache_dtype, "layout": layout, "bytes": stage.numel()}
    return [{"kernel": way, "gathered": gathered, "us": timed(call)} | row for (way, gathered), call in ways.items()]


def measure() -> dict:
    """Everything, with the ceilings of the same run and each row's share of its own."""
    limits = ceilings()
    rows = [write_row(mode, layout, *size) for size in WRITES for mode in MODES for layout in LAYOUTS]
    rows += [decode_row(mode, layout) for mode in MODES for layout in LAYOUTS]
    rows += [row for layout in LAYOUTS for row in offload_rows(layout)]
    for row in rows:
        row["GB/s"] = row["bytes"] / row["us"] / 1e3
        row["share"] = row["GB/s"] / limits.get(row["kernel"], limits["copy"])
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return {
        "machine": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "script": "benchmarks/kernels.py",
        "versions": versions,
        "ceilings": limits,
        "rows": rows,
    }


def table(result: dict) -> str:
    """The result for a terminal."""
    lines = ["ceilings, GB/s: " + ", ".join(f"{name} {value:,.0f}" for name, value in result["ceilings"].items())]
    for row in result["rows"]:
        sizes = " ".join(f"{name}={row[name]:,}" for name in ("S", "T", "H", "D", "blocks", "layers") if name in row)
        how = "" if "gathered" not in row else ", gathered" if row["gathered"] else ", piece by piece"
        lines.append(
            f"{row['kernel']:16s} {row['mode']:21s} {row['layout'] + how:27s} {sizes:31s} "
            f"{row['us']:10,.1f} us {row['GB/s']:8,.0f} GB/s {row['share']:6.1%}"
        )
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    """Roofline: what each kernel moves a second over what it moves in all, under the copy's ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    limit = result["ceilings"]["copy"]
    axes.axhline(limit, color="black", linewidth=1.5)
    axes.annotate(
        f"copy on this device: {limit:,.0f} GB/s", (0.01, limit), xycoords=("axes fraction", "data"), va="bottom"
    )
    markers = {"write": "o", "decode attention": "s"}
    for kernel, marker in markers.items():
        for number, mode in enumerate(MODES):
            rows = [r for r in result["rows"] if (r["kernel"], r["mode"], r["layout"]) == (kernel, mode, "per-layer")]
            points = sorted((row["bytes"], row["GB/s"]) for row in rows)
            axes.plot(*zip(*points, strict=True), marker + "-", color=f"C{number}", label=f"{kernel}, {mode}")
    axes.set(xscale="log", yscale="log", xlabel="useful bytes of one launch", ylabel="GB/s")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: after the table")
    parser.add_argument("--plot", type=Path, help="where a roofline goes, .svg or .png")
    options = parser.parse_args()
    if device().type != "cuda":
        print("benchmarks/kernels.py: no NVIDIA GPU here, and the interpreter has no memory's limit.", file=sys.stderr)
        return 2
    result = measure()
    print(table(result))
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    if options.plot:
        plot(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
