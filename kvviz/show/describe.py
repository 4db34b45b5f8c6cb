"""The texts that every rendering of a byte map shares: legend, counts, alt text, and the tooltip of one byte.

``assets/describe.js`` writes the same tooltips in the browser. A test compares both for every byte.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from decimal import ROUND_HALF_UP, Context, Decimal

from kvviz.audit.findings import FRAME, Finding
from kvviz.audit.view import View
from kvviz.cache.modes import Mode, get_mode
from kvviz.show.byte_map import ByteMap, ByteRange, Part, layer_of
from kvviz.show.colours import HUES, Entry, Style, owned
from kvviz.show.pointing import shows, who_writes
from kvviz.show.states import STATES

MOST_WRITERS = 6
"""Limit of the writers of one byte that a tooltip names. Further writers are only counted."""


def hue_key(view: str) -> int | str:
    """Return the number of the layer in the name of a view. If there is none, return the name.

    Views with the same key have the same hue.
    """
    layer = layer_of(view)
    return view if layer is None else layer


def hues_of(records: Iterable[ByteMap]) -> dict[int | str, int]:
    """Return the number of the hue for each :func:`hue_key`.

    The hue of a layer has the number of the layer. Views without a layer get the numbers after the last layer, in the
    order in which they appear.
    """
    owners = [stretch.owner for record in records for stretch in record.ranges if stretch.owner]
    keys = dict.fromkeys(hue_key(part.view) for part in owners)
    others = [key for key in keys if isinstance(key, str)]
    next_free = max((key for key in keys if isinstance(key, int)), default=-1) + 1
    return {key: next_free + others.index(key) if isinstance(key, str) else key for key in keys}


def style_of(stretch: ByteRange, hues: Mapping[int | str, int]) -> Style:
    """Return the style of the state of a range. If the state is ``right``, return the style of the owner."""
    style = STATES[stretch.state].style
    return style or owned(hues[hue_key(stretch.owner.view)], stretch.owner.role, stretch.owner.half)


def entries(records: Iterable[ByteMap], hues: Mapping[int | str, int]) -> list[Entry]:
    """Return the entries of the legend. First come the hues in the maps, then the states in the maps.

    The first entry also explains the shades.
    """
    ranges = [stretch for record in records for stretch in record.ranges]
    seen = dict.fromkeys(hue_key(stretch.owner.view) for stretch in ranges if stretch.owner)
    shades: dict[int, set[tuple[str, str]]] = {}
    for stretch in ranges:
        if stretch.state == "right":
            hue = hues[hue_key(stretch.owner.view)] % len(HUES)
            shades.setdefault(hue, set()).add((stretch.owner.role, stretch.owner.half))
    made = []
    for hue, found in sorted(shades.items()):
        ordered = sorted(found, key=lambda shade: (shade[0] == "scale", shade))
        styles = tuple(dict.fromkeys(owned(hue, *shade) for shade in ordered))
        meaning = "" if made else f": {', '.join(dict.fromkeys(_shade_name(*shade) for shade in ordered))}"
        names = _names_of([key for key in seen if hues[key] % len(HUES) == hue])
        made.append(Entry(styles, names + meaning, f"hue {hue}"))
    occurring = {stretch.state for stretch in ranges}
    states = [state for state in STATES.values() if state.style and state.name in occurring]
    return made + [Entry((state.style,), state.meaning, state.name) for state in states]


def _shade_name(role: str, half: str) -> str:
    return "scale" if role == "scale" else f"{half} {role}".strip()


def _names_of(keys: list[int | str]) -> str:
    layers = sorted(key for key in keys if isinstance(key, int))
    if len(layers) > 1:
        return f"layers {', '.join(map(str, layers[:3]))}{', …' if len(layers) > 3 else ''}"
    return ", ".join(f"layer {key}" if isinstance(key, int) else key for key in keys)


def alt_text(named: Mapping[str, ByteMap], finding: Finding | None) -> str:
    """Return a text for readers who do not see the maps: the counts of the maps, and the place of the finding."""
    storages = dict.fromkeys(record.storage.name for record in named.values())
    parts = [f"Byte map{'s' * (len(named) > 1)} of {' and '.join(storages)}."]
    for title, record in named.items():
        parts.append(f"{title.rstrip('.')}: {counts(record)}.")
    return " ".join(parts if finding is None else [*parts, _place_of(named, finding)])


def _place_of(named: Mapping[str, ByteMap], finding: Finding) -> str:
    first, rightful = finding.example[0], finding.example[:2][-1]
    place = f"bytes [{first.start_bytes}, {first.stop_bytes})"
    if not any(shows(record, finding) for record in named.values()):
        return f"The finding's first place, {place}, is not on these maps."
    if finding.drawing == FRAME:
        return f"Marked: {who_writes(finding)} {place}; the first is {first.text}."
    return f"Marked: {first.text} belongs at bytes [{rightful.start_bytes}, {rightful.stop_bytes}) and lies at {place}."


def counts(record: ByteMap) -> str:
    """Return a text with the number of bytes in each state."""
    found = [(n, state.counted) for state in STATES.values() if (n := record.count(state.name))]
    size = record.stop - record.start
    if len(found) == 1:
        return f"all {size} bytes {found[0][1]}"
    return f"{size} bytes: {', '.join(f'{n} {counted}' for n, counted in found)}"


def describe(record: ByteMap, byte: int) -> tuple[str, ...]:
    """Return the lines of the tooltip of a byte: its number and value, its owner, its writers, and its decoded value.

    If only the owner writes the byte, there is no line about writers. The interactive map shows the same lines.
    """
    stretch = record.at(byte)
    value = record.value(byte, 1)
    lines = [f"byte {byte} (0x{byte:x})" + ("" if value is None else f": 0x{value[0]:02x} = {value[0]}")]
    if stretch.owner:
        lines.append(_place_in_part((*record.owners, *record.beneath), stretch.owner, byte))
    else:
        lines.append("padding: nobody's byte")
    strangers = [part for part in stretch.writers if part != stretch.owner]
    if stretch.state == "unreached":
        lines.append("nobody writes here")
    elif stretch.state == "contested" or strangers:
        lines.append(f"{stretch.state}: written by {len(stretch.writers)}: {_listed(stretch.writers)}")
    meaning = "" if value is None else decoded(record, stretch, value[0])
    return (*lines, meaning) if meaning else tuple(lines)


def _listed(parts: tuple[Part, ...]) -> str:
    more = len(parts) - MOST_WRITERS
    return "; ".join(map(str, parts[:MOST_WRITERS])) + (f"; and {more} more" if more > 0 else "")


def _place_in_part(views: tuple[View, ...], part: Part, byte: int) -> str:
    view = next(view for view in views if view.name == part.view)
    first, size = span_of(view, part.index)
    return f"{part}, byte {byte - first} of {size}"


def span_of(view: View, index: tuple[int, ...]) -> tuple[int, int]:
    """Return the first byte and the size in bytes of the part of a view at ``index``.

    The part is one element. If the view has a last axis ``byte``, the part is all elements of this axis.
    """
    inner = len(view.shape) - len(index)
    first = view.start_of((*index, *[0] * inner))
    return first, view.itemsize * math.prod(view.shape[len(index) :])


def decoded(record: ByteMap, stretch: ByteRange, value: int) -> str:
    """Return what a byte with this value means to a Triton kernel that reads it.

    Return "" if the map has no mode, or if the mode has no scales in the cache. Also return "" if the owner does not
    write the byte and the state is not ``contested``. If this module cannot decode the code or the scale, return a
    sentence that says so.
    """
    part = stretch.owner
    if record.kv_cache_dtype is None or part is None:
        return ""
    mode = get_mode(record.kv_cache_dtype)
    if not mode.is_per_token_head or (part not in stretch.writers and stretch.state != "contested"):
        return ""
    if part.role == "scale":
        return _decoded_scale(record, mode, span_of(_view(record.owners, part.view), part.index)[0])
    reads, data = _view(record.writers, scale_of(part.view)), _view(record.owners, part.view)
    if part.role != "data" or reads is None or data is None or reads.shape != data.shape[: len(reads.shape)]:
        return ""
    return _decoded_code(record, mode, reads.start_of(part.index[: len(reads.shape)]), value)


def _decoded_scale(record: ByteMap, mode: Mode, start: int) -> str:
    if mode.scale_dtype not in SCALES:
        return f"a {mode.scale_dtype} scale: this map cannot decode its value"
    scale = _scale_at(record, mode, start)
    if scale is None:
        return ""
    return f"a scale: {number(scale[0])}" + (f", zero point {scale[1]}" if mode.has_zero_point else "")


def _decoded_code(record: ByteMap, mode: Mode, scale_start: int, value: int) -> str:
    if not mode.can_decode_bytes or mode.scale_dtype not in SCALES:
        return f"a {mode.code} code with a {mode.scale_dtype} scale: this map cannot decode its value"
    scale = _scale_at(record, mode, scale_start)
    if scale is None:
        return f"the scale of this code is read at byte {scale_start}, whose value is not known"
    size, zero = scale
    products = [f"{number(c)} x {number(size)} = {number((c - zero) * size)}" for c in mode.codes_in(value)]
    notes = [f"codes less the zero point {zero}"] * mode.has_zero_point + ["rotated"] * mode.rotated
    return f"code x scale at byte {scale_start}: {' and '.join(products)}" + (f" ({'; '.join(notes)})" if notes else "")


def scale_of(name: str) -> str:
    """Return the name of the scale view that belongs to a data view: ``layer 0 K scale`` for ``layer 0 K data``."""
    return f"{name.removesuffix(' data')} scale"


def _view(views: tuple[View, ...], name: str) -> View | None:
    return next((view for view in views if view.name == name), None)


SCALES = {"float32": ("<f", "<I"), "float16": ("<e", "<H")}
"""For each dtype of a scale, the two formats in which :mod:`struct` reads it: as a number, and as its bits."""


def _scale_at(record: ByteMap, mode: Mode, start: int) -> tuple[float, int] | None:
    """Return a scale and its zero point. Return None if a byte of the scale is unknown.

    The zero point is 0 if the mode has no zero points.
    """
    raw = record.value(start, mode.scale_bytes)
    if raw is None:
        return None
    size, bits = (struct.unpack(form, raw)[0] for form in SCALES[mode.scale_dtype])
    return size, bits & mode.zero_point_mask


def number(value: float) -> str:
    """Return a number as tooltips show it: as an integer, with six decimals, or with an exponent.

    ``number`` in ``assets/describe.js`` returns the same text.
    """
    if math.isnan(value) or math.isinf(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    exact = Decimal(value)  # with a float, Python would round half to even, but JavaScript rounds half up
    if 1e-3 <= abs(value) < 1e6:
        return f"{exact.quantize(Decimal('1e-6'), ROUND_HALF_UP)}"
    digits, exponent = f"{Context(prec=6, rounding=ROUND_HALF_UP).create_decimal(exact):.5e}".split("e")
    return f"{digits}e{int(exponent)}"
