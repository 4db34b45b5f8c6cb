"""CacheSpec: what one KV cache holds, and how many bytes each part of it takes.

Three page sizes are kept apart, because confusing two of them is a bug of its own (vLLM PR 48411):

* ``real_page_size_bytes``: K and V data alone, without scales;
* ``content_page_size_bytes``: data and whatever tails the cells have;
* ``page_size_bytes``: the step from one page to the next, padding included.
"""

import difflib
from dataclasses import dataclass

SCALE_BYTES = 4
"""One fp32 scale a (token, head), for K and for V each (vLLM 0.20 to 0.33)."""

PER_TOKEN_HEAD_BITS = {"int8_per_token_head": 8, "fp8_per_token_head": 8, "int4_per_token_head": 4}
PLAIN_BITS = {"bfloat16": 16, "fp8": 8}
MODES = (*PLAIN_BITS, *PER_TOKEN_HEAD_BITS)
"""Every ``kv_cache_dtype`` known here; vLLM's ``auto`` for a bfloat16 model is ``bfloat16``."""


def one_of(what: str, value: object, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``known``, else raise a ValueError that suggests the nearest."""
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} {value!r} does not exist: it is one of {', '.join(known)}{hint}")


@dataclass(frozen=True)
class CacheSpec:
    """Size and mode of a KV cache. All counts are plain integers, all sizes bytes.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_size: vLLM's words; each at least 1.
        kv_cache_dtype: one of :data:`MODES`.
        tail: whether a (token, head) cell has room for its scale behind its data. False is the buffer
            of vLLM issue 48412, shape ``(176452, 2, 24, 2, 16, 64)``: cells of ``data_bytes``, so that
            the scale's place is the last four *data* bytes. Only per-token-head modes have a tail.
        page_size_padded: the step between pages in bytes, or None for no padding.

    Raises:
        ValueError: a value is out of range, with the value and what would be right.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str = "fp8_per_token_head"
    tail: bool = True
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size"):
            _positive_int(name, getattr(self, name))
        one_of("kv_cache_dtype", self.kv_cache_dtype, MODES)
        if not isinstance(self.tail, bool):
            raise ValueError(f"tail must be True or False, not {self.tail!r}")
        if self.kv_cache_dtype == "int4_per_token_head" and self.head_size % 2:
            raise ValueError(f"int4 packs two elements in a byte: head_size {self.head_size} must be even")
        if self.is_per_token_head:
            self._check_scale_alignment()
        if self.page_size_padded is not None:
            self._check_padding()

    def _check_scale_alignment(self) -> None:
        if self.data_bytes % SCALE_BYTES:
            raise ValueError(
                f"the scale would sit {self.data_bytes} bytes into its cell and miss a {SCALE_BYTES}-byte boundary: "
                f"head_size {self.head_size} in mode {self.kv_cache_dtype} must give a multiple of {SCALE_BYTES} bytes"
            )
        if not self.tail and self.data_bytes <= SCALE_BYTES:
            raise ValueError(f"a cell of {self.data_bytes} bytes without a tail has no data left beside its scale")

    def _check_padding(self) -> None:
        _positive_int("page_size_padded", self.page_size_padded)
        if self.page_size_padded < self.content_page_size_bytes:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes, smaller than the page's content of "
                f"{self.content_page_size_bytes} bytes: pad to at least that"
            )
        step = max(self.element_bytes, SCALE_BYTES if self.is_per_token_head else 1)
        if self.page_size_padded % step:
            raise ValueError(f"page_size_padded {self.page_size_padded} must be a multiple of {step} bytes")

    @property
    def is_per_token_head(self) -> bool:
        """Whether each (token, head) carries a scale of its own inside the cache."""
        return self.kv_cache_dtype in PER_TOKEN_HEAD_BITS

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the KV view: 2 for bfloat16, 1 for every quantised mode."""
        return 2 if self.kv_cache_dtype == "bfloat16" else 1

    @property
    def data_bytes(self) -> int:
        """Bytes of data of one (token, head), for K or for V."""
        bits = {**PLAIN_BITS, **PER_TOKEN_HEAD_BITS}[self.kv_cache_dtype]
        return self.head_size * bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one (token, head), for K or for V: 4, or 0 where the mode has none."""
        return SCALE_BYTES if self.is_per_token_head else 0

    @property
    def cell_bytes(self) -> int:
        """Step from one (token, head) cell of K (or V) to the next: the data and, with a tail, the scale."""
        return self.data_bytes + (self.scale_bytes if self.tail else 0)

    @property
    def scale_offset_bytes(self) -> int:
        """Where in its cell a scale starts: always the cell's last four bytes. Without a tail, that is data."""
        return self.cell_bytes - self.scale_bytes

    @property
    def cells_per_page(self) -> int:
        """(token, head) cells in one page, K and V counted apart."""
        return 2 * self.block_size * self.num_kv_heads

    @property
    def real_page_size_bytes(self) -> int:
        """K and V data of one block of one layer, scales left out."""
        return self.cells_per_page * self.data_bytes

    @property
    def content_page_size_bytes(self) -> int:
        """Everything one block of one layer holds: data and tails."""
        return self.cells_per_page * self.cell_bytes

    @property
    def page_size_bytes(self) -> int:
        """Step from page to page: the content, or ``page_size_padded``."""
        return self.page_size_padded or self.content_page_size_bytes

    @property
    def layer_bytes(self) -> int:
        """All pages of one layer."""
        return self.num_blocks * self.page_size_bytes

    @property
    def buffer_bytes(self) -> int:
        """All pages of all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def num_slots(self) -> int:
        """Token slots of one layer: a ``slot_mapping`` entry lies in ``[0, num_slots)``."""
        return self.num_blocks * self.block_size


def is_integer(value: object, least: int = 0) -> bool:
    """Whether a value is an integer of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
