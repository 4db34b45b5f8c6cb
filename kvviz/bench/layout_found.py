"""Tells the layout of a live cache from the geometry of its views alone: the order of the axes, the packing, the page.

The letters are those of vLLM's layout names: ``L`` layer, ``B`` block, ``K`` K or V, ``H`` KV head, ``N`` token in the
block, ``C`` byte in the cell. The order goes from the outermost axis to the innermost. For example, BLKNHC is one
buffer for all layers, with a K half and a V half in each page.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvviz.audit.view import View


@dataclass(frozen=True)
class LayoutFound:
    """The layout of a live cache.

    Attributes:
        order: the axes from the outermost to the innermost, for example "LBKNHC".
        packing: "packed" if the K cell and the V cell of a token and head are adjacent, else "split".
        cross_layer: True if one storage holds all layers, and blocks are outside layers.
        storages: number of storages.
        layers: number of layers.
        num_blocks, block_size, num_kv_heads: the sizes of the axes B, N and H.
        cell_bytes: bytes of one cell with its scale.
        stride_bytes: the step of each axis in bytes. L is absent if each layer has a storage of its own.
        page_bytes: bytes of the cells of one block in one layer.
        scale_views: number of scale views.
    """

    order: str
    packing: str
    cross_layer: bool
    storages: int
    layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    cell_bytes: int
    stride_bytes: dict[str, int]
    page_bytes: int
    scale_views: int

    def __str__(self) -> str:
        kind = "one buffer for all layers" if self.cross_layer else "one buffer per layer"
        return (
            f"{self.order} ({self.packing}, {kind}): {self.layers} layers, {self.num_blocks} blocks, pages of "
            f"{self.page_bytes:,} bytes, cells of {self.cell_bytes} bytes"
        )


def layout_of(views: Sequence[View]) -> LayoutFound:
    """Return the layout of the views that ``tensors_of_vllm`` found in a vLLM worker.

    Raises:
        ValueError: there are no views of a KV cache of one of the two known shapes.
    """
    layers: dict[str, dict[str, View]] = {}
    for view in views:
        if named := re.fullmatch(r"(.+) (KV|K data|V data|K scale|V scale)", view.name):
            layers.setdefault(named[1], {})[named[2]] = view
    found = [_bytes_of(parts) for parts in layers.values()]
    if not found or None in found:
        raise ValueError(f"the {len(views)} views are not a KV cache of shape (B, 2, N, H, C) or (B, H, N, 2C)")
    first, steps, sizes, storage = found[0]
    names = {one[3] for one in found}
    steps = dict(steps)
    if len(found) > 1 and len(names) == 1:
        steps["L"] = found[1][0] - first
    ordered = sorted(steps, key=lambda axis: (-abs(steps[axis]), "LBKHNC".index(axis)))
    order = "".join(ordered if "L" in steps else ["L", *ordered])
    cell = steps["K"] if order.endswith("KC") else min(steps["H"], steps["N"])
    return LayoutFound(
        order=order,
        packing="packed" if order.endswith("KC") else "split",
        cross_layer=len(names) == 1 and order.index("B") < order.index("L"),
        storages=len(names),
        layers=len(found),
        num_blocks=sizes["B"],
        block_size=sizes["N"],
        num_kv_heads=sizes["H"],
        cell_bytes=cell,
        stride_bytes=steps,
        page_bytes=2 * cell * sizes["N"] * sizes["H"],
        scale_views=sum(view.role == "scale" for view in views),
    )


def _bytes_of(parts: dict[str, View]) -> tuple[int, dict[str, int], dict[str, int], str] | None:
    """Return the first byte of a layer, the step in bytes and the size of each axis, and the storage's name."""
    if "K data" in parts and "V data" in parts:
        key, value = parts["K data"], parts["V data"]
        axes, between = "BNHC", (value.offset - key.offset) * key.itemsize
    elif "KV" in parts and len(parts["KV"].shape) in (4, 5):
        key = parts["KV"]
        split = len(key.shape) == 5
        axes = "BKNHC" if split else "BHNC"
        between = key.stride[1] * key.itemsize if split else key.shape[-1] // 2 * key.itemsize
    else:
        return None
    steps = {axis: step * key.itemsize for axis, step in zip(axes, key.stride, strict=True)}
    return key.offset * key.itemsize, {**steps, "K": between}, dict(zip(axes, key.shape, strict=True)), key.storage.name
