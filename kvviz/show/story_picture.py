"""Draws the bug of vLLM issue 48412 as one SVG picture in steps: two maps of the same buffer, side by side.

On the left, scale views come from the strides of each layer. On the right, they come from the shape alone. The steps:

- Step 0: all places for scales are empty.
- Step n: layer n - 1 writes its scales. The places that it writes get its colour.
- Last step: every layer reads its scales back. Places with scales of another layer are marked.

Each rectangle lies at bytes that a view of the cache really covers. The picture needs no script. With
``looping=True``, it plays without end, also as the picture of a README.
"""

from collections import defaultdict
from dataclasses import dataclass
from importlib.resources import files

from kvviz.audit.view import View
from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.spec import CacheSpec
from kvviz.show.colours import GREY, HUES, INK, RED, WHITE, ink_on, tint

ROW, GAP, LABEL, MAP, BETWEEN, TOP, LINE = 17, 3, 116, 292, 34, 42, 17
"""Sizes in units of the picture: height of a row, gap between two rows, width of the labels, width of a map, the space
between two maps, the space for the titles, and the height of a line of text."""

NUMBER = 14
"""A rectangle that is narrower than this has no number."""

STEP_S, REST_S = 1.2, 3.6
"""Seconds of one step, and of the last step, if the picture plays without end."""

TITLES = {
    "strides": ("Where each scale belongs", "scale views from strides (vLLM 0.26.0)"),
    "shape": ("Where the scale views pointed", "scale views from the shape (vLLM 0.25.1)"),
}
"""Two lines over each map, by the way in which scale views are carved."""


@dataclass(frozen=True)
class Tail:
    """The place of one scale.

    Args:
        start: offset of the first byte in the buffer.
        owner: the layer whose scale belongs here.
        writers: the layers that write here, in the order in which they write.
    """

    start: int
    owner: int
    writers: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        """Return True if the owner finds its own scale here."""
        return self.writers == (self.owner,)


class StoryPicture:
    """The picture with a button and a slider, for a notebook. Without scripts, it shows the last step.

    Args:
        cache: a cache with all layers in one buffer. Default: :func:`story_cache`.
    """

    def __init__(self, cache: KVCache | None = None) -> None:
        self.cache = story_cache() if cache is None else cache

    def _repr_html_(self) -> str:
        last = self.cache.spec.num_layers + 1
        return (
            f'<figure class="kvviz-opening"><div class="kvviz-scroll">{story_svg(self.cache)}</div>'
            f'<div class="kvviz-play" hidden><button type="button">▶ Watch the layers write</button>'
            f'<label>step <input type="range" min="0" max="{last}" value="{last}" aria-label="step of the picture">'
            f'</label><output aria-live="polite"></output></div></figure><script>{_asset()}</script>'
        )

    def __repr__(self) -> str:
        steps = range(self.cache.spec.num_layers + 2)
        return "\n".join(f"step {step}: {' | '.join(caption(self.cache, step))}" for step in steps)


def _asset() -> str:
    return files("kvviz.show").joinpath("assets", "story.js").read_text(encoding="utf-8")


def story_cache() -> KVCache:
    """Return the cache of the picture: 4 layers, 4 blocks of one token, one KV head, all layers in one buffer."""
    sizes = {"num_layers": 4, "num_blocks": 4, "block_size": 1, "num_kv_heads": 1, "head_size": 16}
    return allocate(CacheSpec(**sizes, kv_cache_dtype="int8_per_token_head"), "cross-layer NHD", "meta")


def tails(cache: KVCache, carve: str) -> list[Tail]:
    """Return all places of scales, ascending, and who writes them through views of ``carve`` (shape or strides).

    Raises:
        ValueError: a view writes scales to bytes that are no place of a scale.
    """
    writers: dict[int, list[int]] = defaultdict(list)
    for view in cache.writers(cache.carve_scales(carve)):
        for start in view.starts.ravel().tolist():
            writers[start].append(_layer(view))
    owners = {start: _layer(view) for view in _scales(cache) for start in view.starts.ravel().tolist()}
    if outside := sorted(set(writers) - set(owners)):
        raise ValueError(
            f"a scale view writes at byte {outside[0]}, where no scale belongs: the picture cannot show it"
        )
    return [Tail(start, owners[start], tuple(writers[start])) for start in sorted(owners)]


def story_svg(cache: KVCache | None = None, looping: bool = False) -> str:
    """Return the picture as SVG. Class ``kvviz-step-n`` marks what appears in step n, and class ``kvviz-only-n`` what
    only step n shows. Without ``looping``, a page changes the attribute ``data-step`` of the picture.

    Args:
        cache: a cache with all layers in one buffer. Default: :func:`story_cache`.
    """
    cache = story_cache() if cache is None else cache
    steps = cache.spec.num_layers + 2
    maps = [_drawn(cache, carve, LABEL + number * (MAP + BETWEEN)) for number, carve in enumerate(TITLES)]
    bottom = _Map(LABEL, cache.spec.page_size_bytes).y(
        cache.spec.num_layers * cache.spec.page_size_bytes * cache.spec.num_blocks
    )
    width, height = LABEL + 2 * MAP + BETWEEN + 12, bottom + 3 * LINE
    captions = [_texts(cache, step, bottom + LINE + 4) for step in range(steps)]
    style = _looping(steps) if looping else _stepwise(steps)
    ground = f'<rect width="{width}" height="{height}" fill="{WHITE}"/>'
    return (
        f'<svg class="kvviz-story" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'data-step="{steps - 1}" data-steps="{steps}" role="img" aria-label="{_alt(cache)}" '
        f"font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"12\">"
        f"<style>{style}</style>{ground}{_row_names(cache)}{''.join(maps)}{''.join(captions)}</svg>"
    )


def caption(cache: KVCache, step: int) -> tuple[str, str]:
    """Return what a step shows, in words: one sentence for the left map, and one for the right map."""
    layers = cache.spec.num_layers
    wrong = tails(cache, "shape")
    if step == 0:
        return ("All places for scales are empty.", "All places for scales are empty.")
    if step <= layers:
        over = step > 1 and all(len(tail.writers) != 1 for tail in wrong)
        said = f"over the scales of layer {step - 2}" if over else "to the places shown"
        return (
            f"Layer {step - 1} writes its scales into its own cells.",
            f"Layer {step - 1} writes its scales {said}.",
        )
    empty = sum(not tail.writers for tail in wrong)
    return (
        "Each layer reads its own scales.",
        f"Layer {layers - 1} wrote last, so every layer reads its scales. {empty} of {len(wrong)} places stay empty.",
    )


def _alt(cache: KVCache) -> str:
    left, right = caption(cache, cache.spec.num_layers + 1)
    return f"Two maps of one buffer. Left: {left} Right: {right}"


@dataclass(frozen=True)
class _Map:
    """One of the two maps: x of its left edge, the width of a byte, and the bytes of a row (one page of one layer)."""

    left: int
    page: int

    def box(self, start: int, size: int, attributes: str) -> str:
        """Return a rectangle over ``size`` bytes from ``start`` on."""
        width = size * MAP / self.page - 1
        return f'<rect x="{self._x(start):.1f}" y="{self.y(start)}" width="{width:.1f}" height="{ROW}" {attributes}/>'

    def number(self, start: int, size: int, number: int, ink: str) -> str:
        """Return a number in the middle of such a rectangle, or "" if the rectangle is too narrow for it."""
        if size * MAP / self.page < NUMBER:
            return ""
        middle = self._x(start) + size * MAP / self.page / 2
        return f'<text x="{middle:.1f}" y="{self.y(start) + 13}" text-anchor="middle" fill="{ink}">{number}</text>'

    def y(self, start: int) -> int:
        """Return the y of the row that holds a byte."""
        return TOP + start // self.page * (ROW + GAP)

    def _x(self, start: int) -> float:
        return self.left + start % self.page * MAP / self.page


def _drawn(cache: KVCache, carve: str, left: int) -> str:
    """Return one map with its title."""
    spec, at = cache.spec, _Map(left, cache.spec.page_size_bytes)
    title, small = TITLES[carve]
    parts = [
        f'<text x="{left}" y="15" font-size="14" font-weight="700" fill="{INK}">{title}</text>',
        f'<text x="{left}" y="31" fill="{GREY}">{small}</text>',
    ]
    for view in cache.owners():
        if view.role == "data":
            shade = tint(HUES[_layer(view) % len(HUES)], 0.35)
            starts = view.starts[..., 0].ravel().tolist()
            parts += [at.box(start, spec.data_bytes, f'fill="{shade}"') for start in starts]
    frame = f'fill="none" stroke="{RED}" stroke-width="{3 if spec.scale_bytes * MAP / at.page >= NUMBER else 1.5}"'
    for tail in tails(cache, carve):
        here = (tail.start, spec.scale_bytes)
        parts.append(at.box(*here, f'fill="{WHITE}" stroke="{GREY}" stroke-dasharray="2 2"'))
        for layer in tail.writers:
            hue = HUES[layer % len(HUES)]
            written = at.box(*here, f'fill="{hue}"') + at.number(*here, layer, ink_on(hue))
            parts.append(f'<g class="kvviz-step-{layer + 1}">{written}</g>')
        if len(tail.writers) > 1:
            parts.append(f'<g class="kvviz-step-{spec.num_layers + 1}">{at.box(*here, frame)}</g>')
    return "".join(parts)


def _row_names(cache: KVCache) -> str:
    """Return the names of the rows, left of the first map."""
    at, page, layers = _Map(LABEL, cache.spec.page_size_bytes), cache.spec.page_size_bytes, cache.spec.num_layers
    names = []
    for row in range(layers * cache.spec.num_blocks):
        text = f"block {row // layers} · layer {row % layers}"
        names.append(
            f'<text x="{LABEL - 10}" y="{at.y(row * page) + 13}" text-anchor="end" fill="{GREY}">{text}</text>'
        )
    return "".join(names)


def _texts(cache: KVCache, step: int, y: int) -> str:
    """Return the two sentences of a step below the maps."""
    texts = []
    for number, sentence in enumerate(caption(cache, step)):
        x = LABEL + number * (MAP + BETWEEN)
        for line, words in enumerate(_lines(sentence)):
            texts.append(f'<text x="{x}" y="{y + line * LINE}" font-size="13" fill="{INK}">{words}</text>')
    return f'<g class="kvviz-only-{step}">{"".join(texts)}</g>'


def _lines(sentence: str, letters: int = 44) -> list[str]:
    """Break a sentence into lines of at most ``letters`` letters."""
    lines = [""]
    for word in sentence.split():
        if len(lines[-1]) + len(word) >= letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _stepwise(steps: int) -> str:
    """Return rules that show the step of the attribute ``data-step``."""
    hidden = [f'[data-step="{now}"] .kvviz-step-{later}' for now in range(steps) for later in range(now + 1, steps)]
    hidden += [
        f'[data-step="{now}"] .kvviz-only-{other}' for now in range(steps) for other in range(steps) if other != now
    ]
    return f"{','.join(hidden)}{{visibility:hidden}}"


def _looping(steps: int) -> str:
    """Return rules that show one step after the other, without end."""
    total = STEP_S * (steps - 1) + REST_S
    rules = []
    for step in range(steps):
        begin, end = 100 * STEP_S * step / total, 100 * STEP_S * (step + 1) / total if step < steps - 1 else 100
        before = f"0%{{visibility:hidden}}{begin:.2f}%" if step else "0%"
        after = (
            f"{end:.2f}%{{visibility:hidden}}100%{{visibility:hidden}}"
            if step < steps - 1
            else "100%{visibility:visible}"
        )
        rules.append(f"@keyframes s{step}{{{before}{{visibility:visible}}100%{{visibility:visible}}}}")
        rules.append(f"@keyframes o{step}{{{before}{{visibility:visible}}{after}}}")
        rules += [
            f".kvviz-{kind}-{step}{{animation:{kind[0]}{step} {total:.1f}s step-end infinite}}"
            for kind in ("step", "only")
        ]
    still = ",".join(f".kvviz-only-{step}" for step in range(steps - 1))
    rules.append(f"@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}{still}{{visibility:hidden}}}}")
    return "".join(rules)


def _scales(cache: KVCache) -> list[View]:
    return [view for view in cache.owners() if view.role == "scale"]


def _layer(view: View) -> int:
    """Return the number of the layer in the name of a view (``layer 3 K scale``)."""
    return int(view.name.split()[1])
