"""What a hand does to a map in a browser, and what an eye reads there."""

import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.show.byte_map import ByteMap, byte_map

MAPS = "[...document.querySelectorAll('canvas[role=application]')]"


def ask(page, call: str, n: int = 0):
    """What the nth map answers: ``ask(page, "where(5)")``."""
    return page.evaluate(f"{MAPS}[{n}].kvviz.{call}")


def canvas(page, n: int = 0):
    return page.locator("canvas[role=application]").nth(n)


def place(page, byte: int, n: int = 0) -> tuple[float, float]:
    """The middle of a byte, in the window."""
    where, box = ask(page, f"where({byte})", n), canvas(page, n).bounding_box()
    assert where["shown"], byte
    return box["x"] + where["x"], box["y"] + where["y"]


def hover(page, byte: int, n: int = 0) -> None:
    page.mouse.move(*place(page, byte, n))


def tips(page) -> list[list[str] | None]:
    """The lines of each map's tooltip, None where it is hidden."""
    return page.evaluate(
        "[...document.querySelectorAll('.kvviz-tip')].map(tip => getComputedStyle(tip).display === 'none' ? null"
        " : [...tip.children].map(line => line.textContent))"
    )


def said(page, n: int = 0) -> list[str]:
    """The lines that a screen reader is given."""
    return page.locator(".kvviz-said").nth(n).text_content().split("\n")


def pixel(page, byte: int, n: int = 0) -> tuple[int, int, int]:
    """The colour on white near the lower edge of a byte, where no word is in the way."""
    script = f"""([byte, n]) => {{
        const canvas = {MAPS}[n], at = canvas.kvviz.where(byte), ratio = devicePixelRatio;
        const [x, y] = [Math.round(at.x * ratio), Math.round((at.y + 6) * ratio)];
        return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
    }}"""
    *colour, alpha = page.evaluate(script, [byte, n])
    return tuple(round(255 + (part - 255) * alpha / 255) for part in colour)


def giant() -> tuple[CacheSpec, ByteMap, ByteMap]:
    """A cache of 44 GiB without values: a window in its middle, and its last block."""
    spec = CacheSpec(28, 50_269, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "meta")
    owners, claims = cache.owners(), cache.writers(cache.carve_scales("shape"))
    last = cache.storage_of(0).nbytes
    middle = byte_map(owners, claims, window=(1 << 35, (1 << 35) + 65_536))
    return spec, middle, byte_map(owners, claims, window=(last - 28 * spec.page_size_bytes, last))


def one_stranger() -> tuple[CacheSpec, ByteMap]:
    """Only layer 1 writes scales, by the strides of the shape: into cells of layers 0 and 2, and its own."""
    spec = CacheSpec(3, 3, 2, 2, 16, "int8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "cpu")
    cache.storages[0].copy_(torch.arange(1440, dtype=torch.uint8))
    scales = cache.writers(cache.carve_scales("shape"))[2:4]
    return spec, byte_map(cache.owners(), scales, values=cache.storages[0], kv_cache_dtype=spec.kv_cache_dtype)


def first(record: ByteMap, state: str) -> int:
    """The first byte in a state."""
    return next(run.start for run in record.ranges if run.state == state)
