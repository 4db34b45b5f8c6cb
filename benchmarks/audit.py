"""How long the audit takes at production size: python benchmarks/audit.py

28 layers x B blocks x 16 tokens x 8 heads x 128, fp8_per_token_head: K, V and both scales of each layer, 112 views.
Milliseconds of one core, the best of five; the geometry alone is made (``meta``), nothing of that size is touched.
"""

import time

from kvviz.audit.audit import audit_scales
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec

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
    """Milliseconds of processor time of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    """Print one line for each layout and number of blocks."""
    print(
        f"{'layout':16} {'carved':8} {'padded':>7} {'blocks':>9} {'counts':>9} {'+ places':>9}  findings, cells, bytes"
    )
    for name, carve, padded, shared in LAYOUTS:
        for num_blocks in (1_000, 50_269, 1_000_000):
            spec = CacheSpec(28, num_blocks, 16, 8, 128, "fp8_per_token_head", page_size_padded=padded)
            cache = allocate(spec, name, "meta", one_storage=shared)
            owners, claims = cache.owners(), cache.writers(cache.carve_scales(carve))
            counts = best(lambda o=owners, c=claims: audit_scales(o, c, witnesses=False))
            places = best(lambda o=owners, c=claims: audit_scales(o, c))
            found = audit_scales(owners, claims).findings
            cells, bytes_ = sum(f.elements for f in found), sum(f.bytes for f in found)
            line = f"{name:16} {carve:8} {padded or '':>7} {num_blocks:>9} {counts:6.1f} ms {places:6.1f} ms"
            print(f"{line}  {len(found)}, {cells}, {bytes_}")


if __name__ == "__main__":
    main()
