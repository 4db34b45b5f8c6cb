"""CacheSpec: what one KV cache holds, and how many bytes each part of it takes.

Three page sizes are kept apart, because confusing two of them is a bug of its own (vLLM PR 48411):

* ``real_page_size_bytes``: K and V data alone, without scales;
* ``content_page_size_bytes``: data and whatever tails the cells have;
* ``page_size_bytes``: the step from one page to the next, padding included.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import positive_int
from kvviz.cache.modes import Mode, get_mode


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
            positive_int(name, getattr(self, name))
        get_mode(self.kv_cache_dtype)
        if not isinstance(self.tail, bool):
            raise ValueError(f"tail must be True or False, not {self.tail!r}")
        if self.head_size % self.mode.codes_per_byte:
            raise ValueError(
                f"{self.kv_cache_dtype} packs {self.mode.codes_per_byte} elements into a byte, and head_size "
                f"{self.head_size} is not a multiple of that"
            )
        if self.is_per_token_head:
            self._check_scale_alignment()
        if self.page_size_padded is not None:
            self._check_padding()

    def _check_scale_alignment(self) -> None:
        if self.data_bytes % self.scale_bytes:
            raise ValueError(
                f"the scale would start {self.data_bytes} bytes into its cell, which is not a multiple of its "
                f"{self.scale_bytes} bytes: choose another head_size than {self.head_size} for {self.kv_cache_dtype}"
            )
        if not self.tail and self.data_bytes <= self.scale_bytes:
            raise ValueError(f"a cell of {self.data_bytes} bytes without a tail has no data left beside its scale")

    def _check_padding(self) -> None:
        positive_int("page_size_padded", self.page_size_padded)
        if self.page_size_padded < self.content_page_size_bytes:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes, smaller than the page's content of "
                f"{self.content_page_size_bytes} bytes: pad to at least that"
            )
        step = max(self.element_bytes, self.scale_bytes)
        if self.page_size_padded % step:
            raise ValueError(f"page_size_padded {self.page_size_padded} must be a multiple of {step} bytes")

    @property
    def mode(self) -> Mode:
        """The record of ``kv_cache_dtype``."""
        return get_mode(self.kv_cache_dtype)

    @property
    def is_per_token_head(self) -> bool:
        """Whether each (token, head) carries a scale of its own inside the cache."""
        return self.mode.is_per_token_head

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the KV view: 2 for bfloat16, 1 for every quantised mode."""
        return self.mode.element_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of data of one (token, head), for K or for V."""
        return self.head_size * self.mode.code_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one (token, head), for K or for V: 4, or 0 where the mode has none."""
        return self.mode.scale_bytes

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
