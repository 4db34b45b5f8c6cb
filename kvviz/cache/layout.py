"""Defines the layouts of a KV cache. A layout is an order of six axes, and the byte strides follow from the order.

For example, a page of the layout ``NHD`` starts with all heads of the first token. The six axes are ``L`` (layer),
``B`` (block), ``K`` (K or V), ``H`` (KV head), ``N`` (token in the block) and ``C`` (byte in the cell). There are two
packings:

* *split* (vLLM 0.20 to 0.25): a page has a K half with all K cells, then a V half. The names contain NHD or HND.
* *packed* (vLLM 0.26 and later): the K cell and the V cell of one token and head are adjacent. The names are LBHNC to
  BHLNC. In these names, C stands for both cells.

If B is outside L, one buffer holds all layers, and the layout is cross-layer. Otherwise each layer can have its own
buffer.

To add a layout, add an order to ``_SPLIT`` or a name to ``_PACKED``. No other change is needed.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import one_of
from kvviz.cache.spec import CacheSpec

AXES = "LBKHNC"

PACKINGS = ("split", "packed")

_SPLIT = {
    "NHD": "LBKNHC",
    "HND": "LBKHNC",
    "cross-layer NHD": "BLKNHC",
    "cross-layer HND": "BHLKNC",
}
_PACKED = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

_OLDER_PACKED_NAMES = {
    ("HND", False): "LBHNC",
    ("NHD", False): "LBNHC",
    ("NHD", True): "BLNHC",
    ("HND", True): "BHLNC",
}
"""The packed layouts for the older names. vLLM 0.26 and 0.27 used these names. A key is a name, and True if the layout
is cross-layer."""


@dataclass(frozen=True)
class Layout:
    """One layout of a KV cache.

    Attributes:
        name: the name of the layout in vLLM.
        packing: ``split`` or ``packed``.
        order: the six letters of :data:`AXES`, from the outermost axis to the innermost axis. C is the last letter.

    Raises:
        ValueError: the packing does not exist. Or the order does not contain each letter exactly once. Or C is not the
            last letter.
    """

    name: str
    packing: str
    order: str

    def __post_init__(self) -> None:
        one_of("packing", self.packing, PACKINGS)
        if sorted(self.order) != sorted(AXES) or self.order[-1] != "C":
            raise ValueError(
                f"the order of layout {self.name} is {self.order!r}, but it must contain each letter of {AXES} exactly "
                "once, and C must be the last letter"
            )

    @property
    def cross_layer(self) -> bool:
        """Return True if one buffer holds all layers. This is so if blocks are outside layers."""
        return self.order.index("B") < self.order.index("L")

    def axis_sizes(self, spec: CacheSpec) -> dict[str, int]:
        """Return the size of each axis in :data:`AXES`. The size of C is the number of bytes of one cell."""
        return {
            "L": spec.num_layers,
            "B": spec.num_blocks,
            "K": 2,
            "H": spec.num_kv_heads,
            "N": spec.block_size,
            "C": spec.cell_bytes,
        }

    def strides_bytes(self, spec: CacheSpec) -> dict[str, int]:
        """Return the stride of each axis in :data:`AXES` in bytes, for one storage that holds all layers.

        The page axis is L or B. It is the inner one of these two axes. If pages are padded, the stride of the page axis
        is ``page_size_padded``, and the strides of all axes outside the page axis grow too.

        Raises:
            ValueError: pages are padded, but KV heads are outside the page. vLLM 0.33 also refuses such a cache.
        """
        page_axis = max("LB", key=self.order.index)
        padded = spec.page_size_padded
        if padded is not None and spec.num_kv_heads > 1 and self.order.index("H") < self.order.index(page_axis):
            raise ValueError(
                f"layout {self.name} puts the {spec.num_kv_heads} KV heads outside the page, so the bytes of a page "
                f"are not adjacent and cannot be padded to {padded}: use a layout with H inside L and B"
            )
        strides, step, sizes = {}, 1, self.axis_sizes(spec)
        for axis in reversed(self.order):
            if axis == page_axis and padded is not None:
                step = padded
            strides[axis] = step
            step *= sizes[axis]
        return {axis: strides[axis] for axis in AXES}


LAYOUTS = {
    **{name: Layout(name, "split", order) for name, order in _SPLIT.items()},
    # In the packed packing, axis K stands directly before axis C in the order.
    **{name: Layout(name, "packed", name.replace("C", "KC")) for name in _PACKED},
}
"""All layouts by name."""


def get_layout(layout: str | Layout) -> Layout:
    """Return the layout with this name. If the argument is a Layout, return the argument.

    Raises:
        ValueError: no layout has this name. The message contains the nearest name.
    """
    return layout if isinstance(layout, Layout) else LAYOUTS[one_of("layout", layout, tuple(LAYOUTS))]


def released_layout(kv_cache_layout: str, cross_layer: bool, packing: str = "split") -> Layout:
    """Return the layout that vLLM 0.20 to 0.27 called ``NHD`` or ``HND``.

    Args:
        kv_cache_layout: ``NHD`` or ``HND``.
        cross_layer: True if one buffer holds all layers.
        packing: ``split`` for vLLM 0.20 to 0.25, ``packed`` for 0.26 and 0.27. For example, the packed layout for
            ``NHD`` is LBNHC, if each layer has its own buffer.

    Raises:
        ValueError: the name or the packing does not exist.
    """
    one_of("kv_cache_layout", kv_cache_layout, ("NHD", "HND"))
    if one_of("packing", packing, PACKINGS) == "packed":
        return LAYOUTS[_OLDER_PACKED_NAMES[kv_cache_layout, cross_layer]]
    return LAYOUTS[f"cross-layer {kv_cache_layout}" if cross_layer else kv_cache_layout]
