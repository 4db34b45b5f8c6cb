"""The byte map as plain text: for terminals, logs and screen readers."""

from kvviz.show.byte_map import ByteMap, ByteRange, rows

LEGEND = "k v data of K, V   s scale   # contested   ! misplaced   _ not reached by its owner   . unowned"


def letter(run: ByteRange) -> str:
    """One character for what a run of bytes is."""
    marks = {"contested": "#", "misplaced": "!", "unreached": "_", "unowned": "."}
    if run.state != "right":
        return marks[run.state]
    return "s" if run.owner.role == "scale" else (run.owner.half.lower() or "d")


def render_text(record: ByteMap, row_bytes: int = 64) -> str:
    """Rows of characters, one a byte, with the offset of each row's first byte and whose row it is.

    Rows that repeat the row before are squeezed to one line that counts them, as hexdump does.
    """
    lines = [f"{record.storage.name}: bytes [{record.start}, {record.stop}) of {record.storage.nbytes}"]
    before, skipped = None, 0
    for row in rows(record, row_bytes):
        strip = "".join(letter(run) * (run.stop - run.start) for run in row.ranges)
        if strip == before:
            skipped += 1
            continue
        if skipped:
            lines.append(f"{'*':>10} {skipped} more such rows")
        lines.append(f"{row.start:>#10x} |{strip}| {row.label}".rstrip())
        before, skipped = strip, 0
    if skipped:
        lines.append(f"{'*':>10} {skipped} more such rows")
    return "\n".join([*lines, LEGEND])
