"""A sound cache of random geometry, with the views and claims that the files of the closing challenge have."""

from dataclasses import dataclass, replace
from math import gcd
from random import Random

import torch

from kvviz.audit.claims import Aligned, Claim, Covers, Declared, Disjoint, Follows, Maps
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import ViewsFile
from kvviz.cache.buffers import CELL_AXES, KVCache, allocate
from kvviz.cache.layout import LAYOUTS, Layout
from kvviz.cache.spec import CacheSpec

EASY_LAYOUTS = ("NHD", "LBNHC", "cross-layer NHD", "BLNHC")

CELLS = (
    ("int8_per_token_head", 64),
    ("fp8_per_token_head", 96),
    ("fp8_per_token_head", 128),
    ("int4_per_token_head", 64),
    ("int4_per_token_head", 120),
    ("int4_per_token_head", 120),
)
"""Modes and head sizes of the full set; int4 of 120 gives cells of 64 bytes, whose rows keep wide boundaries."""


@dataclass(frozen=True)
class Unknown:
    """A sound cache: how it was made, and its views file."""

    spec: CacheSpec
    layout: Layout
    file: ViewsFile


def sound_cache(rng: Random, level: str) -> Unknown:
    """Draw a cache of a level (``easy``: small, three claims a layer; ``full``: real sizes, all claims)."""
    easy = level == "easy"
    spec, layout = _drawn(rng, easy)
    base = rng.choice((0, 16, 64)) if easy else rng.choice((0, 64, 256, 1024))
    cache = allocate(spec, layout, "meta", one_storage=True)
    # Something else lies before the cache, and half a page behind it.
    behind = spec.content_page_size_bytes // 8 * 4
    storage = Storage("cache", base + spec.buffer_bytes + behind)
    views = _views(cache, storage, base)
    claims = [*_usual(views, spec), *([] if easy else _more(views, spec, rng))]
    if not easy:
        views = [*views, *_readings(views[0], cache, base)]
    return Unknown(spec, layout, ViewsFile((storage,), tuple(views), tuple(claims)))


def _drawn(rng: Random, easy: bool) -> tuple[CacheSpec, Layout]:
    if easy:
        layout = LAYOUTS[rng.choice(EASY_LAYOUTS)]
        mode, head_size = rng.choice(("int8_per_token_head", "fp8_per_token_head")), rng.choice((8, 12, 16))
        sizes = {"num_layers": rng.randint(2, 3), "num_blocks": rng.randint(3, 4), "block_size": rng.choice((2, 4))}
        spec = CacheSpec(**sizes, num_kv_heads=2, head_size=head_size, kv_cache_dtype=mode)
    else:
        layout = LAYOUTS[rng.choice(tuple(LAYOUTS))]
        mode, head_size = rng.choice(CELLS)
        sizes = {"num_layers": rng.randint(2, 4), "num_blocks": rng.choice((4, 6)), "block_size": 16}
        spec = CacheSpec(**sizes, num_kv_heads=rng.choice((1, 2, 4)), head_size=head_size, kv_cache_dtype=mode)
    step = 64 if easy else 512
    padded = replace(spec, page_size_padded=-(-(spec.content_page_size_bytes + 1) // step) * step)
    heads_inside = layout.order.index("H") > max(map(layout.order.index, "LB"))
    return (padded if heads_inside and rng.random() < 0.5 else spec), layout


def _views(cache: KVCache, storage: Storage, base: int) -> list[View]:
    """Layer by layer K and V data, their scales, and what a transfer of the layer's blocks takes."""
    owned = {view.name: _moved(view, storage, base) for view in cache.owners()}
    views = []
    for layer, kv in enumerate(cache.kv_caches):
        views += [owned[f"layer {layer} {half}"] for half in ("K data", "V data", "K scale", "V scale")]
        views.append(_transfer(f"layer {layer} transfer", kv, storage, base))
    return views


def _moved(view: View, storage: Storage, base: int) -> View:
    return replace(view, storage=storage, offset=view.offset + base // view.itemsize)


def _transfer(name: str, kv: torch.Tensor, storage: Storage, base: int) -> View:
    """A layer's pages as runs of bytes: one a block, or one a block and head where heads lie outside the page."""
    outer, run = [], 1
    for step, size in sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True)):
        if size > 1 and step == run and not outer:
            run *= size
        elif size > 1:
            outer.append((step, size))
    steps, sizes = zip(*outer, strict=True) if outer else ((), ())
    axes = ("block", *["head"] * len(outer), "byte")
    shape, stride = (kv.shape[0], *sizes, run), (kv.stride(0), *steps, 1)
    return View(name, storage, shape, stride, kv.storage_offset() + base, 1, axes, "transfer")


def _usual(views: list[View], spec: CacheSpec) -> list[Claim]:
    data, scales = (tuple(v.name for v in views if v.role == role) for role in ("data", "scale"))
    claims: list[Claim] = [Disjoint(data), Disjoint(scales)]
    claims += [Follows(name, name.replace("scale", "data"), spec.data_bytes) for name in scales]
    for layer in range(spec.num_layers):
        own = (f"layer {layer} K data", f"layer {layer} V data")
        claims.append(Covers(f"layer {layer} transfer", own, data))
    return claims


def _more(views: list[View], spec: CacheSpec, rng: Random) -> list[Claim]:
    """What the full set claims besides: ids, rows on a boundary, and how a shape is to be read."""
    data = [view for view in views if view.role == "data"]
    ratio = rng.choice((1, 2))
    ids = Maps("block ids", data[0].name, spec.num_blocks // ratio, ratio, data[0].stride[0] * ratio)
    common = gcd(*(number for view in data for number in (view.offset, *view.stride[:-1])))
    boundary = rng.choice([size for size in (4, 8, 16, 32) if common % size == 0])
    token_first, head_first = (f"layer 0 K data, {order}" for order in ("tokens first", "heads first"))
    open_ = ("",) if spec.num_kv_heads == 1 else ()  # with one head both readings are mostly one map
    declared = Declared(data[0].name, (token_first, head_first), rng.choice((token_first, head_first, *open_)))
    return [ids, *(Aligned(view.name, boundary) for view in data), declared]


def _readings(data: View, cache: KVCache, base: int) -> list[View]:
    """The K data of layer 0 read as pages in which tokens, or heads, come first."""
    spec, order = cache.spec, cache.layout.order
    swapped = replace(cache.layout, order=order.translate(str.maketrans("HN", "NH")))
    steps = swapped.strides_bytes(spec)
    other = replace(data, stride=tuple(steps[axis] for axis in "BNH") + (1,))
    tokens_first = order.index("N") < order.index("H")
    named = zip(("tokens first", "heads first"), (data, other) if tokens_first else (other, data), strict=True)
    return [replace(view, name=f"{data.name}, {words}", axes=CELL_AXES, role="reading") for words, view in named]
