"""Puts one fault into a correct cache. Each fault changes one property of some views or claims.

A fault is a function. It takes a correct cache and a random number generator, and returns the faulty views file. If
this cache cannot have the fault, the function returns None. A fault does not always work: the caller checks with an
audit that the file has findings of the wanted kind, and of no other kind.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvviz.audit.claims import Aligned, Declared, Maps
from kvviz.audit.view import View
from kvviz.audit.views_file import ViewsFile
from kvviz.challenge.sound_cache import SoundCache

CLEAN = "clean"
"""The answer for a file without a fault."""

Fault = Callable[[SoundCache, Random], ViewsFile | None]


def _change_views(file: ViewsFile, prefix: str, change: Callable[[View], View], role: str = "") -> ViewsFile:
    """Return the file with ``change`` applied to the views whose name starts with ``prefix``.

    If ``role`` is given, only views of that role change.
    """
    views = tuple(
        change(view) if view.name.startswith(prefix) and role in ("", view.role) else view for view in file.views
    )
    return replace(file, views=views)


def _change_claims(file: ViewsFile, kind: type, change: Callable) -> ViewsFile:
    """Return the file with ``change`` applied to the claims of one class."""
    return replace(file, claims=tuple(change(claim) if isinstance(claim, kind) else claim for claim in file.claims))


def _no_fault(cache: SoundCache, rng: Random) -> ViewsFile:
    return cache.file


def _layer_on_layer(cache: SoundCache, rng: Random) -> ViewsFile:
    """Start one layer where another layer starts."""
    moved, to = rng.sample(range(cache.spec.num_layers), 2)
    start = {view.name: view.offset for view in cache.file.views if view.itemsize == 1}
    shift = start[f"layer {to} K data"] - start[f"layer {moved} K data"]
    return _change_views(
        cache.file, f"layer {moved} ", lambda view: replace(view, offset=view.offset + shift // view.itemsize)
    )


def _v_on_k(cache: SoundCache, rng: Random) -> ViewsFile:
    """Start V of one layer where K of this layer starts."""
    prefix = f"layer {rng.randrange(cache.spec.num_layers)} V"
    offset = {view.name: view.offset for view in cache.file.views}
    return _change_views(cache.file, prefix, lambda view: replace(view, offset=offset[view.name.replace(" V ", " K ")]))


def _scales_of_others(cache: SoundCache, rng: Random) -> ViewsFile:
    """Exchange the scales of K and V in one layer, or put the scales of each layer at the place of the next layer."""
    layers = cache.spec.num_layers
    if rng.random() < 0.5:
        prefix, new = "", {f"layer {n}": f"layer {(n + 1) % layers}" for n in range(layers)}
    else:
        layer = f"layer {rng.randrange(layers)}"
        prefix, new = f"{layer} ", {f"{layer} K": f"{layer} V", f"{layer} V": f"{layer} K"}
    offset = {view.name: view.offset for view in cache.file.views}

    def moved(view: View) -> View:
        old = next(words for words in new if view.name.startswith(f"{words} "))
        return replace(view, offset=offset[view.name.replace(old, new[old])])

    return _change_views(cache.file, prefix, moved, "scale")


def _scales_unpadded(cache: SoundCache, rng: Random) -> ViewsFile | None:
    """Give the scales the block stride of pages without padding. Return None if pages have no padding."""
    content, page = cache.spec.content_page_size_bytes, cache.spec.page_size_bytes
    if content == page:
        return None
    return _change_views(
        cache.file,
        "",
        lambda view: replace(view, stride=(view.stride[0] * content // page, *view.stride[1:])),
        "scale",
    )


def _scales_transposed(cache: SoundCache, rng: Random) -> ViewsFile | None:
    """Exchange the order of tokens and heads in the scales of one layer, but not in the data of this layer."""
    tokens, heads = cache.spec.block_size, cache.spec.num_kv_heads
    if heads == 1:
        return None

    def transposed(view: View) -> View:
        unit = min(view.stride[1:])
        inner = (unit, tokens * unit) if view.stride[1] > view.stride[2] else (heads * unit, unit)
        return replace(view, stride=(view.stride[0], *inner))

    return _change_views(cache.file, f"layer {rng.randrange(cache.spec.num_layers)} ", transposed, "scale")


def _inner_steps(cache: SoundCache, rng: Random) -> ViewsFile | None:
    """Put all heads of K or V of one layer at one place, or use the same step for tokens and for heads."""
    if cache.spec.num_kv_heads == 1:
        return None
    prefix = f"layer {rng.randrange(cache.spec.num_layers)} {rng.choice('KV')}"
    same_step = rng.random() < 0.5

    def overlapping(view: View) -> View:
        block, token, head, *rest = view.stride
        token, head = (min(token, head),) * 2 if same_step else (token, 0)
        return replace(view, stride=(block, token, head, *rest))

    return _change_views(cache.file, prefix, overlapping)


def _short_storage(cache: SoundCache, rng: Random) -> ViewsFile:
    """Make the storage too small: subtract the bytes of all tails from its size."""
    spec = cache.spec
    (storage,) = cache.file.storages
    without_tails = spec.buffer_bytes * spec.data_bytes // spec.cell_bytes // 4 * 4
    short = replace(storage, nbytes=storage.nbytes - spec.buffer_bytes + without_tails)
    file = _change_views(cache.file, "", lambda view: replace(view, storage=short))
    return replace(file, storages=(short,))


def _counted_from_one(cache: SoundCache, rng: Random) -> ViewsFile:
    """Count layers from 1 instead of 0, so that the last layer lies after the end of the cache."""
    first, second = (view for view in cache.file.views if view.name in ("layer 0 K data", "layer 1 K data"))
    step = second.offset - first.offset
    return _change_views(cache.file, "", lambda view: replace(view, offset=view.offset + step // view.itemsize))


def _one_block_more(cache: SoundCache, rng: Random) -> ViewsFile:
    """Give all views one block more than there are pages."""
    return _change_views(cache.file, "", lambda view: replace(view, shape=(view.shape[0] + 1, *view.shape[1:])))


def _wrong_length(short: bool) -> Fault:
    """Return a fault that makes the byte ranges of transfers too short or too long.

    A short range has no tails, or has only half of the page. A long range counts the tails twice, or has one token too
    many.
    """

    def fault(cache: SoundCache, rng: Random) -> ViewsFile:
        data, cell, tail = cache.spec.data_bytes, cache.spec.cell_bytes, cache.spec.scale_bytes
        by_page = rng.random() < 0.5

        def changed(view: View) -> View:
            length = view.shape[-1]
            if short:
                length = length // 2 if by_page else length * data // cell
            else:
                length += length // cache.spec.block_size if by_page else length * tail // cell
            return replace(view, shape=(*view.shape[:-1], length))

        return _change_views(cache.file, "", changed, "transfer")

    return fault


def _undeclared(cache: SoundCache, rng: Random) -> ViewsFile:
    """Remove the declaration that says which reading of the K data of layer 0 is meant."""
    return _change_claims(cache.file, Declared, lambda claim: replace(claim, declared=""))


def _wide_boundary(cache: SoundCache, rng: Random) -> ViewsFile:
    """Claim that all rows start at multiples of 8, 16 or 32 bytes. For this cache, the claim may be false."""
    boundary = rng.choice((8, 16, 32))
    return _change_claims(cache.file, Aligned, lambda claim: replace(claim, boundary_bytes=boundary))


def _odd_start(cache: SoundCache, rng: Random) -> ViewsFile:
    """Start all views 4 or 8 bytes later, so that rows may not start at multiples of the boundary."""
    shift = rng.choice((4, 8))
    return _change_views(cache.file, "", lambda view: replace(view, offset=view.offset + shift // view.itemsize))


def _too_many_ids(cache: SoundCache, rng: Random) -> ViewsFile:
    """Claim one block id too many, or the number of ids of a table with another block size."""
    one_more = rng.random() < 0.5
    return _change_claims(
        cache.file, Maps, lambda claim: replace(claim, count=claim.count + 1 if one_more else claim.count * claim.ratio)
    )


def _other_id_step(cache: SoundCache, rng: Random) -> ViewsFile:
    """Claim another distance between neighbouring block ids: one page, or as many pages as there are layers."""
    step = cache.spec.content_page_size_bytes * rng.choice((1, cache.spec.num_layers))
    return _change_claims(cache.file, Maps, lambda claim: replace(claim, stride_bytes=step))


FAULTS: dict[str, tuple[Fault, ...]] = {
    "collision": (_layer_on_layer, _v_on_k),
    "misplaced": (_scales_of_others, _scales_unpadded),
    "permuted": (_scales_transposed,),
    "out_of_bounds": (_short_storage, _counted_from_one, _one_block_more),
    "truncated": (_wrong_length(short=True),),
    "oversized": (_wrong_length(short=False),),
    "self_overlap": (_inner_steps,),
    "ambiguous": (_undeclared,),
    "unaligned": (_wide_boundary, _odd_start),
    "index_space": (_too_many_ids, _other_id_step),
    CLEAN: (_no_fault,),
}
"""For each kind of finding, the faults that can cause it."""
