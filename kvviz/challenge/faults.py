"""Faults that a sound cache of the closing challenge is given: each changes one property of some views or claims.

A fault returns the sick file, or None where the geometry has no room for it. Whether the audit then finds what is
wanted, and nothing else, is for the caller to see.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvviz.audit.claims import Aligned, Declared, Maps
from kvviz.audit.view import View
from kvviz.audit.views_file import ViewsFile
from kvviz.challenge.sound_cache import Unknown

CLEAN = "clean"
"""What a file without a fault is called."""

Fault = Callable[[Unknown, Random], ViewsFile | None]


def _changed(file: ViewsFile, prefix: str, change: Callable[[View], View], role: str = "") -> ViewsFile:
    """The file with those views changed whose name begins so, of one role or of any."""
    hit = [view.name.startswith(prefix) and role in ("", view.role) for view in file.views]
    views = tuple(change(view) if wanted else view for view, wanted in zip(file.views, hit, strict=True))
    return replace(file, views=views)


def _claimed(file: ViewsFile, kind: type, change: Callable) -> ViewsFile:
    return replace(file, claims=tuple(change(c) if isinstance(c, kind) else c for c in file.claims))


def _none(cache: Unknown, rng: Random) -> ViewsFile:
    return cache.file


def _layer_on_layer(cache: Unknown, rng: Random) -> ViewsFile:
    """A layer starts where another one does."""
    moved, to = rng.sample(range(cache.spec.num_layers), 2)
    start = {view.name: view.offset for view in cache.file.views if view.itemsize == 1}
    shift = start[f"layer {to} K data"] - start[f"layer {moved} K data"]
    return _changed(cache.file, f"layer {moved} ", lambda v: replace(v, offset=v.offset + shift // v.itemsize))


def _v_on_k(cache: Unknown, rng: Random) -> ViewsFile:
    """The V half of a layer starts where its K half does."""
    prefix = f"layer {rng.randrange(cache.spec.num_layers)} V"
    there = {view.name: view.offset for view in cache.file.views}
    return _changed(
        cache.file, prefix, lambda view: replace(view, offset=there[view.name.replace(" V ", " K ")]),
    )  # fmt: skip


def _scales_of_others(cache: Unknown, rng: Random) -> ViewsFile:
    """Each layer's scales start where the next layer's belong, or K's and V's are exchanged in one layer."""
    layers = cache.spec.num_layers
    if rng.random() < 0.5:
        prefix, new = "", {f"layer {n}": f"layer {(n + 1) % layers}" for n in range(layers)}
    else:
        layer = f"layer {rng.randrange(layers)}"
        prefix, new = f"{layer} ", {f"{layer} K": f"{layer} V", f"{layer} V": f"{layer} K"}
    there = {view.name: view.offset for view in cache.file.views}

    def other(view: View) -> View:
        old = next(words for words in new if view.name.startswith(f"{words} "))
        return replace(view, offset=there[view.name.replace(old, new[old])])

    return _changed(cache.file, prefix, other, "scale")


def _scales_unpadded(cache: Unknown, rng: Random) -> ViewsFile | None:
    """Scales step by the content of a page where pages are padded."""
    content, page = cache.spec.content_page_size_bytes, cache.spec.page_size_bytes
    if content == page:
        return None
    return _changed(
        cache.file,
        "",
        lambda view: replace(view, stride=(view.stride[0] * content // page, *view.stride[1:])),
        "scale",
    )


def _scales_transposed(cache: Unknown, rng: Random) -> ViewsFile | None:
    """Scales of a layer lie heads before tokens where the cells lie tokens before heads, or the other way round."""
    tokens, heads = cache.spec.block_size, cache.spec.num_kv_heads
    if heads == 1:
        return None

    def swapped(view: View) -> View:
        unit = min(view.stride[1:])
        inner = (unit, tokens * unit) if view.stride[1] > view.stride[2] else (heads * unit, unit)
        return replace(view, stride=(view.stride[0], *inner))

    return _changed(cache.file, f"layer {rng.randrange(cache.spec.num_layers)} ", swapped, "scale")


def _inner_steps(cache: Unknown, rng: Random) -> ViewsFile | None:
    """A half of a layer has its heads on each other, or takes one step for tokens and for heads."""
    if cache.spec.num_kv_heads == 1:
        return None
    prefix = f"layer {rng.randrange(cache.spec.num_layers)} {rng.choice('KV')}"
    alike = rng.random() < 0.5

    def met(view: View) -> View:
        block, token, head, *rest = view.stride
        token, head = (min(token, head),) * 2 if alike else (token, 0)
        return replace(view, stride=(block, token, head, *rest))

    return _changed(cache.file, prefix, met)


def _short_storage(cache: Unknown, rng: Random) -> ViewsFile:
    """The storage was allocated for pages without their tails."""
    spec = cache.spec
    (storage,) = cache.file.storages
    short = replace(storage, nbytes=storage.nbytes - spec.buffer_bytes + spec.buffer_bytes * spec.data_bytes
                    // spec.cell_bytes // 4 * 4)  # fmt: skip
    file = _changed(cache.file, "", lambda view: replace(view, storage=short))
    return replace(file, storages=(short,))


def _counted_from_one(cache: Unknown, rng: Random) -> ViewsFile:
    """Layers are numbered from 1, so that the last lies behind the others' end."""
    first, second = (view for view in cache.file.views if view.name in ("layer 0 K data", "layer 1 K data"))
    step = second.offset - first.offset
    return _changed(cache.file, "", lambda view: replace(view, offset=view.offset + step // view.itemsize))


def _one_block_more(cache: Unknown, rng: Random) -> ViewsFile:
    """All views have a block more than there are pages."""
    return _changed(cache.file, "", lambda view: replace(view, shape=(view.shape[0] + 1, *view.shape[1:])))


def _length(less: bool) -> Fault:
    """A transfer's runs are too short (no tails, or half a page) or too long (tails twice, a token more)."""

    def fault(cache: Unknown, rng: Random) -> ViewsFile:
        data, cell, tail = cache.spec.data_bytes, cache.spec.cell_bytes, cache.spec.scale_bytes
        half = rng.random() < 0.5

        def cut(view: View) -> View:
            run = view.shape[-1]
            if less:
                run = run // 2 if half else run * data // cell
            else:
                run += run // cache.spec.block_size if half else run * tail // cell
            return replace(view, shape=(*view.shape[:-1], run))

        return _changed(cache.file, "", cut, "transfer")

    return fault


def _undeclared(cache: Unknown, rng: Random) -> ViewsFile:
    return _claimed(cache.file, Declared, lambda claim: replace(claim, declared=""))


def _wide_boundary(cache: Unknown, rng: Random) -> ViewsFile:
    boundary = rng.choice((8, 16, 32))
    return _claimed(cache.file, Aligned, lambda claim: replace(claim, boundary_bytes=boundary))


def _odd_start(cache: Unknown, rng: Random) -> ViewsFile:
    """Everything starts a few bytes behind the boundary."""
    shift = rng.choice((4, 8))
    return _changed(cache.file, "", lambda view: replace(view, offset=view.offset + shift // view.itemsize))


def _too_many_ids(cache: Unknown, rng: Random) -> ViewsFile:
    """The ids of a table of another unit, or one more than there are."""
    more = rng.random() < 0.5
    return _claimed(cache.file, Maps, lambda c: replace(c, count=c.count + 1 if more else c.count * c.ratio))


def _other_id_step(cache: Unknown, rng: Random) -> ViewsFile:
    """A consumer takes ids to be a page, or a page of every layer, apart."""
    step = cache.spec.content_page_size_bytes * rng.choice((1, cache.spec.num_layers))
    return _claimed(cache.file, Maps, lambda claim: replace(claim, stride_bytes=step))


FAULTS: dict[str, tuple[Fault, ...]] = {
    "collision": (_layer_on_layer, _v_on_k),
    "misplaced": (_scales_of_others, _scales_unpadded),
    "permuted": (_scales_transposed,),
    "out_of_bounds": (_short_storage, _counted_from_one, _one_block_more),
    "truncated": (_length(less=True),),
    "oversized": (_length(less=False),),
    "self_overlap": (_inner_steps,),
    "ambiguous": (_undeclared,),
    "unaligned": (_wide_boundary, _odd_start),
    "index_space": (_too_many_ids, _other_id_step),
    CLEAN: (_none,),
}
"""By the kind of finding that it must give: what may be done to a cache."""
