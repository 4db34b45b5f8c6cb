"""Physical orders of a KV cache: which axis is outside which, and the byte strides that follow.

A layout is an order of the six axes ``L`` (layer), ``B`` (block), ``K`` (K or V), ``H`` (KV head),
``N`` (token in the block) and ``C`` (the bytes of one cell). Two packings exist:

* *split* (vLLM 0.20 to 0.25): a block holds its K half, then its V half; named NHD and HND;
* *packed* (0.26 and later): K and V of one (token, head) lie side by side; six names, LBHNC to BHLNC, in
  which C means the K cell and the V cell together.

With B outside L one buffer serves all layers (cross-layer); otherwise each layer may have its own.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import one_of
from kvviz.cache.spec import CacheSpec

AXES = "LBKHNC"

_SPLIT = {
    "NHD": "LBKNHC",
    "HND": "LBKHNC",
    "cross-layer NHD": "BLKNHC",
    "cross-layer HND": "BHLKNC",
}
_PACKED = {name: name.replace("C", "KC") for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")}

_OLDER_PACKED_NAMES = {
    ("HND", False): "LBHNC",
    ("NHD", False): "LBNHC",
    ("NHD", True): "BLNHC",
    ("HND", True): "BHLNC",
}


@dataclass(frozen=True)
class Layout:
    """One physical order. ``order`` lists :data:`AXES` from the outermost to the innermost."""

    name: str
    packing: str
    order: str

    @property
    def cross_layer(self) -> bool:
        """True when one buffer interleaves all layers (blocks outside layers)."""
        return self.order.index("B") < self.order.index("L")

    def strides_bytes(self, spec: CacheSpec) -> dict[str, int]:
        """Byte stride of each axis in :data:`AXES`, for one storage that holds every layer.

        A padded page makes the stride of the innermost of L and B the padded size; every stride outside
        it grows along.

        Raises:
            ValueError: a page is padded although KV heads lie outside it, as vLLM 0.33 refuses too.
        """
        sizes = _axis_sizes(spec)
        page_axis = max("LB", key=self.order.index)
        if spec.page_size_padded is not None and spec.num_kv_heads > 1:
            self._check_padding(spec, page_axis)
        strides, step = {}, 1
        for axis in reversed(self.order):
            if axis == page_axis and spec.page_size_padded is not None:
                step = spec.page_size_padded
            strides[axis] = step
            step *= sizes[axis]
        return {axis: strides[axis] for axis in AXES}

    def _check_padding(self, spec: CacheSpec, page_axis: str) -> None:
        if self.order.index("H") < self.order.index(page_axis):
            raise ValueError(
                f"layout {self.name} puts the {spec.num_kv_heads} KV heads outside the page, so a page is not one run "
                f"of bytes and cannot be padded to {spec.page_size_padded}: use a layout with H inside L and B"
            )


def _axis_sizes(spec: CacheSpec) -> dict[str, int]:
    return {
        "L": spec.num_layers,
        "B": spec.num_blocks,
        "K": 2,
        "H": spec.num_kv_heads,
        "N": spec.block_size,
        "C": spec.cell_bytes,
    }


LAYOUTS = {
    **{name: Layout(name, "split", order) for name, order in _SPLIT.items()},
    **{name: Layout(name, "packed", order) for name, order in _PACKED.items()},
}
"""Every layout by name."""


def get_layout(name: str) -> Layout:
    """The layout of that name. Raises ValueError naming the nearest one."""
    return LAYOUTS[one_of("layout", name, tuple(LAYOUTS))]


def released_layout(kv_cache_layout: str, cross_layer: bool, packing: str = "split") -> Layout:
    """What the older names meant: ``NHD`` or ``HND``, per-layer or cross-layer.

    ``split`` is vLLM 0.20 to 0.25, ``packed`` is 0.26 and 0.27 (where per-layer NHD is LBNHC, and so on).
    """
    one_of("kv_cache_layout", kv_cache_layout, ("NHD", "HND"))
    if one_of("packing", packing, ("split", "packed")) == "packed":
        return LAYOUTS[_OLDER_PACKED_NAMES[kv_cache_layout, cross_layer]]
    return LAYOUTS[f"cross-layer {kv_cache_layout}" if cross_layer else kv_cache_layout]
