"""The physical order of a KV cache: which axis is outside which, and the byte strides that follow from the order.

For example, ``NHD`` means that in each page all heads of the first token come first. A layout is an order of six axes:
``L`` (layer), ``B`` (block), ``K`` (K or V), ``H`` (KV head), ``N`` (token in the block) and ``C`` (byte in the cell).
There are two packings:

* *split* (vLLM 0.20 to 0.25): a page has a K half with all its K cells, then a V half. The names are NHD and HND.
* *packed* (vLLM 0.26 and later): the K cell and the V cell of one token and head are adjacent. The names are LBHNC to
  BHLNC. In these names, C stands for both cells.

If B is outside L, one buffer holds all layers (cross-layer). Otherwise each layer can have its own buffer.

To add a layout, add its order to ``_SPLIT`` or its name to ``_PACKED``. Everything else follows from the order.
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
"""The layout that vLLM 0.26 and 0.27 used for an older name, by (name, is it cross-layer?)."""


@dataclass(frozen=True)
class Layout:
    """One physical order.

    Attributes:
        name: vLLM's name.
        packing: ``split`` or ``packed``.
        order: the six letters of :data:`AXES`, from the outermost axis to the innermost. C comes last.

    Raises:
        ValueError: the packing does not exist, or the order does not have each letter once with C at the end.
    """

    name: str
    packing: str
    order: str

    def __post_init__(self) -> None:
        one_of("packing", self.packing, PACKINGS)
        if sorted(self.order) != sorted(AXES) or self.order[-1] != "C":
            raise ValueError(
                f"the order of layout {self.name} is {self.order!r}: it must have each letter of {AXES} once, C last"
            )

    @property
    def cross_layer(self) -> bool:
        """True if one buffer holds all layers, because blocks are outside layers."""
        return self.order.index("B") < self.order.index("L")

    def axis_sizes(self, spec: CacheSpec) -> dict[str, int]:
        """Return the size of each axis in :data:`AXES`. For C this is the number of bytes of one cell."""
        return {
            "L": spec.num_layers,
            "B": spec.num_blocks,
            "K": 2,
            "H": spec.num_kv_heads,
            "N": spec.block_size,
            "C": spec.cell_bytes,
        }

    def strides_bytes(self, spec: CacheSpec) -> dict[str, int]:
        """Return the byte stride of each axis in :data:`AXES`, for one storage that holds all layers.

        If pages are padded, the step from page to page is the padded size. Pages follow each other along L or B,
        whichever is further inside. The steps of all axes outside this axis are larger too.

        Raises:
            ValueError: pages are padded, but KV heads are outside the page. vLLM 0.33 refuses this too.
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
"""Every layout by name."""


def get_layout(layout: str | Layout) -> Layout:
    """Return the layout of that name. A Layout is returned as it is.

    Raises:
        ValueError: the layout does not exist. The message names the nearest one.
    """
    return layout if isinstance(layout, Layout) else LAYOUTS[one_of("layout", layout, tuple(LAYOUTS))]


def released_layout(kv_cache_layout: str, cross_layer: bool, packing: str = "split") -> Layout:
    """Return the layout that vLLM 0.20 to 0.27 called ``NHD`` or ``HND``.

    Args:
        kv_cache_layout: ``NHD`` or ``HND``.
        cross_layer: True if one buffer holds all layers.
        packing: ``split`` for vLLM 0.20 to 0.25, ``packed`` for 0.26 and 0.27. In the packed form, for example,
            per-layer NHD is LBNHC.

    Raises:
        ValueError: the name or the packing does not exist.
    """
    one_of("kv_cache_layout", kv_cache_layout, ("NHD", "HND"))
    if one_of("packing", packing, PACKINGS) == "packed":
        return LAYOUTS[_OLDER_PACKED_NAMES[kv_cache_layout, cross_layer]]
    return LAYOUTS[f"cross-layer {kv_cache_layout}" if cross_layer else kv_cache_layout]
