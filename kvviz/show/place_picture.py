"""Draws a :class:`~kvviz.show.place_window.PlaceWindow` as one SVG picture with a key, and as plain text.

The picture works without scripts. The style sheet :data:`STYLE` has its light and dark colours.
"""

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from kvviz.show.byte_map import half_of
from kvviz.show.colours import CONTESTED, MISPLACED, UNOWNED, owned
from kvviz.show.describe import hue_key
from kvviz.show.live_map import clipped
from kvviz.show.place_window import OUTSIDE, PlaceWindow, Row, Span

WIDTH, LEFT, RIGHT = 400, 62, 396
"""Width of the picture, and smallest and largest x of the bytes. A phone shows one of these units as 0.9 pixels."""

LANE, GAP, LINE, BETWEEN = 22, 3, 15, 26
"""Heights: a bar, the gap between two bars, a line of text, and the free space between two rows."""

LETTER_WIDTH = 6.6
"""Width of a letter. It is used to choose a text that fits on a bar."""

STYLE = files("kvviz.show").joinpath("assets", "place_picture.css").read_text(encoding="utf-8")
"""The style of all pictures of a page."""

MOST_NAMES = 3
"""For bytes of several views, the key lists at most this many names, and the number of the other names."""

HATCH_STEP = 6
"""Distance between two lines of a hatch, in units of the picture."""

FILLS = {
    "contested": CONTESTED.colour,
    "misplaced": MISPLACED.colour,
    "unreached": "var(--paper)",
    "unowned": f"color-mix(in srgb,{UNOWNED.colour} 28%,var(--paper))",
    OUTSIDE: "none",
}

SHARED = ("contested", "used by several views that must not share bytes")
FOREIGN = {
    "used by": ("misplaced", "used by an element that does not belong here"),
    "taken by": ("misplaced", "taken, but of another block"),
}
"""Entries of the key for hatched bytes: the state, and its meaning. The entry FOREIGN depends on the picture."""

NOBODY = {"unowned": "nobody", "unreached": "nobody", OUTSIDE: "outside the storage"}
"""Text on bytes without a view, by their state."""


def picture(window: PlaceWindow, alone: bool) -> str:
    """Return the picture, its key and its text as HTML.

    Args:
        alone: True if all views lie in one storage. Then the rows do not name the storage.
    """
    letters = _letters(window)
    key = "".join(f"<li><b>{letter}</b> {escape(text)}</li>" for letter, text in _key(letters))
    states = {span.state for row in window.rows for span in row.users if span.names}
    for state, text in (SHARED, FOREIGN[window.used]):
        key += f"<li>{_swatch(state)} {text}</li>" if state in states else ""
    return (
        f'<figure class="kvviz-place">{_svg(window, letters, alone)}<ul class="key">{key}</ul>'
        f"<details><summary>The picture as text</summary>\n"
        f'<pre tabindex="0">{escape(as_text(window))}</pre></details></figure>'
    )


def _swatch(state: str) -> str:
    bar = f'<rect width="20" height="11" style="fill:{FILLS[state]}"/>{_hatch(state, 0, 20, 0, 11)}'
    return f'<svg width="20" height="11" aria-hidden="true">{bar}</svg>'


def as_text(window: PlaceWindow) -> str:
    """Return the rows of a window as plain text, with the names of all views."""
    lines = []
    for row in window.rows:
        lines.append(f"{row.storage.name}, bytes [{row.start}, {row.stop}) of {row.storage.nbytes}")
        for word, spans in (("belongs to", row.owners), (window.used, row.users)):
            lines += [f"  {word}"] if spans else []
            for span in spans:
                names = f"{len(span.names)} views: {'; '.join(span.names)}" if len(span.names) > 1 else span.names[:1]
                who = (names if isinstance(names, str) else "".join(names)) or NOBODY.get(span.state, "nobody")
                wrong = "" if span.state in ("right", "unowned", OUTSIDE) or not span.names else f" ({span.state})"
                lines.append(f"    [{span.start}, {span.stop})  {who}{wrong}")
        lines += [f"  [{mark.start}, {mark.stop})  {mark.text}" for mark in row.marks]
    return "\n".join(lines)


def _letters(window: PlaceWindow) -> dict[tuple[str, ...], str]:
    """Return the text on the bytes of each view or group of views: ``A`` for a view, ``80 views`` for a group.

    If a second group also has 80 views, its text is ``80 views b``.
    """
    found: dict[tuple[str, ...], str] = {}
    groups: Counter = Counter()
    for row in window.rows:
        for span in (*row.owners, *row.users):
            if span.names in found or not span.names:
                continue
            number, count = len(found) - groups.total(), len(span.names)
            if count == 1:
                found[span.names] = chr(ord("A") + number) if number < 26 else str(number)
            else:
                more = f" {chr(ord('a') + min(groups[count], 25))}" if groups[count] else ""
                found[span.names] = f"{count} views{more}"
                groups[count] += 1
    return found


def _key(letters: dict[tuple[str, ...], str]) -> list[tuple[str, str]]:
    """Return the label and the names of each view or group. A long list of names is cut, and says how many are left."""
    entries = []
    for names, label in letters.items():
        shown, left = ", ".join(map(clipped, names[:MOST_NAMES])), len(names) - MOST_NAMES
        entries.append((label, f"{shown} and {left} more" if left > 0 else shown))
    return entries


def _svg(window: PlaceWindow, letters: dict, alone: bool) -> str:
    parts, y, columns = [], 4.0, []
    several = len(window.rows) > 1
    for number, row in enumerate(window.rows):
        if number:
            parts.append(_gap(window, y + 12))
            y += BETWEEN
        where = "" if alone else f"{clipped(row.storage.name, 24)}, "
        parts.append(_text(RIGHT, y + 10, f"{where}bytes {row.start:,} to {row.stop - 1:,}", "end", "soft"))
        y += LINE
        above = several and number
        if above:
            parts += _labels(row, y + 10, columns=False)
            y += LINE
        if not several and window.arrow:
            y += LINE  # room for the arrow
        top = y
        for word, spans in (("belongs to", row.owners), (window.used, row.users)):
            if spans:
                parts.append(_text(0, y + 15, word, "start", "soft"))
                parts += [_bar(row, span, y, letters) for span in spans]
                y += LANE + GAP
        bottom = y - GAP
        for mark in row.marks:
            a, b = _x(row, mark.start), _x(row, min(mark.stop, row.stop))
            frame = f'x="{a - 1:.1f}" y="{top - 2:.1f}" width="{b - a + 2:.1f}" height="{bottom - top + 4:.1f}"'
            parts.append(f'<rect class="mark" {frame}/>')
            columns.append((mark.text, (a + b) / 2, top - 2, bottom + 2))
        if not above:
            for line in _labels(row, y + 10, columns=not several):
                parts.append(line)
            y += LINE * (1 if several else len(row.marks))
    parts += _arrow(columns, several) if window.arrow else []
    alt = escape(clipped(as_text(window), 1500))
    return f'<svg viewBox="0 0 {WIDTH} {y + 6:.0f}" role="img" aria-label="{alt}">{"".join(parts)}</svg>'


def _x(row: Row, byte: int) -> float:
    return LEFT + (RIGHT - LEFT) * (byte - row.start) / (row.stop - row.start)


def _bar(row: Row, span: Span, y: float, letters: dict) -> str:
    a, b = _x(row, span.start), _x(row, span.stop)
    if span.state == "right":
        style = owned(_hue(span, letters), span.role, half_of(span.names[0].partition(",")[0]))
        fill = f"color-mix(in srgb,{style.colour} {style.share:.0%},var(--paper))"
    else:
        fill = FILLS[span.state]
    label = letters[span.names] if span.names else NOBODY.get(span.state, "nobody")
    texts = (label, label.replace(" views", "") if span.names else "–")
    left, right = _free(row, span)
    text = next((text for text in texts if len(text) * LETTER_WIDTH < right - left), "")
    label = _text((left + right) / 2, y + 15, text, "middle", "on") if text else ""
    kind = " dashed" if span.state == OUTSIDE else ""
    size = f'x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{LANE}"'
    return f'<rect class="bar{kind}" {size} style="fill:{fill}"/>{_hatch(span.state, a, b, y, LANE)}{label}'


def _hatch(state: str, left: float, right: float, top: float, height: float) -> str:
    """Return the lines over contested bytes, and the crossed lines over misplaced bytes."""
    if state not in ("contested", "misplaced"):
        return ""
    lines, x = [], left - height
    while x < right:
        a, b = max(x, left), min(x + height, right)
        if a < b:
            lines.append(f"M{a:.1f} {top + height - (a - x):.1f}L{b:.1f} {top + height - (b - x):.1f}")
            if state == "misplaced":
                lines.append(f"M{a:.1f} {top + (a - x):.1f}L{b:.1f} {top + (b - x):.1f}")
        x += HATCH_STEP
    return f'<path class="hatch" d="{"".join(lines)}"/>'


def _free(row: Row, span: Span) -> tuple[float, float]:
    """Return the widest part of a bar without the frame of a mark: its smallest x and its largest x."""
    edges = {edge for mark in row.marks for edge in (mark.start, mark.stop) if span.start < edge < span.stop}
    cuts = [_x(row, byte) for byte in sorted({span.start, span.stop} | edges)]
    return max(zip(cuts, cuts[1:], strict=False), key=lambda part: part[1] - part[0])


def _hue(span: Span, letters: dict) -> int:
    key = hue_key(span.names[0])
    return key if isinstance(key, int) else list(letters).index(span.names)


def _labels(row: Row, y: float, columns: bool) -> list[str]:
    """Return the texts of the marks, one line per mark. If ``columns`` is True, a text is centred under its mark."""
    lines = []
    for number, mark in enumerate(row.marks):
        middle = (_x(row, mark.start) + _x(row, min(mark.stop, row.stop))) / 2
        x, anchor = (middle, "middle") if columns else (middle + 8, "start")
        lines.append(_text(min(x, RIGHT - 34), y + number * LINE, mark.text, anchor, "strong"))
    return lines


def _gap(window: PlaceWindow, y: float) -> str:
    if not window.left_out:
        return ""
    return _text(0, y, f"{window.left_out:,} bytes between, not drawn", "start", "soft")


def _arrow(columns: Sequence[tuple[str, float, float, float]], several: bool) -> list[str]:
    """Return an arrow from the place where the element belongs to the place where it lies."""
    lies, belongs = (next(one for one in columns if one[0].startswith(word)) for word in ("lies", "belongs"))
    if several:
        up = lies[2] < belongs[2]
        start, end = (belongs[2], lies[3] + 6) if up else (belongs[3], lies[2] - 6)
        path = f"M{belongs[1]:.1f} {start:.1f}L{lies[1]:.1f} {end:.1f}"
        tip = f"M{lies[1] - 4:.1f} {end:.1f}h8l-4 {-6 if up else 6}z"
    else:
        top = lies[2]
        path = f"M{belongs[1]:.1f} {top:.1f}v-9H{lies[1]:.1f}v3"
        tip = f"M{lies[1] - 4:.1f} {top - 6:.1f}h8l-4 6z"
    return [f'<path class="arrow" d="{path}"/><path class="tip" d="{tip}"/>']


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
