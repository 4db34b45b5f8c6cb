"""Makes the small picture of a page for its card on the front page."""

import base64
import binascii
import io
import re

from PIL import Image

WIDTH, HEIGHT = 640, 240
"""Size of a small picture in pixels. A page shows it at half this size, so it is sharp on a fine screen."""

_PICTURE = re.compile(r'<img[^>]*? src="data:image/png;base64,([^"]+)"')
_LEAST_HEIGHT = 140
"""Lower pictures are taken only if a page has no other picture. They are strips of a few rows."""


def thumbnail(page: str) -> str:
    """Return the first picture of an HTML page that is high enough, as a small PNG in a data URL. Return "" if none.

    The picture is cut to the shape of the card from its upper left corner, and made smaller.
    """
    pictures = [picture for found in _PICTURE.finditer(page) if (picture := _opened(found[1])) is not None]
    chosen = next((one for one in pictures if one.height >= _LEAST_HEIGHT), pictures[0] if pictures else None)
    if chosen is None:
        return ""
    width = min(chosen.width, max(WIDTH, chosen.height * WIDTH // HEIGHT))
    shown = chosen.convert("RGBA").crop((0, 0, width, min(chosen.height, width * HEIGHT // WIDTH)))
    cut = Image.new("RGB", shown.size, "white")
    cut.paste(shown, mask=shown.getchannel("A"))
    cut.thumbnail((WIDTH, HEIGHT))
    packed = io.BytesIO()
    cut.quantize(64).save(packed, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}"


def _opened(text: str) -> Image.Image | None:
    """Return the picture, or None if it cannot be read."""
    try:
        return Image.open(io.BytesIO(base64.b64decode(text)))
    except (OSError, binascii.Error, ValueError):
        return None
