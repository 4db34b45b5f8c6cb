"""Draws a correct cache of random size and layout, with the views and claims that each file of the challenge has."""

from dataclasses import dataclass, replace
from math import gcd
from random import Random

from kvviz.audit.claims import Aligned, Claim, Covers, Declared, Disjoint, Follows, Maps
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import ViewsFile
from kvviz.cache.geometry import CELL_AXES, kv_views, owners
from kvviz.cache.layout import LAYOUTS, Layout
from kvviz.cache.spec import CacheSpec

EASY_LAYOUTS = ("NHD", "LBNHC", "cross-layer NHD", "BLNHC")

FULL_LAYOUTS = (
    "NHD", "HND", "cross-layer NHD", "cross-layer HND", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC",
)  # fmt: skip
"""Layouts of the full set. The list is fixed: if kvviz gets a new layout, a seed must still give the same caches."""

FULL_CELLS = (
    ("int8_per_token_head", 64),
    ("fp8_per_token_head", 96),
    ("fp8_per_token_head", 128),
    ("int4_per_token_head", 64),
    ("int4_per_token_head", 120),
    ("int4_per_token_head", 120),
)
"""Modes and head sizes of the full set.

int4 with head size 120 stands twice, so that it is drawn more often. Its cells have 64 bytes, so all rows can start at
multiples of 32 bytes.
"""


@dataclass(frozen=True)
class SoundCache:
    """A correct cache: its spec, its layout and its views file."""

    spec: CacheSpec
    layout: Layout
    file: ViewsFile


def draw_sound_cache(rng: Random, level: str) -> SoundCache:
    """Draw a correct cache.

    Args:
        rng: the source of all random numbers. If the order of the draws changes, a seed gives another cache.
        level: ``easy`` for a small cache with three kinds of claims, ``full`` for realistic sizes and all claims.
    """
    easy = level == "easy"
    spec, layout = _draw_size(rng, easy)
    base = rng.choice((0, 16, 64)) if easy else rng.choice((0, 64, 256, 1024))
    # The cache is only a part of its storage: other bytes lie before it, and half a page of other bytes after it.
    after = spec.content_page_size_bytes // 8 * 4
    storage = Storage("cache", base + spec.buffer_bytes + after)
    views = _views(spec, layout, storage, base)
    claims = _basic_claims(views, spec)
    if not easy:
        claims += _further_claims(views, spec, rng)
        views += _readings(views[0], spec, layout)
    return SoundCache(spec, layout, ViewsFile((storage,), tuple(views), tuple(claims)))


def _draw_size(rng: Random, easy: bool) -> tuple[CacheSpec, Layout]:
    if easy:
        layout = LAYOUTS[rng.choice(EASY_LAYOUTS)]
        mode, head_size = rng.choice(("int8_per_token_head", "fp8_per_token_head")), rng.choice((8, 12, 16))
        sizes = {"num_layers": rng.randint(2, 3), "num_blocks": rng.randint(3, 4), "block_size": rng.choice((2, 4))}
        spec = CacheSpec(**sizes, num_kv_heads=2, head_size=head_size, kv_cache_dtype=mode)
    else:
        layout = LAYOUTS[rng.choice(FULL_LAYOUTS)]
        mode, head_size = rng.choice(FULL_CELLS)
        sizes = {"num_layers": rng.randint(2, 4), "num_blocks": rng.choice((4, 6)), "block_size": 16}
        spec = CacheSpec(**sizes, num_kv_heads=rng.choice((1, 2, 4)), head_size=head_size, kv_cache_dtype=mode)
    # In half of the caches, pages are padded to the next multiple of `step` bytes, by at least one byte. Only a page
    # that contains all heads can be padded.
    step = 64 if easy else 512
    padded = replace(spec, page_size_padded=-(-(spec.content_page_size_bytes + 1) // step) * step)
    heads_inside = layout.order.index("H") > max(map(layout.order.index, "LB"))
    return (padded if heads_inside and rng.random() < 0.5 else spec), layout


def _views(spec: CacheSpec, layout: Layout, storage: Storage, base: int) -> list[View]:
    """Return five views for each layer: K data, V data, K scales, V scales, and the bytes that a transfer moves."""
    owned = {view.name: _moved(view, storage, base) for view in owners(spec, layout, True)}
    views = []
    for layer, kv in enumerate(kv_views(spec, layout, True)):
        views += [owned[f"layer {layer} {part}"] for part in ("K data", "V data", "K scale", "V scale")]
        views.append(_transfer(f"layer {layer} transfer", _moved(kv, storage, base)))
    return views


def _moved(view: View, storage: Storage, base: int) -> View:
    return replace(view, storage=storage, offset=view.offset + base // view.itemsize)


def _transfer(name: str, kv: View) -> View:
    """Return a view of the byte ranges that a transfer of one layer moves.

    There is one byte range per block. If the heads of a block are not adjacent, there is one per block and head.
    """
    outer, length = [], 1
    for step, size in sorted(zip(kv.stride[1:], kv.shape[1:], strict=True)):
        if size > 1 and step == length and not outer:
            length *= size
        elif size > 1:
            outer.append((step, size))
    steps, sizes = zip(*outer, strict=True) if outer else ((), ())
    axes = ("block", *["head"] * len(outer), "byte")
    shape, stride = (kv.shape[0], *sizes, length), (kv.stride[0], *steps, 1)
    return View(name, kv.storage, shape, stride, kv.offset, 1, axes, "transfer")


def _basic_claims(views: list[View], spec: CacheSpec) -> list[Claim]:
    """Return the claims of both levels: disjoint data, disjoint scales, places of scales, and complete transfers."""
    data, scales = (tuple(v.name for v in views if v.role == role) for role in ("data", "scale"))
    claims: list[Claim] = [Disjoint(data), Disjoint(scales)]
    claims += [Follows(name, name.replace("scale", "data"), spec.data_bytes) for name in scales]
    for layer in range(spec.num_layers):
        own = (f"layer {layer} K data", f"layer {layer} V data")
        claims.append(Covers(f"layer {layer} transfer", own, data))
    return claims


def _further_claims(views: list[View], spec: CacheSpec, rng: Random) -> list[Claim]:
    """Return the claims that only the full set has: block ids, rows on a boundary, and the declared reading."""
    data = [view for view in views if view.role == "data"]
    ratio = rng.choice((1, 2))
    ids = Maps("block ids", data[0].name, spec.num_blocks // ratio, ratio, data[0].stride[0] * ratio)
    common = gcd(*(number for view in data for number in (view.offset, *view.stride[:-1])))
    boundary = rng.choice([size for size in (4, 8, 16, 32) if common % size == 0])
    token_first, head_first = (f"layer 0 K data, {order}" for order in ("tokens first", "heads first"))
    # With one head, both readings mostly give the same map, so that no declaration is needed.
    undeclared = ("",) if spec.num_kv_heads == 1 else ()
    declared = Declared(data[0].name, (token_first, head_first), rng.choice((token_first, head_first, *undeclared)))
    return [ids, *(Aligned(view.name, boundary) for view in data), declared]


def _readings(data: View, spec: CacheSpec, layout: Layout) -> list[View]:
    """Return two views of the K data of layer 0: one with tokens before heads, and one with heads before tokens."""
    swapped = replace(layout, order=layout.order.translate(str.maketrans("HN", "NH")))
    steps = swapped.strides_bytes(spec)
    other = replace(data, stride=tuple(steps[axis] for axis in "BNH") + (1,))
    tokens_first = layout.order.index("N") < layout.order.index("H")
    named = zip(("tokens first", "heads first"), (data, other) if tokens_first else (other, data), strict=True)
    return [replace(view, name=f"{data.name}, {words}", axes=CELL_AXES, role="reading") for words, view in named]
