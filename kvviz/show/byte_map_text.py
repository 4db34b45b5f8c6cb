"""The byte map as plain text, for terminals, logs and screen readers: one letter per byte."""

from kvviz.show.byte_map import ByteMap, ByteRange
from kvviz.show.rows import rows
from kvviz.show.states import STATES

LEGEND = "k v data of K, V   s scale   # contested   ! misplaced   _ written by nobody   . padding"


def letter(stretch: ByteRange) -> str:
    """Return the letter that stands for each byte of a range."""
    if stretch.state != "right":
        return STATES[stretch.state].letter
    return "s" if stretch.owner.role == "scale" else (stretch.owner.half.lower() or "d")


def render_text(record: ByteMap, row_bytes: int = 64) -> str:
    """Return the map as rows of letters. A row begins with the offset of its first byte and ends with its label.

    A row with the same letters as the row before is left out. A line with ``*`` says how many rows are left out.
    """
    lines = [f"{record.storage.name}: bytes [{record.start}, {record.stop}) of {record.storage.nbytes}"]
    before, skipped = None, 0
    for row in rows(record, row_bytes):
        letters = "".join(letter(stretch) * (stretch.stop - stretch.start) for stretch in row.ranges)
        if letters == before:
            skipped += 1
            continue
        lines += _skipped_line(skipped)
        lines.append(f"{row.start:>#10x} |{letters}| {row.label}".rstrip())
        before, skipped = letters, 0
    return "\n".join([*lines, *_skipped_line(skipped), LEGEND])


def _skipped_line(count: int) -> list[str]:
    return [f"{'*':>10} {count} more such row{'s' * (count > 1)}"] if count else []
