"""Defines the size and the mode of a KV cache, and computes the number of bytes of each part.

There are three page sizes. vLLM once used the first size where the second size was needed (PR 48411):

* ``real_page_size_bytes`` counts only the data of K and V.
* ``content_page_size_bytes`` counts the data and the tails, in which the scales lie.
* ``page_size_bytes`` is the distance from the start of one page to the start of the next page. It includes padding.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import positive_int
from kvviz.cache.modes import Mode, get_mode

_COUNTS = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size")


@dataclass(frozen=True)
class CacheSpec:
    """Size and mode of a KV cache. All sizes are in bytes.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_size: integers of at least 1. The names are vLLM's names.
        kv_cache_dtype: the name of a mode in ``kvviz.cache.modes.MODES``. A Mode is also accepted, and is replaced by
            the name of the mode.
        tail: True if each cell has a tail for the scale. If it is False, a cell has only ``data_bytes``, and the scale
            lies on the last four *data* bytes. The buffer of vLLM issue 48412 has no tails. Its shape is
            ``(176452, 2, 24, 2, 16, 64)``. In a mode without scales, cells never have a tail.
        page_size_padded: the distance from the start of one page to the start of the next page in bytes. None means
            that pages have no padding.

    Raises:
        ValueError: a value is not allowed. The message contains the value, and says which values are allowed.
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
        for name in _COUNTS:
            self._keep_positive_int(name)
        mode = get_mode(self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", mode.name)
        if not isinstance(self.tail, bool):
            raise ValueError(f"tail is {self.tail!r}, but it must be True or False")
        if self.head_size % mode.codes_per_byte:
            raise ValueError(
                f"head_size is {self.head_size}, but it must be a multiple of {mode.codes_per_byte}, because mode "
                f"{mode.name} puts {mode.codes_per_byte} elements into one byte"
            )
        if self.is_per_token_head:
            self._check_scale_alignment()
        if self.page_size_padded is not None:
            self._check_padding()

    def _keep_positive_int(self, name: str) -> None:
        """Check a number, and store it as a Python int. Products of NumPy integers can overflow without an error."""
        object.__setattr__(self, name, positive_int(name, getattr(self, name)))

    def _check_scale_alignment(self) -> None:
        if self.data_bytes % self.scale_bytes:
            raise ValueError(
                f"a scale of {self.scale_bytes} bytes would start at byte {self.data_bytes} of a cell, which is not a "
                f"multiple of {self.scale_bytes}: choose another head_size than {self.head_size} for mode "
                f"{self.kv_cache_dtype}"
            )
        if not self.tail and self.data_bytes <= self.scale_bytes:
            raise ValueError(
                f"a cell of {self.data_bytes} bytes without a tail has no byte for data, because the scale needs "
                f"{self.scale_bytes} bytes: choose a larger head_size than {self.head_size}, or use tail=True"
            )

    def _check_padding(self) -> None:
        self._keep_positive_int("page_size_padded")
        if self.page_size_padded < self.content_page_size_bytes:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes, but the content of a page has "
                f"{self.content_page_size_bytes} bytes: use at least {self.content_page_size_bytes}"
            )
        step = max(self.element_bytes, self.scale_bytes)
        if self.page_size_padded % step:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes, but it must be a multiple of {step}, the size of "
                f"the largest number (element or scale) in mode {self.kv_cache_dtype}"
            )

    @property
    def mode(self) -> Mode:
        """Return the record of the mode ``kv_cache_dtype``."""
        return get_mode(self.kv_cache_dtype)

    @property
    def is_per_token_head(self) -> bool:
        """Return True if the mode is per-token-head, which means that each cell has its own scale inside the cache."""
        return self.mode.is_per_token_head

    @property
    def element_bytes(self) -> int:
        """Return the size of one element of the KV view in bytes. It is 2 for bfloat16, otherwise 1."""
        return self.mode.element_bytes

    @property
    def data_bytes(self) -> int:
        """Return the number of data bytes of one cell."""
        return self.head_size * self.mode.code_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Return the size of the scale of one cell in bytes. It is 0 in a mode without scales."""
        return self.mode.scale_bytes

    @property
    def cell_bytes(self) -> int:
        """Return the size of one cell in bytes, which is the size of the data and of the tail."""
        return self.data_bytes + (self.scale_bytes if self.tail else 0)

    @property
    def scale_offset_bytes(self) -> int:
        """Return the byte of a cell at which the scale starts. The scale lies in the last bytes of the cell.

        If cells have no tail, these bytes are also data bytes.
        """
        return self.cell_bytes - self.scale_bytes

    @property
    def cells_per_page(self) -> int:
        """Return how many cells a page has. Each token and head has two cells, one for K and one for V."""
        return 2 * self.block_size * self.num_kv_heads

    @property
    def real_page_size_bytes(self) -> int:
        """Return how many bytes of K and V data a page has. Tails are not counted."""
        return self.cells_per_page * self.data_bytes

    @property
    def content_page_size_bytes(self) -> int:
        """Return how many bytes of data and tails a page has. Padding is not counted."""
        return self.cells_per_page * self.cell_bytes

    @property
    def page_size_bytes(self) -> int:
        """Return the distance from one page to the next in bytes. Padding is counted."""
        return self.page_size_padded or self.content_page_size_bytes

    @property
    def layer_bytes(self) -> int:
        """Return the size of all pages of one layer in bytes."""
        return self.num_blocks * self.page_size_bytes

    @property
    def buffer_bytes(self) -> int:
        """Return the size of all pages of all layers in bytes."""
        return self.num_layers * self.layer_bytes

    @property
    def num_slots(self) -> int:
        """Return the number of slots of one layer. The slots are 0 to ``num_slots - 1``."""
        return self.num_blocks * self.block_size
