"""What every rendering of a byte map says: states, counts, the legend, and one byte in words."""

import math
import struct
from collections.abc import Iterable, Mapping
from decimal import ROUND_HALF_UP, Context, Decimal

from kvviz.audit.findings import FRAME, Finding
from kvviz.audit.view import View
from kvviz.show.byte_map import STATES, ByteMap, ByteRange, Part, layer_of
from kvviz.show.colours import FIXED, HUES, Entry, Style, owned
from kvviz.show.pointing import shows

WORDS = {
    "right": "written by their owner alone",
    "contested": "contested: two or more write here (the number says how many)",
    "misplaced": "misplaced: written by another than its owner (L2: by layer 2; !: by another cell of its own layer)",
    "unreached": "nobody writes here: reads find what was left",
    "unowned": "padding: nobody's bytes",
}
MOST_WRITERS = 6
"""Writers of one byte that are named; the others are counted."""


def hue_key(view: str) -> int | str:
    """What a view's colour stands for: its layer, or the view itself if its name says none."""
    layer = layer_of(view)
    return view if layer is None else layer


def hues_of(records: Iterable[ByteMap]) -> dict[int | str, int]:
    """Hue number of each layer (its own number), and behind them of views that name no layer, as they appear."""
    owners = [run.owner for record in records for run in record.ranges if run.owner]
    keys = dict.fromkeys(hue_key(part.view) for part in owners)
    others = [key for key in keys if isinstance(key, str)]
    behind = max((key for key in keys if isinstance(key, int)), default=-1) + 1
    return {key: behind + others.index(key) if isinstance(key, str) else key for key in keys}


def style_of(run: ByteRange, hues: Mapping[int | str, int]) -> Style:
    """How a run is drawn: by its state, or where all is right by its owner."""
    if run.state in FIXED:
        return FIXED[run.state]
    return owned(hues[hue_key(run.owner.view)], run.owner.role, run.owner.half)


def entries(records: Iterable[ByteMap], hues: Mapping[int | str, int]) -> list[Entry]:
    """The legend: the hues that occur with what each shade is, then the states that occur."""
    runs = [run for record in records for run in record.ranges]
    seen = dict.fromkeys(hue_key(run.owner.view) for run in runs if run.owner)
    shades: dict[int, set[tuple[str, str]]] = {}
    for run in runs:
        if run.state == "right":
            hue = hues[hue_key(run.owner.view)] % len(HUES)
            shades.setdefault(hue, set()).add((run.owner.role, run.owner.half))
    made = []
    for hue, found in sorted(shades.items()):
        ordered = sorted(found, key=lambda shade: (shade[0] == "scale", shade))
        styles = tuple(dict.fromkeys(owned(hue, *shade) for shade in ordered))
        what = "" if made else f": {', '.join(dict.fromkeys(_shade(*shade) for shade in ordered))}"
        made.append(Entry(styles, _who([key for key in seen if hues[key] % len(HUES) == hue]) + what))
    states = {run.state for run in runs} & set(FIXED)
    return made + [Entry((FIXED[state],), WORDS[state]) for state in STATES if state in states]


def _shade(role: str, half: str) -> str:
    return "scale" if role == "scale" else f"{half} {role}".strip()


def _who(keys: list[int | str]) -> str:
    layers = sorted(key for key in keys if isinstance(key, int))
    if len(layers) > 1:
        return f"layers {', '.join(map(str, layers[:3]))}{', …' if len(layers) > 3 else ''}"
    return ", ".join(f"layer {key}" if isinstance(key, int) else key for key in keys)


def alt_text(named: Mapping[str, ByteMap], finding: Finding | None) -> str:
    """What maps show, with the counts and what is pointed at, for those who do not see them."""
    parts = [
        f"Byte map{'s' * (len(named) > 1)} of {' and '.join(dict.fromkeys(r.storage.name for r in named.values()))}."
    ]
    for title, record in named.items():
        parts.append(f"{title.rstrip('.')}: {counts(record)}.")
    return " ".join(parts if finding is None else [*parts, _pointed_at(named, finding)])


def _pointed_at(named: Mapping[str, ByteMap], finding: Finding) -> str:
    first, meant = finding.example[0], finding.example[:2][-1]
    if not any(shows(record, finding) for record in named.values()):
        return f"The finding's first place, bytes [{first.start_bytes}, {first.stop_bytes}), is not on these maps."
    if finding.drawing == FRAME:
        told = f"{len(finding.views)} views claim bytes [{first.start_bytes}, {first.stop_bytes}), {first.text} first"
    else:
        told = (
            f"{first.text} is meant at bytes [{meant.start_bytes}, {meant.stop_bytes}) "
            f"and lands at bytes [{first.start_bytes}, {first.stop_bytes})"
        )
    return f"Pointed at: {told}."


def counts(record: ByteMap) -> str:
    """All bytes of a map by state, in words."""
    names = {"unreached": "written by nobody", "unowned": "padding"}
    found = [(n, names.get(state, state)) for state in STATES if (n := record.count(state))]
    size = record.stop - record.start
    if len(found) == 1:
        return f"all {size} bytes {found[0][1]}"
    return f"{size} bytes: {', '.join(f'{n} {name}' for n, name in found)}"


def describe(record: ByteMap, byte: int) -> tuple[str, ...]:
    """One byte in words: place and value; owner and what of it; who else writes there; what it decodes to.

    The interactive map says the same, word for word.
    """
    run = record.at(byte)
    value = record.value(byte, 1)
    lines = [f"byte {byte} (0x{byte:x})" + ("" if value is None else f": 0x{value[0]:02x} = {value[0]}")]
    lines.append(
        f"{_whose((*record.owners, *record.beneath), run.owner, byte)}" if run.owner else "padding: nobody's byte"
    )
    strangers = [part for part in run.writers if part != run.owner]
    if run.state == "unreached":
        lines.append("nobody writes here")
    elif run.state == "contested" or strangers:
        lines.append(f"{run.state}: written by {len(run.writers)}: {_listed(run.writers)}")
    meaning = "" if value is None else decoded(record, run, byte, value[0])
    return (*lines, meaning) if meaning else tuple(lines)


def _listed(parts: tuple[Part, ...]) -> str:
    more = len(parts) - MOST_WRITERS
    return "; ".join(map(str, parts[:MOST_WRITERS])) + (f"; and {more} more" if more > 0 else "")


def _whose(views: tuple[View, ...], part: Part, byte: int) -> str:
    view = next(view for view in views if view.name == part.view)
    first, size = span_of(view, part.index)
    return f"{part}, byte {byte - first} of {size}"


def span_of(view: View, index: tuple[int, ...]) -> tuple[int, int]:
    """First byte of a part and how many it has: an element, or a cell with all of its trailing ``byte`` axis."""
    inner = len(view.shape) - len(index)
    first = view.start_of((*index, *[0] * inner))
    return first, view.itemsize * math.prod(view.shape[len(index) :])


def decoded(record: ByteMap, run: ByteRange, byte: int, value: int) -> str:
    """What a byte means under the map's ``kv_cache_dtype``, read as a kernel would read it; "" if nobody can say."""
    writer = next((part for part in run.writers if part == run.owner), None)
    if record.kv_cache_dtype is None or writer is None and run.state != "contested":
        return ""
    part = run.owner
    if part is None or not record.kv_cache_dtype.endswith("_per_token_head"):
        return ""
    if part.role == "scale":
        scale = _float_at(record, span_of(_view(record.owners, part.view), part.index)[0])
        return "" if scale is None else f"a scale: {number(scale[0])}{_zero_point(record, scale[1])}"
    reads, data = _view(record.writers, scale_of(part.view)), _view(record.owners, part.view)
    if part.role != "data" or reads is None or data is None or reads.shape != data.shape[: len(reads.shape)]:
        return ""
    at = reads.start_of(part.index[: len(reads.shape)])
    scale = _float_at(record, at)
    if scale is None:
        return f"its scale is read at byte {at}, whose value is not shown"
    codes = codes_of(record.kv_cache_dtype, value)
    zero = scale[1] & 15 if record.kv_cache_dtype.startswith("int4") else 0
    products = " and ".join(f"{number(c)} x {number(scale[0])} = {number((c - zero) * scale[0])}" for c in codes)
    shift = f" (codes less the zero-point {zero}; rotated)" if record.kv_cache_dtype.startswith("int4") else ""
    return f"code x scale at byte {at}: {products}{shift}"


def scale_of(name: str) -> str:
    """The name of the scale view that belongs to a data view: ``layer 0 K scale`` for ``layer 0 K data``."""
    return f"{name.removesuffix(' data')} scale"


def _view(views: tuple[View, ...], name: str) -> View | None:
    return next((view for view in views if view.name == name), None)


def _float_at(record: ByteMap, start: int) -> tuple[float, int] | None:
    """A float32 and its bits, where all of its bytes are known."""
    raw = record.value(start, 4)
    return None if raw is None else (struct.unpack("<f", raw)[0], struct.unpack("<I", raw)[0])


def _zero_point(record: ByteMap, bits: int) -> str:
    return f", zero-point {bits & 15}" if record.kv_cache_dtype.startswith("int4") else ""


def codes_of(kv_cache_dtype: str, value: int) -> tuple[float, ...]:
    """The codes in one byte: a signed integer, an e4m3 number, or two nibbles, the low one first."""
    if kv_cache_dtype.startswith("int8"):
        return (value - 256 if value > 127 else value,)
    if kv_cache_dtype.startswith("int4"):
        return (value & 15, value >> 4)
    sign, exponent, mantissa = value >> 7, value >> 3 & 15, value & 7
    if exponent == 15 and mantissa == 7:
        return (math.nan,)
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return (-size if sign else size,)


def number(value: float) -> str:
    """A number as both renderings write it: whole, with six decimals, or with an exponent where it is far from 1."""
    if math.isnan(value) or math.isinf(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    exact = Decimal(value)  # ties are rounded up, as JavaScript rounds them
    if 1e-3 <= abs(value) < 1e6:
        return f"{exact.quantize(Decimal('1e-6'), ROUND_HALF_UP)}"
    digits, exponent = f"{Context(prec=6, rounding=ROUND_HALF_UP).create_decimal(exact):.5e}".split("e")
    return f"{digits}e{int(exponent)}"
