"""Movers for tests: they copy blocks between caches, rightly or with one fault."""

from collections.abc import Mapping

import numpy as np

from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec
from kvviz.trace.memory import Memory, memory_of

FAULTS = {
    "one page short": "stale",
    "one block id off": "permuted",
    "scales left behind": "stale",
    "K and V swapped": "duplicated or permuted",
    "another rank's shard": "foreign",
    "half of a cell": "truncated",
    "one block twice": "duplicated",
}
"""For each fault, the kind that names it."""


def memory(cache: KVCache) -> Memory:
    return memory_of(cache.owners(), cache.storages_by_name())


def parts(cache: KVCache) -> dict[str, np.ndarray]:
    """Return the bytes of each view of a cache as an array: the axes of the view, and the bytes of an element."""
    flats = cache.storages_by_name()
    found = {}
    for view in cache.owners():
        flat, size = flats[view.storage.name], view.itemsize
        steps = (*(step * size for step in view.stride), 1)
        found[view.name] = flat.as_strided((*view.shape, size), steps, view.offset * size).numpy()
    return found


def move(source: KVCache, target: KVCache, blocks: Mapping[int, int], fault: str = "", other: KVCache | None = None):
    """Copy blocks of all layers. ``other`` is the cache of another rank."""
    sources, targets = parts(other if fault == "another rank's shard" else source), parts(target)
    last = [name for name in targets if name.startswith(f"layer {target.spec.num_layers - 1} ")]
    first, *rest = blocks
    for name, there in targets.items():
        if fault == "scales left behind" and name.endswith("scale"):
            continue
        here = sources[name.translate(str.maketrans("KV", "VK")) if fault == "K and V swapped" else name]
        for one, other_one in blocks.items():
            if fault == "one page short" and name in last and one == first:
                continue
            goal = (
                (other_one + 1) % target.spec.num_blocks if fault == "one block id off" and one == first else other_one
            )
            chosen = first if fault == "one block twice" and one in rest else one
            if fault == "half of a cell" and name.endswith("data") and one == first:
                half = there.shape[3] // 2
                there[goal][..., :half, :] = here[chosen][..., :half, :]
            else:
                there[goal] = here[chosen]


def random_case(seed: int) -> tuple[KVCache, KVCache, dict[int, int]]:
    """Return two caches of one size, of any mode and layouts, and the blocks that move."""
    lot = np.random.default_rng(seed)
    mode = str(lot.choice([name for name in MODES if name != "auto"]))
    heads = int(lot.integers(1, 4))
    spec = CacheSpec(
        int(lot.integers(1, 4)), int(lot.integers(3, 7)), int(lot.choice([1, 2, 4])), heads,
        int(lot.choice([8, 16, 32])), mode,
    )  # fmt: skip
    source, target = (allocate(spec, str(lot.choice(list(LAYOUTS)))) for _ in range(2))
    count = int(lot.integers(2, spec.num_blocks))
    here, there = lot.permutation(spec.num_blocks)[:count], lot.permutation(spec.num_blocks)[:count]
    return source, target, dict(zip(here.tolist(), there.tolist(), strict=True))
