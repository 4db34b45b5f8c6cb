"""Sound caches of every layout and mode, and one known mistake at a time: views, claims and the cause by name."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from kvviz.audit.claims import (
    Addressed,
    Aligned,
    BelongsAt,
    Claim,
    Covers,
    Disjoint,
    Follows,
    Maps,
    Overlay,
    SameBytes,
    StepAlike,
)
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.spec import CacheSpec

SCALE = 4


@dataclass
class Sound:
    """A cache without a mistake: its views by name, its claims, and where the numbers come from."""

    spec: CacheSpec
    layout: str
    views: dict[str, View]
    claims: list[Claim]

    def of_role(self, role: str) -> list[View]:
        return [view for view in self.views.values() if view.role == role]

    @property
    def shared(self) -> bool:
        return len({view.storage for view in self.views.values()}) == 1


def sound_cache(draw: random.Random) -> Sound:
    """Draw a cache: any layout, any mode, padded or not, one storage for all layers or one per layer."""
    layout, mode = draw.choice(list(LAYOUTS)), draw.choice(list(MODES))
    sizes = {
        "num_layers": draw.randint(2, 5), "num_blocks": draw.choice((3, 5, 7)), "block_size": draw.choice((4, 8, 16)),
        "num_kv_heads": draw.choice((1, 2, 3)), "head_size": draw.choice((16, 24, 40)), "kv_cache_dtype": mode,
    }  # fmt: skip
    spec = CacheSpec(**sizes)
    heads_inside = LAYOUTS[layout].order.index("H") > max(map(LAYOUTS[layout].order.index, "LB"))
    if draw.random() < 0.4 and (heads_inside or spec.num_kv_heads == 1):
        spec = replace(spec, page_size_padded=-(-(spec.content_page_size_bytes + 1) // 64) * 64)
    cache = allocate(spec, layout, "meta", one_storage=True if draw.random() < 0.7 else None)
    views = {view.name: view for view in cache.owners()}
    data, scales = ([v for v in views.values() if v.role == role] for role in ("data", "scale"))
    claims: list[Claim] = [Disjoint(tuple(v.name for v in group)) for group in (data, scales) if len(group) > 1]
    claims += [Follows(v.name, v.name.replace("scale", "data"), spec.data_bytes) for v in scales]
    for layer, kv in enumerate(cache.kv_caches):
        transfer = _transfer(f"layer {layer} transfer", kv, views[f"layer {layer} K data"].storage)
        views[transfer.name] = transfer
        own = tuple(v.name for v in (*data, *scales) if v.name.startswith(f"layer {layer} "))
        others = tuple(v.name for v in (*data, *scales) if v.storage == transfer.storage)
        claims.append(Covers(transfer.name, own, others))
    return Sound(spec, layout, views, claims)


def _transfer(name: str, kv, storage: Storage) -> View:
    """Return a layer's pages as byte ranges, one per block, or one per block and head if heads lie outside."""
    size, width, outer = kv.element_size(), kv.element_size(), []
    for step, count in sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True)):
        if step * size == width and not outer:
            width *= count
        elif count > 1:
            outer.insert(0, (step * size, count))
    shape = (kv.shape[0], *(count for _, count in outer), width)
    stride = (kv.stride(0) * size, *(step for step, _ in outer), 1)
    axes = ("block", *["part"] * len(outer), "byte")
    return View(name, storage, shape, stride, kv.storage_offset() * size, 1, axes, "transfer")


Mutation = Callable[[Sound, random.Random], tuple[str, ...] | None]
"""Makes one mistake in place. Returns the causes that may come first, or None if the mistake does not fit the cache."""


def _move(sound: Sound, view: View, **numbers) -> None:
    sound.views[view.name] = replace(view, **numbers)


def from_shape(sound: Sound, draw: random.Random):
    """Scale views as vLLM 0.25.1 made them: strides and start from the shape of one layer."""
    spec, cell = sound.spec, sound.spec.cell_bytes // SCALE
    tokens, heads = spec.block_size, spec.num_kv_heads
    for view in sound.of_role("scale"):
        offset = cell - 1 + (tokens * heads * cell if " V " in view.name else 0)
        _move(sound, view, stride=(2 * tokens * heads * cell, heads * cell, cell), offset=offset)
    orders = ("token_head_order",) if "HN" in LAYOUTS[sound.layout].order else ()
    return ("from_shape", "kv_packing", "layer_count", "padding_left_out", "offset_dropped", *orders)[: 5 + len(orders)]


def offset_dropped(sound: Sound, draw: random.Random):
    if not sound.shared:
        return None
    first = {half: sound.views.get(f"layer 0 {half} scale") for half in "KV"}
    for view in sound.of_role("scale"):
        _move(sound, view, offset=first["K" if " K " in view.name else "V"].offset)
    return ("offset_dropped",)


def layer_count(sound: Sound, draw: random.Random):
    order = LAYOUTS[sound.layout].order
    if not (order.index("B") < order.index("L")) or order.startswith("BH") or sound.spec.num_layers < 3:
        return None
    counted = draw.choice([n for n in range(2, sound.spec.num_layers + 3) if n != sound.spec.num_layers])
    for view in sound.of_role("scale"):
        block = view.stride[0] // sound.spec.num_layers * counted
        _move(sound, view, stride=(block, *view.stride[1:]))
    return ("layer_count",)


def padding_left_out(sound: Sound, draw: random.Random):
    spec = sound.spec
    if spec.page_size_bytes == spec.content_page_size_bytes:
        return None
    for view in sound.of_role("scale"):
        step = view.stride[0] * SCALE // spec.page_size_bytes * spec.content_page_size_bytes
        if step == view.stride[0] * SCALE or step % SCALE:
            return None
        _move(sound, view, stride=(step // SCALE, *view.stride[1:]))
    return ("padding_left_out", "from_shape")


def kv_swapped(sound: Sound, draw: random.Random):
    layer = draw.randrange(sound.spec.num_layers)
    pair = [sound.views.get(f"layer {layer} {half} scale") for half in "KV"]
    if None in pair:
        return None
    for view, other in (pair, pair[::-1]):
        _move(sound, view, offset=other.offset, stride=other.stride)
    return ("kv_swapped",)


def token_head_order(sound: Sound, draw: random.Random):
    tokens, heads = sound.spec.block_size, sound.spec.num_kv_heads
    if heads == 1:
        return None
    for view in sound.of_role("scale"):
        block, token, head = view.stride
        inner = min(token, head)
        if max(token, head) != inner * (heads if token > head else tokens):
            return None  # heads lie outside the page: there is no other order inside
        _move(sound, view, stride=(block, inner, tokens * inner) if token > head else (block, heads * inner, inner))
    return ("token_head_order",) + (("from_shape",) if "HN" in LAYOUTS[sound.layout].order else ())


def element_size(sound: Sound, draw: random.Random):
    scales = sound.of_role("scale")
    if sound.spec.num_kv_heads * sound.spec.block_size < 2:
        return None
    what = draw.choice(("strides", "both"))
    for view in scales:
        offset = view.offset * SCALE if what == "both" else view.offset
        _move(sound, view, stride=tuple(step * SCALE for step in view.stride), offset=offset)
    return ("element_size",)


def scale_region(sound: Sound, draw: random.Random):
    """Scales taken for one dense region behind all data of the storage's first layer."""
    spec = sound.spec
    for view in sound.of_role("scale"):
        layer = int(view.name.split()[1])
        dense = (spec.block_size * spec.num_kv_heads, spec.num_kv_heads, 1)
        size = prod(view.shape)
        start = (layer * 2 + (" V " in view.name)) * size
        _move(sound, view, stride=dense, offset=start)
    return ("scale_region",)


def kv_packing(sound: Sound, draw: random.Random):
    """Packed cells read as two halves of a block."""
    if LAYOUTS[sound.layout].packing != "packed" or LAYOUTS[sound.layout].order.endswith("NHKC") is False:
        return None
    spec, cell = sound.spec, sound.spec.cell_bytes // SCALE
    half = spec.block_size * spec.num_kv_heads * cell
    if spec.num_kv_heads < 2:
        return None
    for view in sound.of_role("scale"):
        k = view.offset - (cell if " V " in view.name else 0)
        offset = k + (half if " V " in view.name else 0)
        _move(sound, view, stride=(view.stride[0], *(step // 2 for step in view.stride[1:])), offset=offset)
    return ("kv_packing", "from_shape")


def width_without_scales(sound: Sound, draw: random.Random):
    if not sound.spec.is_per_token_head:
        return None
    for view in sound.of_role("transfer"):
        if len(view.shape) != 2:
            return None
        _move(sound, view, shape=(view.shape[0], sound.spec.real_page_size_bytes))
    return ("width_without_scales",)


def one_base(sound: Sound, draw: random.Random):
    if not sound.shared or any(len(view.shape) != 2 for view in sound.of_role("transfer")):
        return None
    for view in sound.of_role("transfer"):
        _move(sound, view, offset=sound.views["layer 0 transfer"].offset)
    return ("one_base",)


def step_for_length(sound: Sound, draw: random.Random):
    for view in sound.of_role("transfer"):
        if len(view.shape) != 2 or view.stride[0] == view.shape[1]:
            return None
    if sound.spec.page_size_bytes != sound.spec.content_page_size_bytes and not LAYOUTS[sound.layout].cross_layer:
        return None  # only padding would be taken along, which is nobody's
    for view in sound.of_role("transfer"):
        _move(sound, view, shape=(view.shape[0], view.stride[0]))
    return ("step_for_length", "layer_count")


def block_unit(sound: Sound, draw: random.Random):
    """Ids of kernel blocks, two per block, used as ids of blocks."""
    ratio = draw.choice((2, 4))
    for view in sound.of_role("transfer"):
        if len(view.shape) != 2 or view.stride[0] % ratio:
            return None
    if sound.spec.num_layers in (ratio, 2 * ratio):
        return None
    for view in sound.of_role("transfer"):
        _move(sound, view, stride=(view.stride[0] // ratio, 1))
    return ("block_unit",)


def ids_of_another_unit(sound: Sound, draw: random.Random):
    ratio = draw.choice((2, 4, 16))
    blocks = sound.spec.num_blocks
    sound.claims.append(Maps("block ids", "layer 0 K data", blocks * ratio))
    return ("block_unit",)


def padding_slot(sound: Sound, draw: random.Random):
    """Slot -1 of padding tokens used as an index: the row before the cache, or the last live one."""
    view = sound.views[f"layer {draw.randrange(sound.spec.num_layers)} K data"]
    token = replace(
        view, name="padding token", shape=(1, *view.shape[2:]), stride=(view.stride[1], *view.stride[2:]),
        axes=("token", *view.axes[2:]), role="padding",
    )  # fmt: skip
    last = view.offset + (view.shape[0] - 1) * view.stride[0] + (view.shape[1] - 1) * view.stride[1]
    offset = last if draw.random() < 0.5 else view.offset - view.stride[1]
    sound.views[token.name] = replace(token, offset=offset)
    data = tuple(v.name for v in sound.of_role("data") if v.storage == view.storage)
    sound.claims.append(Disjoint((token.name, *data)))
    return ("padding_slot",)


def _add(sound: Sound, views: list[View], claim: Claim) -> None:
    sound.views |= {view.name: view for view in views}
    sound.claims.append(claim)


def scales_in_tails(sound: Sound, draw: random.Random):
    """A pool whose blocks are [all data | all scales], as index keys of SGLang, read as if scales followed cells."""
    blocks, tokens, cell = draw.randint(2, 9), draw.choice((4, 8, 16)), draw.choice((8, 32, 128))
    page = tokens * (cell + SCALE)
    pool = Storage("index pool", blocks * page)
    keys = View("index data", pool, (blocks, tokens, cell), (page, cell, 1), role="data")
    scale = View(
        "index scale", pool, (blocks, tokens), (page // SCALE, cell // SCALE + 1), cell // SCALE, SCALE, role="scale"
    )
    _add(sound, [keys, scale], Disjoint((keys.name, scale.name)))
    return ("scale_region",)


def rounded(sound: Sound, draw: random.Random):
    """Cells of an odd number of bytes, and scales at whole float32 elements."""
    cells, size = draw.randint(2, 9), 4 * draw.randint(2, 9) + draw.choice((1, 2, 3))
    pool = Storage("odd cells", cells * (size + SCALE) + SCALE)
    keys = View("odd data", pool, (cells, size), (size + SCALE, 1), role="data")
    scale = View("odd scale", pool, (cells,), ((size + SCALE) // SCALE,), -(-size // SCALE), SCALE, role="scale")
    _add(sound, [keys, scale], Follows(scale.name, keys.name, size))
    return ("rounded",)


def values_for_bytes(sound: Sound, draw: random.Random):
    """K of q8_0: 32 values in 34 bytes. V starts as many bytes later as K has values."""
    tokens, groups = draw.randint(2, 9), draw.randint(2, 6)
    row = 2 * groups * 34
    pool = Storage("q8_0", tokens * row)
    k = View("q K", pool, (tokens, groups), (2 * groups, 1), 0, 34, values=32)
    v = View("q V", pool, (tokens, groups * 34), (row, 1), groups * 32)
    _add(sound, [k, v], Disjoint((k.name, v.name)))
    return ("element_size",)


def broadcast(sound: Sound, draw: random.Random):
    view = sound.views[f"layer {draw.randrange(sound.spec.num_layers)} K data"]
    copies = (draw.randint(2, 5), *view.shape)
    tile = replace(view, name="repeated", shape=copies, stride=(0, *view.stride), axes=(), role="tile")
    sound.views[tile.name] = tile
    return ("broadcast",)


def ring(sound: Sound, draw: random.Random):
    """A ring of slots that wraps around: the last entry names the first slot again."""
    slots, row = draw.randint(3, 9), draw.choice((8, 16, 40))
    pool = Storage("window", slots * row)
    first = View("window 0 to last", pool, (slots, row), (row, 1))
    again = View("window again", pool, (1, row), (row, 1), draw.randrange(slots) * row)
    _add(sound, [first, again], Disjoint((first.name, again.name)))
    return ("table_entry",)


def pool_of_two_lengths(sound: Sound, draw: random.Random):
    ids, ratio, block = draw.randint(3, 7), draw.choice((2, 3, 4)), draw.choice((8, 16))
    pool = Storage("two groups", ids * ratio * block)
    long = View("sliding group", pool, (ids, ratio * block), (ratio * block, 1))
    short = View("full group", pool, (ids * ratio, block), (block, 1))
    _add(sound, [long, short], Overlay((long.name, short.name)))
    return ("block_unit",)


def sections(sound: Sound, draw: random.Random):
    """A rank owns a part of each section of a page, and sends one range of as many bytes."""
    number, ranks, size = draw.randint(2, 4), draw.choice((2, 3)), draw.choice((8, 16))
    page = Storage("page of sections", number * ranks * size)
    parts = [View(f"own section {n}", page, (size,), (1,), n * ranks * size) for n in range(number)]
    sent = View("sent of the page", page, (number * size,), (1,))
    _add(sound, [*parts, sent], SameBytes(sent.name, tuple(part.name for part in parts)))
    return ("sections",)


def rank_sections(sound: Sound, draw: random.Random):
    heads, share, size = draw.randint(2, 4), draw.choice((2, 3)), draw.choice((8, 16))
    ranks = heads * share
    pool = Storage("heads", ranks * size)
    ours = [View(f"rank {n} head", pool, (size,), (1,), n * size) for n in range(ranks)]
    sound.views |= {view.name: view for view in ours}
    sound.claims += [
        BelongsAt(view.name, replace(view, name=f"home {n}", offset=n // share * size)) for n, view in enumerate(ours)
    ]
    return ("rank_sections",)


def copy_steps(sound: Sound, draw: random.Random):
    blocks, width, gap = draw.randint(2, 6), draw.choice((16, 48)), draw.choice((4, 8))
    source = View("copy source", Storage("device", blocks * width), (blocks, width), (width, 1))
    step = width + gap
    target = View("copy target", Storage("host", blocks * step), (blocks, width), (step, 1))
    _add(sound, [source, target], StepAlike(source.name, target.name))
    return ("copy_steps",)


def address_width(sound: Sound, draw: random.Random):
    large = View("large pool", Storage("large", 1 << 17), (1 << 8, 1 << draw.choice((8, 9))), (1 << 9, 1))
    _add(sound, [large], Addressed(large.name, "int16", draw.choice(("storage", "view")), "bytes"))
    return ("address_width",)


def unaligned_rows(sound: Sound, draw: random.Random):
    rows, size, boundary = draw.randint(2, 9), draw.choice((66, 130, 260)), draw.choice((16, 32, 64))
    address = draw.choice((None, 0, boundary // 2))
    base = {} if address is None else {"address": address, "address_modulus": 4096}
    view = View("rows", Storage("unaligned", rows * size, **base), (rows, size), (size, 1))
    _add(sound, [view], Aligned(view.name, boundary))
    return ("unaligned_rows",)


MUTATIONS: tuple[Mutation, ...] = (
    from_shape, offset_dropped, layer_count, padding_left_out, kv_swapped, token_head_order, element_size, scale_region,
    kv_packing, width_without_scales, one_base, step_for_length, block_unit, ids_of_another_unit, padding_slot,
    scales_in_tails, rounded, values_for_bytes, broadcast, ring, pool_of_two_lengths, sections, rank_sections,
    copy_steps, address_width, unaligned_rows,
)  # fmt: skip
NEED_SCALES = {from_shape, offset_dropped, layer_count, padding_left_out, kv_swapped, token_head_order, element_size,
               scale_region, kv_packing}  # fmt: skip


def mutated(draw: random.Random) -> tuple[Sound, str, tuple[str, ...]]:
    """Draw a sound cache and make one mistake in it; returns the cache, the mistake's name and the right causes."""
    mutation = draw.choice(MUTATIONS)
    while True:
        sound = sound_cache(draw)
        if mutation in NEED_SCALES and not sound.spec.is_per_token_head:
            continue
        before = dict(sound.views), list(sound.claims)
        causes = mutation(sound, draw)
        if causes and (sound.views, sound.claims) != before:
            return sound, mutation.__name__, causes
