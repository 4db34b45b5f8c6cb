"""Interactive byte maps: one self-contained piece of HTML, made from the same records as the text and the figure.

It is an image that a small inline script turns into a canvas: where no script runs (an untrusted notebook, paper)
the image stays. The script gets the views and works out any byte of a storage of any size. It needs no network and no
ids; everything that a user named is escaped. The same records give the same bytes.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from html import escape
from importlib.resources import files

from kvviz.audit.findings import ARROW, FRAME, Finding
from kvviz.audit.view import View
from kvviz.show.byte_map import ByteMap, half_of
from kvviz.show.byte_map_text import render_text
from kvviz.show.colours import DATA_TINT, FIXED, HUES, ORANGE, RED, UNREACHED, Entry, Style, tint
from kvviz.show.describe import MOST_WRITERS, alt_text, counts, entries, hue_key, hues_of, scale_of
from kvviz.show.overview import overview
from kvviz.show.picture import picture
from kvviz.show.pointing import POINTED, claim_of, shows

MAX_BYTES = 1 << 53
"""Addresses that the browser's numbers hold exactly."""

STRINGS_OR_BLANKS = {
    "js": r"""("[^"]*"|'[^']*'|`[^`]*`)|\s*([-+*/<>=!&|,;:?{}()\[\]]+)\s*""",
    "css": r"""("[^"]*")|\s*([,;{}])\s*""",
}
"""What is kept of a line of script or style as it is, or the punctuation whose blanks are left out."""

SCRIPT = ("start.js", "views.js", "words.js", "looks.js", "drawing.js", "map.js")
"""The script's parts in order; together they are one function."""

MOST_LETTERS = 160
"""Letters of a name or title that are shown."""

Frames = Sequence[tuple[str, bytes]]
"""What was done, and all bytes of the map's window after it; one after the other."""


class MapView:
    """Maps as a notebook shows them; ``html`` and ``text`` are the two renderings.

    Args:
        maps: titles and their maps, or one map.
        row_bytes: bytes a row; the page size gives a row a page.
        finding: a finding to point at wherever a map shows it.
        beside: the maps side by side (narrow screens stack them).
        frames: a time lapse for the one map: titles and the window's bytes after each step.
        png: whether front ends without HTML get a picture too.

    Maps of one window share hover, selection and zoom.

    Raises:
        ValueError: no map, an empty one, frames for several maps or of another length, a finding that has no
            place, or a storage beyond 2**53 bytes.
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
        _check(self.maps, row_bytes, finding, frames)
        row_bytes = min(row_bytes, max(record.stop - record.start for record in self.maps.values()))
        self.row_bytes, self.finding, self.beside, self.frames, self.png = row_bytes, finding, beside, frames, png

    @property
    def alt_text(self) -> str:
        """What is shown, with the counts, for those who do not see it."""
        return " ".join([alt_text(self.maps, self.finding), *self._steps()])

    @property
    def text(self) -> str:
        """The plain text twin."""
        told = [f"{title}\n{render_text(record, self.row_bytes)}" for title, record in self.maps.items()]
        said = ["\n".join(self._steps())] if self.frames else []
        return "\n\n".join([*told, *said, *([str(self.finding)] if self.finding else [])])

    def _steps(self) -> list[str]:
        """What each frame changed, in words."""
        said = []
        for (title, _), (_, changes) in zip(self.frames, self._changes, strict=True):
            count = sum(stop - first for first, stop in changes)
            where = f", the first of bytes [{changes[0][0]}, {changes[0][1]}) of the window" if changes else ""
            said.append(f"Then {title}: {count} bytes lie in stretches that changed{where}.")
        return said

    @cached_property
    def _changes(self) -> list[tuple[bytes, list[tuple[int, int]]]]:
        """For each frame the bytes after it, and the stretches that it changed."""
        if not self.frames:
            return []
        (record,) = self.maps.values()
        planes = [record.values, *(bytes(after) for _, after in self.frames)]
        return [(after, _differences(before, after)) for before, after in zip(planes[:-1], planes[1:], strict=True)]

    @property
    def html(self) -> str:
        """The maps and their script, to be put anywhere into a page."""
        hues = hues_of(self.maps.values())
        for record in self.maps.values():
            for view in (*record.owners, *record.writers, *record.beneath):
                key = hue_key(view.name)
                hues.setdefault(key, max(hues.values(), default=-1) + 1 if isinstance(key, str) else key)
        drawn = [self._figure(title, record, hues) for title, record in self.maps.items()]
        side = " kvviz-side" if self.beside and len(drawn) > 1 else ""
        data = {
            "maps": [self._data(record, hues) for record in self.maps.values()],
            "hues": HUES,
            "red": RED,
            "orange": ORANGE,
            "most": MOST_WRITERS,
        }
        script = "\n".join(map(_asset, SCRIPT)).replace('"@DATA@"', _json(data))
        body = f'<div class="kvviz{side}">{"".join(drawn)}</div>'
        return f"<style>{_asset('map.css')}</style>{body}<script>{script}</script>"

    def _figure(self, title: str, record: ByteMap, hues: Mapping) -> str:
        png, rows = picture(record, self.row_bytes, hues)
        whole = -(-(record.stop - record.start) // self.row_bytes)
        cut = f" The picture shows the first {rows} of {whole} rows." if rows < whole else ""
        geometry = "" if record.values is not None else " Geometry only: the bytes' values are not known."
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
        """What the finding says of this map, in a line above it."""
        if self.finding is None or not shows(record, self.finding):
            return ""
        first, *others = self.finding.example
        if self.finding.drawing == FRAME:
            told = claim_of(self.finding, record.at(first.start_bytes).stop - first.start_bytes)
        else:
            told = f"{first.text} is meant at byte {others[0].start_bytes} and lands at byte {first.start_bytes}"
        return f'<div class="kvviz-note">{escape(clipped(told, 400))}</div>'

    def _data(self, record: ByteMap, hues: Mapping) -> dict:
        finding = self.finding if self.finding and shows(record, self.finding) else None
        return {
            "nbytes": record.storage.nbytes,
            "start": record.start,
            "stop": record.stop,
            "row": self.row_bytes,
            "mode": record.kv_cache_dtype,
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
    """Titles and maps; one map alone is titled by its window."""
    if isinstance(maps, ByteMap):
        return {f"bytes {maps.start} to {maps.stop}": maps}
    if not maps or not isinstance(maps, Mapping):
        raise ValueError("there is no map to show: give one ByteMap, or a mapping of titles to maps")
    for title, record in maps.items():
        if not isinstance(title, str) or not isinstance(record, ByteMap):
            raise ValueError(
                f"a title must be a text and stand for a ByteMap, not {title!r} for {type(record).__name__}"
            )
    return dict(maps)


def _check(maps: Mapping[str, ByteMap], row_bytes: int, finding: Finding | None, frames: Frames) -> None:
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1, not {row_bytes}")
    for title, record in maps.items():
        if not record.ranges:
            raise ValueError(f"{title!r} is a map without bytes, [{record.start}, {record.stop}): widen its window")
        if record.storage.nbytes >= MAX_BYTES:
            raise ValueError(f"{title!r}: {record.storage.nbytes} bytes are more than a browser counts exactly (2**53)")
    if finding is not None and (finding.kind not in POINTED or not finding.example):
        raise ValueError(
            f"a map points at the place of a finding of kind {', '.join(POINTED)}, not of this {finding.kind!r}: "
            f"leave finding out"
        )
    if not frames:
        return
    if len(maps) != 1:
        raise ValueError(f"frames show one map step by step, and {len(maps)} are given")
    (record,) = maps.values()
    if record.values is None:
        raise ValueError("frames show how bytes change, and the map has no values: give byte_map(values=...)")
    for title, after in frames:
        if len(after) != len(record.values):
            raise ValueError(f"frame {title!r} has {len(after)} bytes and the map's window {len(record.values)}")


def _views(record: ByteMap, hues: Mapping) -> dict:
    """Owners and writers for the script; a writer that is an owner by its number, and forms that views share once."""
    forms: dict[str, int] = {}
    everybody = (*record.owners, *record.writers, *record.beneath)
    ids = {name: n for n, name in enumerate(dict.fromkeys(view.name for view in everybody))}

    def shown(view: View) -> list:
        """Name, form, offset in bytes, hue, identity; then the layer and the identity of its scale view, if any."""
        form = {
            "role": clipped(view.role),
            "half": half_of(view.name),
            "shape": view.shape,
            "stride": [step * view.itemsize for step in view.stride],
            "itemsize": view.itemsize,
            "axes": [clipped(axis) for axis in view.axes],
        }
        key, number = hue_key(view.name), forms.setdefault(_json(form), len(forms))
        told = [clipped(view.name), number, view.offset * view.itemsize, hues[key], ids[view.name]]
        more = [key if isinstance(key, int) else None, ids.get(scale_of(view.name))]
        return [*told, *more] if more[1] is not None else [*told, *more[:1]] if more[0] is not None else told

    numbers = {view: n for n, view in enumerate(record.owners)}
    owners = [shown(view) for view in record.owners]
    writers = [numbers[view] if view in numbers else shown(view) for view in record.writers]
    beneath = [shown(view) for view in record.beneath]
    return {"owners": owners, "writers": writers, "beneath": beneath, "forms": [json.loads(form) for form in forms]}


def _strip(record: ByteMap) -> list[tuple[int, int, int]]:
    """The overview: bytes owned and written, and twice the number of the owner of the most, plus 1 if it is shared.

    Nothing where the map shows the whole storage anyhow.
    """
    if record.stop - record.start == record.storage.nbytes:
        return []
    number = {view.name: n for n, view in enumerate(record.owners)}
    columns = overview(record)
    return [(c.owned, c.written, (number[c.most] if c.most else -1) * 2 + c.shared) for c in columns]


def _differences(before: bytes, after: bytes, near: int = 4) -> list[tuple[int, int]]:
    """Stretches in which two byte strings differ; those nearer than ``near`` bytes are taken together."""
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
        state = next((state for state, style in FIXED.items() if entry.styles == (style,)), None)
        key = state or f"hue {HUES.index(SHADES[entry.styles[0].fill][0])}"
        swatches = "".join(f'<span class="kvviz-swatch" style="{_css(style)}"></span>' for style in entry.styles)
        items.append(f'<li data-kvviz="{key}">{swatches}{escape(clipped(entry.text))}</li>')
    return f'<ul class="kvviz-legend">{"".join(items)}</ul>'


SHADES = {tint(hue, share): (hue, share) for hue in HUES for share in (1.0, *DATA_TINT.values())}
"""The pure hue of each shade, and how much of it is left."""


def _css(style: Style) -> str:
    """A swatch's background: thinned with the page's own colour where the browser can, else with white."""
    lines = {"/////": "135deg", "xxx": "45deg"}.get(style.hatch)
    if lines:
        return f"background:repeating-linear-gradient({lines},{style.fill} 0 3px,#3a3a3a 3px 4px)"
    if style == UNREACHED:
        return "background:var(--kvviz-paper,#fff)"
    if style.fill not in SHADES:
        return "background:color-mix(in srgb,#969696 28%,var(--kvviz-paper,#fff))"
    hue, share = SHADES[style.fill]
    return f"background:{style.fill};background:color-mix(in srgb,{hue} {share:.0%},var(--kvviz-paper,#fff))"


def clipped(text: str, most: int = MOST_LETTERS) -> str:
    """A name that cannot change anything around it: controls and overrides of direction spelled out, long ones cut."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[:most]}…"


def packed(data: bytes) -> str:
    """Bytes as text, five letters for four bytes, none of which must be escaped in a script."""
    return base64.b85encode(data).decode("ascii").translate(SAFE)


SAFE = str.maketrans("<>&", ",:.")


def _json(data: dict) -> str:
    """JSON that may stand inside a script: no ``<`` that could end it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    """A file of ``assets/``, without its comments, its indentation and the blanks around its punctuation."""
    text = files("kvviz.show").joinpath("assets", name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    lines = (re.sub(r"\s+// .*$", "", line) for line in lines if line and not line.startswith("//"))
    kept = STRINGS_OR_BLANKS[name.rpartition(".")[2]]
    lines = (re.sub(kept, lambda found: found[1] or found[2], line) for line in lines)
    return re.sub(r"(?<=[{},;])\n", "", "\n".join(lines))
