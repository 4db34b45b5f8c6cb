"""Interactive byte maps as one self-contained piece of HTML, made from the same records as the text and the figure.

The HTML holds a picture. A small script replaces the picture by a canvas; without the script (an untrusted notebook,
paper) the picture stays. The script gets the shapes and strides of the views and computes the owner and the writers of
any byte, so the storage may be as large as you like. The HTML needs no network and no ids. All names that a user gives
are escaped. The same records give the same bytes of HTML.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from html import escape
from importlib.resources import files

from kvviz.audit.findings import ARROW, FRAME, Finding
from kvviz.audit.view import View
from kvviz.cache.modes import get_mode
from kvviz.show import colours, states
from kvviz.show.byte_map import ByteMap, half_of
from kvviz.show.byte_map_text import render_text
from kvviz.show.colours import HATCH_INK, SWATCH_STEP, Entry, Style
from kvviz.show.describe import MOST_WRITERS, alt_text, counts, entries, hue_key, hues_of, scale_of
from kvviz.show.overview import overview
from kvviz.show.picture import picture
from kvviz.show.pointing import POINTED, claim_of, shows
from kvviz.show.rows import checked_row_bytes

MAX_BYTES = 1 << 53
"""Largest storage. JavaScript's numbers are exact below 2**53."""

SCRIPT = (
    "start.js",
    "packing.js",
    "views.js",
    "describe.js",
    "colours.js",
    "canvas.js",
    "drawing.js",
    "map.js",
)
"""The files of the script, in order. Together they are one function."""

MOST_LETTERS = 160
"""Letters of a name or title that are shown."""

Frames = Sequence[tuple[str, bytes]]
"""The steps of a time lapse, in order: the title of a step, and all bytes of the map's window after the step."""


class MapView:
    """Interactive maps for a notebook: the value of a cell. ``html`` and ``text`` are its two renderings.

    Maps with the same window and storage size share the pointer, the selection and the zoom.

    Args:
        maps: one map, or a mapping of titles to maps.
        row_bytes: bytes per row. With the page size, each row is one page.
        finding: a finding to mark on each map that shows its place.
        beside: True puts the maps side by side, except on a narrow screen.
        frames: a time lapse, for one map only: title and bytes of the window after each step.
        png: True adds a figure for programs that show no HTML. The figure needs matplotlib.

    Raises:
        ValueError: no map, an empty map, frames for several maps, frames of another length than the window, a finding
            without a place, or a storage of 2**53 bytes or more.
    """

    def __init__(
        self,
        maps: Mapping[str, ByteMap] | ByteMap,
        *,
        row_bytes: int,
        finding: Finding | None = None,
        beside: bool = False,
        frames: Frames = (),
        png: bool = False,
    ) -> None:
        self.maps = named_maps(maps)
        _check(self.maps, finding, frames)
        row_bytes = min(checked_row_bytes(row_bytes), max(record.stop - record.start for record in self.maps.values()))
        self.row_bytes, self.finding, self.beside, self.frames, self.png = row_bytes, finding, beside, frames, png

    @property
    def alt_text(self) -> str:
        """What the maps show, with the counts, for readers who do not see them."""
        return " ".join([alt_text(self.maps, self.finding), *self._steps()])

    @property
    def text(self) -> str:
        """The maps, the steps and the finding as plain text."""
        maps = [f"{title}\n{render_text(record, self.row_bytes)}" for title, record in self.maps.items()]
        steps = ["\n".join(self._steps())] if self.frames else []
        return "\n\n".join([*maps, *steps, *([str(self.finding)] if self.finding else [])])

    def _steps(self) -> list[str]:
        """Return a sentence for each frame: how many bytes changed, and where the first of these bytes lie."""
        lines = []
        for (title, _), (_, changes) in zip(self.frames, self._changes, strict=True):
            count = sum(stop - first for first, stop in changes)
            where = f"; the first are bytes [{changes[0][0]}, {changes[0][1]}) of the window" if changes else ""
            lines.append(f"Then {title}: {count} bytes lie in stretches that changed{where}.")
        return lines

    @cached_property
    def _changes(self) -> list[tuple[bytes, list[tuple[int, int]]]]:
        """The bytes after each frame, and the stretches of bytes that the frame changed."""
        if not self.frames:
            return []
        (record,) = self.maps.values()
        planes = [record.values, *(bytes(after) for _, after in self.frames)]
        return [(after, _differences(before, after)) for before, after in zip(planes[:-1], planes[1:], strict=True)]

    @property
    def html(self) -> str:
        """The maps with their style and script, ready to be put anywhere into a page."""
        hues = self._hues()
        figures = [self._figure(title, record, hues) for title, record in self.maps.items()]
        data = {
            "maps": [self._data(record, hues) for record in self.maps.values()],
            "colours": colours.for_javascript(),
            "states": states.for_javascript(),
            "most_writers": MOST_WRITERS,
        }
        script = "\n".join(map(_asset, SCRIPT)).replace('"@DATA@"', _json(data))
        side = " kvviz-side" if self.beside and len(figures) > 1 else ""
        body = f'<div class="kvviz{side}">{"".join(figures)}</div>'
        return f"<style>{_css_colours()}{_asset('map.css')}</style>{body}<script>{script}</script>"

    def _hues(self) -> dict[int | str, int]:
        """Return the numbers of the hues; views that own no byte of the window get one too."""
        hues = hues_of(self.maps.values())
        for record in self.maps.values():
            for view in (*record.owners, *record.writers, *record.beneath):
                key = hue_key(view.name)
                hues.setdefault(key, max(hues.values(), default=-1) + 1 if isinstance(key, str) else key)
        return hues

    def _figure(self, title: str, record: ByteMap, hues: Mapping) -> str:
        png, rows = picture(record, self.row_bytes, hues)
        whole = -(-(record.stop - record.start) // self.row_bytes)
        cut = f" The picture shows the first {rows} of {whole} rows." if rows < whole else ""
        geometry = "" if record.values is not None else " Geometry only: the values of the bytes are not known."
        window = f"{clipped(record.storage.name)}: bytes [{record.start}, {record.stop}) of {record.storage.nbytes}; "
        alt = alt_text({title: record}, self.finding if self.finding and shows(record, self.finding) else None)
        source = base64.b64encode(png).decode("ascii")
        return (
            f'<div class="kvviz-map"><div class="kvviz-title">{escape(clipped(title))}</div>'
            f'<div class="kvviz-counts">{escape(f"{window}{counts(record)}.{geometry}{cut}")}</div>'
            f'{self._callout(record)}<div class="kvviz-stage"><img alt="{escape(clipped(alt, 2000))}" '
            f'src="data:image/png;base64,{source}"></div>{_legend(entries([record], hues))}</div>'
        )

    def _callout(self, record: ByteMap) -> str:
        """Return the line above a map that shows the finding: who writes the marked bytes, or where they belong."""
        if self.finding is None or not shows(record, self.finding):
            return ""
        first, *others = self.finding.example
        if self.finding.drawing == FRAME:
            line = claim_of(self.finding, record.at(first.start_bytes).stop - first.start_bytes)
        else:
            line = f"{first.text} belongs at byte {others[0].start_bytes} and lies at byte {first.start_bytes}"
        return f'<div class="kvviz-note">{escape(clipped(line, 400))}</div>'

    def _data(self, record: ByteMap, hues: Mapping) -> dict:
        finding = self.finding if self.finding and shows(record, self.finding) else None
        return {
            "nbytes": record.storage.nbytes,
            "start": record.start,
            "stop": record.stop,
            "row": self.row_bytes,
            "mode": record.kv_cache_dtype and get_mode(record.kv_cache_dtype).as_data(),
            **_views(record, hues),
            "values": None if record.values is None else packed(record.values),
            "frames": [
                (clipped(title), [(first, packed(after[first:stop])) for first, stop in changes])
                for (title, _), (after, changes) in zip(self.frames, self._changes, strict=True)
            ],
            "strip": _strip(record),
            "finding": finding
            and {
                "arrow": finding.drawing == ARROW,
                "places": [(place.start_bytes, place.stop_bytes) for place in finding.example[:2]],
            },
        }

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"text/plain": self.text, "text/html": self.html}
        metadata = {}
        if self.png or (include and "image/png" in include):
            from kvviz.show.figures.byte_map_figure import figure

            sheet = figure(self.maps, row_bytes=self.row_bytes, finding=self.finding)
            drawn, metadata = sheet._repr_mimebundle_()
            data["image/png"] = drawn["image/png"]
        return {kind: shown for kind, shown in data.items() if not exclude or kind not in exclude}, metadata


def named_maps(maps: Mapping[str, ByteMap] | ByteMap) -> dict[str, ByteMap]:
    """Return titles and maps. A map without a title gets its window as title."""
    if isinstance(maps, ByteMap):
        return {f"bytes {maps.start} to {maps.stop}": maps}
    if not maps or not isinstance(maps, Mapping):
        raise ValueError("there is no map to show: give one ByteMap, or a mapping of titles to ByteMaps")
    for title, record in maps.items():
        if not isinstance(title, str) or not isinstance(record, ByteMap):
            raise ValueError(
                f"maps must have titles (str) as keys and ByteMaps as values, but {title!r} has a "
                f"{type(record).__name__}"
            )
    return dict(maps)


def _check(maps: Mapping[str, ByteMap], finding: Finding | None, frames: Frames) -> None:
    for title, record in maps.items():
        if not record.ranges:
            raise ValueError(f"the map {title!r} has no bytes, [{record.start}, {record.stop}): give a larger window")
        if record.storage.nbytes >= MAX_BYTES:
            raise ValueError(
                f"{title!r}: a storage of {record.storage.nbytes} bytes is too large for a browser, whose numbers are "
                f"exact below 2**53"
            )
    if finding is not None and (finding.kind not in POINTED or not finding.example):
        raise ValueError(
            f"a map marks findings of kind {', '.join(POINTED)} that have a place, not this {finding.kind!r}: "
            f"leave out the argument finding"
        )
    if not frames:
        return
    if len(maps) != 1:
        raise ValueError(f"frames need exactly one map, but {len(maps)} maps are given")
    (record,) = maps.values()
    if record.values is None:
        raise ValueError("frames need a map with values, and this map has none: give byte_map(values=...)")
    for title, after in frames:
        if len(after) != len(record.values):
            raise ValueError(
                f"frame {title!r} has {len(after)} bytes and the map's window has {len(record.values)}: "
                f"give all bytes of the window"
            )


def _views(record: ByteMap, hues: Mapping) -> dict:
    """Return the views for the script.

    Views of one form (shape, strides and so on) share one entry of ``forms``. A writer that is also an owner is sent as
    the owner's number.
    """
    forms: dict[str, int] = {}
    everybody = (*record.owners, *record.writers, *record.beneath)
    ids = {name: n for n, name in enumerate(dict.fromkeys(view.name for view in everybody))}

    def shown(view: View) -> list:
        """Return name, form, offset in bytes, hue and id of a view; then layer and id of its scale view, if any."""
        form = {
            "role": clipped(view.role),
            "half": half_of(view.name),
            "shape": view.shape,
            "stride": [step * view.itemsize for step in view.stride],
            "itemsize": view.itemsize,
            "axes": [clipped(axis) for axis in view.axes],
        }
        key, number = hue_key(view.name), forms.setdefault(_json(form), len(forms))
        fields = [clipped(view.name), number, view.offset * view.itemsize, hues[key], ids[view.name]]
        fields += [key if isinstance(key, int) else None, ids.get(scale_of(view.name))]
        while fields[-1] is None:  # leave out nulls at the end: a large cache has hundreds of views
            fields.pop()
        return fields

    numbers = {view: n for n, view in enumerate(record.owners)}
    owners = [shown(view) for view in record.owners]
    writers = [numbers[view] if view in numbers else shown(view) for view in record.writers]
    beneath = [shown(view) for view in record.beneath]
    return {"owners": owners, "writers": writers, "beneath": beneath, "forms": [json.loads(form) for form in forms]}


def _strip(record: ByteMap) -> list[tuple[int, int, int]]:
    """Return the columns of the overview: bytes owned, bytes written, and a code for the owner of most bytes.

    The code is twice the owner's number (-1 for nobody), plus 1 if other owners share the column. A map that shows the
    whole storage needs no overview: the list is empty.
    """
    if record.stop - record.start == record.storage.nbytes:
        return []
    number = {view.name: n for n, view in enumerate(record.owners)}
    columns = overview(record)
    return [(c.owned, c.written, (number[c.most] if c.most else -1) * 2 + c.shared) for c in columns]


def _differences(before: bytes, after: bytes, near: int = 4) -> list[tuple[int, int]]:
    """Return the stretches in which two byte strings differ. Stretches less than ``near`` bytes apart become one."""
    found: list[list[int]] = []
    for at, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            if found and at - found[-1][1] < near:
                found[-1][1] = at + 1
            else:
                found.append([at, at + 1])
    return [tuple(stretch) for stretch in found]


def _legend(shown: Sequence[Entry]) -> str:
    items = []
    for entry in shown:
        swatches = "".join(f'<span class="kvviz-swatch" style="{_css(style)}"></span>' for style in entry.styles)
        items.append(f'<li data-kvviz="{entry.key}">{swatches}{escape(clipped(entry.text))}</li>')
    return f'<ul class="kvviz-legend">{"".join(items)}</ul>'


def _css(style: Style) -> str:
    """Return the background of a swatch: the style's share of its colour, over the colour of the page.

    A browser without ``color-mix`` mixes with white instead.
    """
    if style.hatch and style.hatch.swatch_angle is not None:
        line = f"{style.fill} 0 {SWATCH_STEP - 1}px,{HATCH_INK} {SWATCH_STEP - 1}px {SWATCH_STEP}px"
        return f"background:repeating-linear-gradient({style.hatch.swatch_angle}deg,{line})"
    if style.share == 0:
        return "background:var(--kvviz-paper)"
    mixed = f"color-mix(in srgb,{style.colour} {style.share:.0%},var(--kvviz-paper))"
    return f"background:{style.fill};background:{mixed}"


def _css_colours() -> str:
    """Return the colours that ``map.css`` takes outside JupyterLab, where no theme defines its own."""
    return (
        f".kvviz{{--kvviz-default-ink:{colours.INK};--kvviz-default-soft:{colours.GREY};--kvviz-white:{colours.WHITE}}}"
    )


def clipped(text: str, most: int = MOST_LETTERS) -> str:
    """Return a text that cannot change the text around it: control characters are spelled out, long texts are cut."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[:most]}…"


def packed(data: bytes) -> str:
    """Return bytes as text: five letters for four bytes. No letter needs to be escaped in a script."""
    return base64.b85encode(data).decode("ascii").translate(SAFE)


SAFE = str.maketrans("<>&", ",:.")
"""Base 85 has three letters that HTML reserves; three letters that base 85 leaves out replace them."""


def _json(data: dict) -> str:
    """Return JSON that may stand in a script: it has no ``<`` that could end the script."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    """Return a file of ``assets/`` without its indentation and without lines that are comments."""
    text = files("kvviz.show").joinpath("assets", name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
