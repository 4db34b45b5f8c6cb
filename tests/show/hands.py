"""Move the pointer on a map in a browser, and read the map's texts and pixels."""

import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import ByteMap, byte_map

MAPS = "[...document.querySelectorAll('canvas[role=application]')]"


def ask(page, call: str, n: int = 0):
    """Return the answer of the nth map to a call, for example ``ask(page, "where(5)")``."""
    return page.evaluate(f"{MAPS}[{n}].kvviz.{call}")


def canvas(page, n: int = 0):
    return page.locator("canvas[role=application]").nth(n)


def place(page, byte: int, n: int = 0) -> tuple[float, float]:
    """Return the middle of a byte, in coordinates of the window."""
    where, box = ask(page, f"where({byte})", n), canvas(page, n).bounding_box()
    assert where["shown"], byte
    return box["x"] + where["x"], box["y"] + where["y"]


def hover(page, byte: int, n: int = 0) -> None:
    page.mouse.move(*place(page, byte, n))


def tips(page) -> list[list[str] | None]:
    """Return the lines of each map's tooltip, or None for a hidden tooltip."""
    return page.evaluate(
        "[...document.querySelectorAll('.kvviz-tip')].map(tip => getComputedStyle(tip).display === 'none' ? null"
        " : [...tip.children].map(line => line.textContent))"
    )


def selected_lines(page, n: int = 0) -> list[str]:
    """Return the lines below the nth map, which a screen reader reads."""
    return page.locator(".kvviz-selected").nth(n).text_content().split("\n")


def pixel(page, byte: int, n: int = 0) -> tuple[int, int, int]:
    """Return the colour, over white, near the lower edge of a byte. No text is drawn there."""
    script = f"""([byte, n]) => {{
        const canvas = {MAPS}[n], at = canvas.kvviz.where(byte), ratio = devicePixelRatio;
        const [x, y] = [Math.round(at.x * ratio), Math.round((at.y + 6) * ratio)];
        return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
    }}"""
    *colour, alpha = page.evaluate(script, [byte, n])
    return tuple(round(255 + (part - 255) * alpha / 255) for part in colour)


def giant() -> tuple[CacheSpec, ByteMap, ByteMap]:
    """Return a cache of 44 GiB without values, as two maps: a window in the middle, and the last block."""
    spec = CacheSpec(28, 50_269, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "meta")
    owners, writers = cache.owners(), cache.writers(cache.carve_scales("shape"))
    last = cache.storage_of(0).nbytes
    middle = byte_map(owners, writers, window=(1 << 35, (1 << 35) + 65_536))
    return spec, middle, byte_map(owners, writers, window=(last - 28 * spec.page_size_bytes, last))


def one_stranger() -> tuple[CacheSpec, ByteMap]:
    """Return a map on which only layer 1 writes scales.

    The scale views are carved from the shape, so they also write into layers 0 and 2.
    """
    spec = CacheSpec(3, 3, 2, 2, 16, "int8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "cpu")
    cache.storages[0].copy_(torch.arange(1440, dtype=torch.uint8))
    scales = cache.writers(cache.carve_scales("shape"))[2:4]
    return spec, byte_map(cache.owners(), scales, values=cache.storages[0], kv_cache_dtype=spec.kv_cache_dtype)


def first(record: ByteMap, state: str) -> int:
    """Return the first byte in a state."""
    return next(stretch.start for stretch in record.ranges if stretch.state == state)
