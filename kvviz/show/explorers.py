"""Explorers: sliders and lists that change a small cache, and show its map, its audit and its sizes in bytes.

An explorer needs a running Jupyter kernel. Below the explorer stand static copies of some positions. A static copy is
plain output, so an exported report shows it too. If the notebook cell is run again, the explorer keeps its last
position.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from html import escape

import ipywidgets
from IPython.display import HTML, display

from kvviz.audit.audit import audit_scales
from kvviz.audit.findings import ARROW, Audit
from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.modes import MODES
from kvviz.cache.scale_views import CARVINGS
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import byte_maps
from kvviz.show.live_map import MapView

MOST_MAPS = 4
"""Limit of the storages that an explorer draws. Further storages are only counted."""

WINDOW_BYTES = 1 << 14
"""Number of bytes of a storage that a map shows at first. A reader can move the map to any other byte."""

_LAST: dict[str, "Position"] = {}
"""The last position of each explorer, by the explorer's name."""


@dataclass(frozen=True)
class Position:
    """One setting of all controls: the fields of :class:`~kvviz.cache.spec.CacheSpec`, the layout, and two more fields.

    ``carve`` says how the scale views are made (see ``kvviz.cache.scale_views``). ``padding`` is the number of padding
    bytes after each page.
    """

    num_layers: int = 2
    num_blocks: int = 2
    block_size: int = 2
    num_kv_heads: int = 2
    head_size: int = 16
    kv_cache_dtype: str = "int8_per_token_head"
    layout: str = "cross-layer NHD"
    carve: str = "strides"
    padding: int = 0

    def spec(self) -> CacheSpec:
        """Return the sizes of the cache.

        Raises:
            ValueError: the sizes do not fit together.
        """
        spec = CacheSpec(
            self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_size, self.kv_cache_dtype
        )
        return replace(spec, page_size_padded=spec.page_size_bytes + self.padding) if self.padding else spec


CHOICES: dict[str, tuple] = {
    "num_layers": tuple(range(1, 9)),
    "num_blocks": tuple(range(1, 9)),
    "block_size": (1, 2, 4, 8, 16),
    "num_kv_heads": (1, 2, 3, 4, 8),
    "head_size": (8, 16, 32, 64, 128),
    "kv_cache_dtype": tuple(MODES),
    "layout": tuple(LAYOUTS),
    "carve": tuple(CARVINGS),
    "padding": (0, 16, 32, 64, 128),
}
"""The values of each control. A control with numbers is a slider. A control with words is a list."""


@dataclass(frozen=True)
class Shown:
    """What an explorer shows at one position: the maps, the audit, and the text ``arithmetic`` with sizes in bytes.

    ``audit`` is None in modes without scales in the cache.
    """

    view: MapView
    audit: Audit | None
    arithmetic: str


def look(position: Position) -> Shown:
    """Return the maps, the audit and the sizes of a position. The cache is on torch's ``meta`` device, without memory.

    Raises:
        ValueError: there can be no cache with these sizes. The message says how to correct them.
    """
    spec = position.spec()
    cache = allocate(spec, position.layout, "meta")
    owners, writers, audit = cache.owners(), (), None
    if spec.is_per_token_head:
        writers = cache.writers(cache.carve_scales(position.carve))
        audit = audit_scales(owners, writers)
    maps = byte_maps(owners, writers, most_bytes=WINDOW_BYTES, kv_cache_dtype=spec.kv_cache_dtype)
    shown = dict(list(maps.items())[:MOST_MAPS])
    pointed = [f for f in audit.findings if f.storage in shown and f.example] if audit else []
    pointed.sort(key=lambda finding: finding.drawing != ARROW)  # an arrow shows more than a frame
    view = MapView(shown, row_bytes=spec.page_size_bytes, finding=pointed[0] if pointed else None)
    return Shown(view, audit, arithmetic(cache, len(maps) - len(shown)))


def arithmetic(cache: KVCache, hidden: int = 0) -> str:
    """Return the sizes of a cell, a page, a block and the cache, one line each.

    ``hidden`` is the number of storages that are not drawn. They look like the storages that are drawn.
    """
    spec = cache.spec
    cells = 2 * spec.block_size * spec.num_kv_heads
    content, total = spec.content_page_size_bytes, sum(storage.numel() for storage in cache.storages)
    lines = [
        f"cell: {spec.data_bytes} data + {spec.scale_bytes} scale = {spec.cell_bytes} bytes",
        f"page: 2 (K, V) x {spec.block_size} tokens x {spec.num_kv_heads} heads x {spec.cell_bytes} = "
        f"{cells * spec.cell_bytes} bytes, {content} of them content"
        + (f", padded to {spec.page_size_bytes}" if spec.page_size_bytes != cells * spec.cell_bytes else ""),
        f"block, all {spec.num_layers} layers: {spec.num_layers} x {spec.page_size_bytes} = "
        f"{spec.num_layers * spec.page_size_bytes} bytes",
        f"cache: {spec.num_blocks} blocks, {total} bytes in {len(cache.storages)} buffer"
        + ("s" if len(cache.storages) > 1 else "")
        + (f" ({hidden} more like these)" if hidden else ""),
    ]
    return "\n".join(lines)


class Explorer:
    """Sliders and lists that change a cache, with its maps, audit and sizes. Static copies of positions stand below.

    Args:
        name: name under which the last position is kept. Explorers with the same name share their last position.
        controls: fields of :class:`Position` that the user can change. All other fields stay as in ``start``.
        start: the first position.
        positions: the static copies: positions by title.

    Raises:
        ValueError: a control does not exist, or a control does not offer its value in ``start``.
    """

    def __init__(
        self,
        name: str,
        controls: tuple[str, ...] = tuple(CHOICES),
        start: Position | None = None,
        positions: Mapping[str, Position] | None = None,
    ) -> None:
        unknown = [control for control in controls if control not in CHOICES]
        if unknown:
            raise ValueError(f"controls has unknown names: {', '.join(unknown)}. Choose from {', '.join(CHOICES)}.")
        self.name, self.positions = name, dict(positions or {})
        self.start = start or Position()
        last = _LAST.get(name, self.start)
        self.position = replace(self.start, **{control: getattr(last, control) for control in controls})
        self._boxes = {control: _control(control, getattr(self.position, control)) for control in controls}
        self._out = ipywidgets.Output()
        self._summary = ipywidgets.HTML()
        for box in self._boxes.values():
            box.observe(self._changed, names="value")
        wrap = ipywidgets.Layout(display="flex", flex_flow="row wrap")
        self.widget = ipywidgets.VBox(
            [ipywidgets.Box(list(self._boxes.values()), layout=wrap), self._summary, self._out]
        )
        self._show()

    @property
    def outputs(self) -> tuple[str, str]:
        """The HTML of the map, and the HTML of the text above the map. If no cache can exist, the first HTML is ""."""
        data = self._out.outputs[0]["data"] if self._out.outputs else {}
        return data.get("text/html", ""), self._summary.value

    def _changed(self, change: object) -> None:
        self.position = replace(self.position, **{control: box.value for control, box in self._boxes.items()})
        _LAST[self.name] = self.position
        self._show()

    def _show(self) -> None:
        try:
            shown = look(self.position)
        except ValueError as error:
            self._summary.value = f"<p><b>Not possible:</b> {escape(str(error))}</p>"
            self._out.outputs = ()
            return
        self._summary.value = summary_html(shown)
        data = {"text/plain": shown.view.text, "text/html": shown.view.html}
        self._out.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _ipython_display_(self) -> None:
        display(self.widget)
        for title, position in self.positions.items():
            display(twin(title, position))


def twin(title: str, position: Position) -> HTML:
    """Return a static copy: the output of an explorer at one position."""
    shown = look(position)
    changed = [f"{k} {v}" for k, v in asdict(position).items() if v != getattr(Position(), k)]
    settings = f"<p>{escape(', '.join(changed))}</p>" if changed else ""
    return HTML(f"<div><p><b>{escape(title)}</b></p>{settings}{summary_html(shown)}{shown.view.html}</div>")


def summary_html(shown: Shown) -> str:
    """Return the sizes and the audit of a position as HTML."""
    text = shown.arithmetic if shown.audit is None else f"{shown.arithmetic}\n\n{_verdict(shown.audit)}"
    return f"<pre>{escape(text)}</pre>"


def _verdict(audit: Audit) -> str:
    if audit.clean:
        return "audit: clean"
    kinds = dict.fromkeys(finding.kind for finding in audit.findings)
    lines = [f"audit: {len(audit.findings)} finding{'s' * (len(audit.findings) != 1)}"]
    for kind in kinds:
        found = audit.of_kind(kind)
        elements = sum(finding.elements or 0 for finding in found)
        first = f"; first: {found[0].example[0]}" if found[0].example else ""
        lines.append(f"  {kind}: {len(found)}, {elements} element{'s' * (elements != 1)}{first}")
    return "\n".join(lines)


def _control(name: str, value: object) -> ipywidgets.Widget:
    """Return a slider for numbers, or a list for words."""
    options = CHOICES[name]
    if value not in options:
        raise ValueError(f"the control {name} has no value {value!r}: choose from {', '.join(map(str, options))}")
    looks = {"description": name, "options": options, "value": value, "style": {"description_width": "initial"}}
    if isinstance(options[0], int):
        return ipywidgets.SelectionSlider(**looks, layout=ipywidgets.Layout(width="260px"))
    return ipywidgets.Dropdown(**looks, layout=ipywidgets.Layout(width="300px"))
