"""Makes interactive byte maps: HTML from the same records as the text and the figure. The HTML needs no other file.

The HTML contains a picture. A small script replaces the picture by a canvas. If the script does not run (on paper, or
in an untrusted notebook), the picture stays. The script gets the shapes and strides of the views, and computes the
owner and the writers of any byte. So the storage may be very large. The HTML uses no network, and no HTML ids. All
names that a user gives are escaped. The same records give the same HTML.
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
"""A storage must have fewer bytes than this number, because JavaScript's integers are exact only below 2**53."""

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
"""Longest name or title that is shown, in characters. A longer text is cut."""

SWATCH = "display:inline-block;width:20px;height:11px;margin-right:4px;"
"""Style of a swatch in the legend. It stands in the tag, because an untrusted notebook has no style sheet."""

Frames = Sequence[tuple[str, bytes]]
"""The steps of a time lapse, in order. A step has a title, and all bytes of the map's window after the step."""


class MapView:
    """Interactive maps for a notebook. A notebook shows a MapView that is the value of a notebook cell.

    ``html`` and ``text`` are two renderings of the maps. Maps with the same window and storage size share the pointer,
    the selection and the zoom.

    Args:
        maps: one map, or a mapping of titles to maps.
        row_bytes: bytes per row. If it is the page size of the cache, each row is one page.
        finding: a finding to mark on each map that shows its place.
        beside: True puts the maps side by side, except on a narrow screen.
        frames: a time lapse: title and bytes of the window after each step. This is possible only for one map.
        png: True adds a figure for programs that show no HTML. The figure needs matplotlib.

    Raises:
        ValueError: there is no map, a map is empty, there are frames but several maps, a frame has another length than
            the window, the finding cannot be marked, or a storage has 2**53 bytes or more.
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
        """A text for readers who do not see the maps: the counts of the maps, and the steps of a time lapse."""
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
            lines.append(f"Then {title}: {count} bytes lie in byte ranges that changed{where}.")
        return lines

    @cached_property
    def _changes(self) -> list[tuple[bytes, list[tuple[int, int]]]]:
        """For each frame, the bytes after the frame, and the byte ranges that the frame changed."""
        if not self.frames:
            return []
        (record,) = self.maps.values()
        planes = [record.values, *(bytes(after) for _, after in self.frames)]
        return [(after, _differences(before, after)) for before, after in zip(planes[:-1], planes[1:], strict=True)]

    @property
    def html(self) -> str:
        """The maps with their style and script, as HTML that can stand anywhere in a page."""
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
        """Return the number of the hue for each :func:`~kvviz.show.describe.hue_key`.

        Views that own no byte of the window get a number too.
        """
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
        """Return the line above a map that shows the finding. Return "" if the map does not show it.

        The line says who writes the marked bytes, or where the marked element belongs.
        """
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
                f"the map {title!r} has a storage of {record.storage.nbytes} bytes, but a browser cannot count exactly "
                f"above {MAX_BYTES - 1}: show this map as a text or a figure"
            )
    if finding is not None and finding.kind not in POINTED:
        raise ValueError(
            f"a map cannot mark a finding of kind {finding.kind!r}, but only of kind {', '.join(POINTED)}: "
            f"call MapView without finding=..."
        )
    if finding is not None and not finding.example:
        raise ValueError(f"this finding of kind {finding.kind!r} has no place: call MapView without finding=...")
    if not frames:
        return
    if len(maps) != 1:
        raise ValueError(f"frames need exactly one map, but {len(maps)} maps are given: give one map")
    (record,) = maps.values()
    if record.values is None:
        raise ValueError("frames need a map with values, but this map has none: make it with byte_map(..., values=...)")
    for title, after in frames:
        if len(after) != len(record.values):
            raise ValueError(
                f"frame {title!r} has {len(after)} bytes, but the map's window has {len(record.values)}: "
                f"give all bytes of the window"
            )


def _views(record: ByteMap, hues: Mapping) -> dict:
    """Return the views as data for the script.

    A form has the role, the half (K or V), the shape, the strides, the item size and the axis names of a view. Views
    with equal forms share one entry of ``forms``. If a writer is also an owner, the list of writers has only the number
    of this owner.
    """
    forms: dict[str, int] = {}
    everybody = (*record.owners, *record.writers, *record.beneath)
    ids = {name: n for n, name in enumerate(dict.fromkeys(view.name for view in everybody))}

    def shown(view: View) -> list:
        """Return name, form, offset in bytes, hue, id and layer of a view, and the id of its scale view.

        If the last fields are None, they are left out.
        """
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
        while fields[-1] is None:  # this makes the HTML shorter, because a large cache has hundreds of views
            fields.pop()
        return fields

    numbers = {view: n for n, view in enumerate(record.owners)}
    owners = [shown(view) for view in record.owners]
    writers = [numbers[view] if view in numbers else shown(view) for view in record.writers]
    beneath = [shown(view) for view in record.beneath]
    return {"owners": owners, "writers": writers, "beneath": beneath, "forms": [json.loads(form) for form in forms]}


def _strip(record: ByteMap) -> list[tuple[int, int, int]]:
    """Return three numbers for each column of the strip: bytes owned, bytes written, and a code for its main owner.

    The main owner owns the most bytes of the column. If it has the number n in the list of owners, the code is 2 * n,
    or 2 * n + 1 if views of other layers share the column. Without an owner, the code is -2. If the map shows the whole
    storage, it needs no strip, and the list is empty.
    """
    if record.stop - record.start == record.storage.nbytes:
        return []
    number = {view.name: n for n, view in enumerate(record.owners)}
    columns = overview(record)
    return [(c.owned, c.written, (number[c.most] if c.most else -1) * 2 + c.shared) for c in columns]


def _differences(before: bytes, after: bytes, near: int = 4) -> list[tuple[int, int]]:
    """Return the byte ranges in which two byte strings differ. Ranges less than ``near`` bytes apart are joined."""
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
        swatches = "".join(
            f'<span class="kvviz-swatch" style="{SWATCH}{_css(style)}"></span>' for style in entry.styles
        )
        items.append(f'<li data-kvviz="{entry.key}">{swatches}{escape(clipped(entry.text))}</li>')
    return f'<ul class="kvviz-legend" style="list-style:none;padding:0">{"".join(items)}</ul>'


def _css(style: Style) -> str:
    """Return the CSS of a swatch: the colour of the style, mixed with the background of the page.

    A browser without ``color-mix`` mixes the colour with white.
    """
    if style.hatch and style.hatch.swatch_angle is not None:
        line = f"{style.fill} 0 {SWATCH_STEP - 1}px,{HATCH_INK} {SWATCH_STEP - 1}px {SWATCH_STEP}px"
        return f"background:repeating-linear-gradient({style.hatch.swatch_angle}deg,{line})"
    if style.share == 0:
        return "background:var(--kvviz-paper)"
    mixed = f"color-mix(in srgb,{style.colour} {style.share:.0%},var(--kvviz-paper))"
    return f"background:{style.fill};background:{mixed}"


def _css_colours() -> str:
    """Return the colours that ``map.css`` uses outside JupyterLab, where no theme defines colours."""
    return (
        f".kvviz{{--kvviz-default-ink:{colours.INK};--kvviz-default-soft:{colours.GREY};--kvviz-white:{colours.WHITE}}}"
    )


def clipped(text: str, most: int = MOST_LETTERS) -> str:
    """Return a text that cannot disturb the text around it. Control characters are escaped, and a long text is cut."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[:most]}…"


def packed(data: bytes) -> str:
    """Return bytes as text: five characters for four bytes. No character needs to be escaped in a script."""
    return base64.b85encode(data).decode("ascii").translate(SAFE)


SAFE = str.maketrans("<>&", ",:.")
"""Three characters of base 85 have a meaning in HTML. They are replaced by characters that base 85 does not use."""


def _json(data: dict) -> str:
    """Return JSON that may stand in a script. It contains no ``<``, because ``</script>`` would end the script."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    """Return the text of a file of ``assets/``, without indentation and without the lines of comments."""
    text = files("kvviz.show").joinpath("assets", name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
