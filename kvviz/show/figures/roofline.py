"""The roofline figure compares the speed of Triton kernels with the speed of the memory."""

from collections.abc import Mapping

from matplotlib.lines import Line2D

from kvviz.show.colours import GREY, HUES, INK
from kvviz.show.figures.canvas import BODY, SMALL, Sheet, settings

MARKERS = {"write": "o", "decode attention": "s"}


def roofline(result: Mapping) -> Sheet:
    """Draw two speed limits of a machine as one line, the roof. Draw the measured speeds of the kernels below the line.

    The time of an empty launch limits a launch with few bytes. The speed of the memory limits a launch with many bytes.
    The roof is the smaller of the two limits. A dashed line shows the speed of a kernel that only reads. Only
    measurements of the per-layer layout are drawn, for every mode.

    Args:
        result: the results of ``benchmarks/kernels.py``. The keys are ``machine``, ``date``, ``ceilings`` (``copy`` and
            ``read`` in GB/s, ``launch`` in microseconds), and ``rows``. Each row has ``kernel``, ``mode``, ``layout``,
            ``bytes``, ``us`` (microseconds), ``GB/s`` and ``share`` (speed divided by the ceiling of the kernel).
    """
    rows = [row for row in result["rows"] if row["kernel"] in MARKERS and row["layout"] == "per-layer"]
    rows = [row for row in rows if row.get("order", "random") == "random"]
    limit, read, launch = (result["ceilings"][name] for name in ("copy", "read", "launch"))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    least, most = min(row["bytes"] for row in rows) / 2, max(row["bytes"] for row in rows) * 2
    best = max(rows, key=lambda row: row["share"])
    words = (
        f"Roofline of {result['machine']}: a copy moves {limit:,.0f} GB/s, an empty launch takes {launch:.1f} "
        f"microseconds. {len(rows)} points, from {rows[0]['GB/s']:,.0f} GB/s for {rows[0]['bytes']:,} bytes to "
        f"{best['share']:.0%} of its ceiling for {best['kernel']}, {best['mode']}. A kernel that only reads moves "
        f"{read:,.0f} GB/s."
    )
    with settings():
        sheet = Sheet(9, 4.4, words)
        ax = sheet.add_axes((0.075, 0.12, 0.66, 0.8))
        knee = limit * launch * 1e3
        ax.plot([least, knee, most], [least / launch / 1e3, limit, limit], color=INK, linewidth=1.5)
        ax.plot([knee, most], [read, read], color=INK, linewidth=1, linestyle="--")
        words = f"read: {read:,.0f}, copy: {limit:,.0f} GB/s"
        ax.annotate(words, (most, read), (-4, 4), fontsize=BODY, ha="right", textcoords="offset points")
        ax.annotate(f"{launch:.1f} µs per launch", (knee * 0.75, limit * 0.75), (-7, -2), fontsize=BODY,
                    ha="right", textcoords="offset points")  # fmt: skip
        for hue, mode in zip(HUES, modes, strict=False):
            for kernel, marker in MARKERS.items():
                found = [row for row in rows if (row["mode"], row["kernel"]) == (mode, kernel)]
                sizes = {row.get("D") for row in found}
                for size in sizes:
                    points = sorted((row["bytes"], row["GB/s"]) for row in found if row.get("D") == size)
                    ax.plot(*zip(*points, strict=True), marker + "-", color=hue, markersize=5, linewidth=1)
        ax.set(xscale="log", yscale="log", xlim=(least, most), ylim=(limit / 100, limit * 1.6))
        ax.xaxis.set_major_formatter(lambda size, _: f"{size / 1e6:,g}")
        ax.yaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
        ax.set_xlabel("useful MB per launch", fontsize=BODY)
        ax.set_ylabel("GB/s", fontsize=BODY)
        ax.set_title(f"{result['machine']}, {result['date']}", fontsize=BODY, loc="left")
        ax.tick_params(labelsize=SMALL)
        ax.grid(which="major", alpha=0.3)
        keys = [Line2D([], [], color=hue, linewidth=3, label=mode) for hue, mode in zip(HUES, modes, strict=False)]
        keys += [Line2D([], [], color=GREY, marker=m, linestyle="", label=name) for name, m in MARKERS.items()]
        sheet.legend(handles=keys, fontsize=BODY, frameon=False, loc="center left", bbox_to_anchor=(0.745, 0.55))
    return sheet
