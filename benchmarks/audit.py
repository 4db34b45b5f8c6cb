"""Measures how long an audit takes at production size: python benchmarks/audit.py

The cache has 28 layers, up to 1,000,000 blocks of 16 tokens, 8 heads and head size 128, in mode fp8_per_token_head.
Each layer has a view of K data, a view of V data and two scale views, which makes 112 views. The tensors are on the
``meta`` device, so no memory is used. A time is the processor time of the fastest of five calls, in milliseconds.
Column ``counts`` is an audit without examples (``witnesses=False``). Column ``+ places`` is a complete audit. It also
finds examples, and the owners that misplaced scales hit.
"""

import time

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec

# Each line has the layout, the way to carve scale views, page_size_padded in bytes, and True for one storage.
LAYOUTS = (
    ("NHD", "shape", None, False),
    ("HND", "shape", None, False),
    ("cross-layer NHD", "shape", None, True),
    ("cross-layer HND", "shape", None, True),
    ("cross-layer NHD", "strides", None, True),
    ("BLNHC", "strides", None, True),
    ("BLNHC", "strides", 36_864, True),
    ("cross-layer NHD", "shape", 36_864, True),
)


def best(call, repeats: int = 5) -> float:
    """Return the processor time of the fastest call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    """Print one line per layout and number of blocks."""
    print(
        f"{'layout':16} {'carved':8} {'padded':>7} {'blocks':>9} {'counts':>9} {'+ places':>9}  "
        "findings, elements, bytes"
    )
    for name, carve, padded, shared in LAYOUTS:
        for num_blocks in (1_000, 50_269, 1_000_000):
            spec = CacheSpec(28, num_blocks, 16, 8, 128, "fp8_per_token_head", page_size_padded=padded)
            cache = allocate(spec, name, "meta", one_storage=shared)
            owners, writers = cache.owners(), cache.writers(cache.carve_scales(carve))
            counts = best(lambda o=owners, w=writers: audit_scales(o, w, witnesses=False))
            places = best(lambda o=owners, w=writers: audit_scales(o, w))
            found = audit_scales(owners, writers).findings
            elements, bytes_ = sum(f.elements for f in found), sum(f.bytes for f in found)
            line = f"{name:16} {carve:8} {padded or '':>7} {num_blocks:>9} {counts:6.1f} ms {places:6.1f} ms"
            print(f"{line}  {len(found)}, {elements}, {bytes_}")


if __name__ == "__main__":
    main()
