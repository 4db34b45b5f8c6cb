"""Generates text greedily over a KV cache: each new token is the one with the largest logit.

A *backend* stores K and V and computes attention. :class:`PagedBackend` uses a paged cache and the kernels.
:class:`PlainBackend` uses ordinary tensors and is the reference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvviz.audit.arguments import is_integer
from kvviz.audit.findings import counted
from kvviz.cache.buffers import KVCache, ScaleViews
from kvviz.engine.model import LanguageModel, ModelConfig
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.write import write_kv


@dataclass(frozen=True)
class AttentionMetadata:
    """Says where one forward pass writes its tokens, and which tokens it reads. The names are vLLM's.

    All tensors are on the cache's device. T is the number of tokens, S the number of sequences, W the number of
    blocks per sequence.

    Args:
        slot_mapping: int64 ``(T,)``, the slot of each token.
        block_table: int32 ``(S, W)``, the blocks of each sequence.
        seq_lens: int32 ``(S,)``, the number of tokens of each sequence.
        query_start_loc: int32 ``(S + 1,)``, the position of the first query of each sequence, and T.
        max_query_len, max_seq_len: the largest number of queries and of tokens. As Python integers, because reading
            them from a tensor would wait for the GPU.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(eq=False)
class PagedBackend:
    """Writes K and V into a cache through the given scale views, and computes attention over the cache.

    Args:
        cache: the buffers.
        scales: the scale views of every layer, or None for a mode without scales.
        blocks: block ids of the sequence that is generated. Default: all blocks in order.

    Raises:
        ValueError: a block does not exist, or is named twice.
    """

    cache: KVCache
    scales: ScaleViews | None
    blocks: tuple[int, ...] = ()
    metadata: AttentionMetadata | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.blocks = tuple(self.blocks) or tuple(range(self.cache.spec.num_blocks))
        for block in self.blocks:
            if not is_integer(block) or block >= self.cache.spec.num_blocks:
                raise ValueError(
                    f"block {block!r} does not exist: valid blocks are 0 to {self.cache.spec.num_blocks - 1}"
                )
            if self.blocks.count(block) > 1:
                raise ValueError(f"block {block} is named twice: two parts of the sequence would share its slots")
        self.blocks = tuple(map(int, self.blocks))

    @property
    def max_tokens(self) -> int:
        """Return how many tokens fit into the blocks."""
        return len(self.blocks) * self.cache.spec.block_size

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit the cache."""
        spec = self.cache.spec
        for name in ("num_layers", "num_kv_heads", "head_size"):
            ours, theirs = getattr(spec, name), getattr(sizes, name)
            if ours != theirs:
                raise ValueError(
                    f"the cache has {name} {ours}, but the model has {theirs}: build the cache for this model"
                )

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass over ``positions`` (int64 ``(T,)``, consecutive) of the sequence."""
        device = self.cache.storages[0].device
        table = torch.tensor([self.blocks], dtype=torch.int32, device=device)
        block_size = self.cache.spec.block_size
        length = int(positions[-1]) + 1
        if length > self.max_tokens:
            raise ValueError(
                f"position {length - 1} has no slot: {counted(len(self.blocks), 'block')} hold {self.max_tokens} tokens"
            )
        slots = table[0].long()[positions // block_size] * block_size + positions % block_size
        counts = torch.tensor([0, len(positions)], dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(slots, table, lengths, counts, len(positions), length)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write K and V of this layer, then return the result of attention, float32 ``(T, Hq, D)``."""
        kv, mode, meta = self.cache.kv_caches[layer], self.cache.spec.kv_cache_dtype, self.metadata
        scales = self.scales[layer] if self.scales is not None else (None, None)
        write_kv(key, value, kv, meta.slot_mapping, mode, *scales, slots_checked=True)
        return paged_attention(
            query, kv, meta.block_table, meta.seq_lens, meta.query_start_loc, mode, *scales,
            max_query_len=meta.max_query_len, max_seq_len=meta.max_seq_len,
        )  # fmt: skip


class GroupedBackend:
    """Divides the layers among KV cache groups: layer ``i`` belongs to group ``i % len(groups)``.

    Each group has its own blocks.

    Raises:
        ValueError: there is no group, or two groups have the same block of a cache.
    """

    def __init__(self, groups: Sequence[PagedBackend]) -> None:
        self.groups = tuple(groups)
        if not self.groups:
            raise ValueError("no groups given: pass one backend per KV cache group")
        taken = [block for group in self.groups for block in group.blocks]
        if len({group.cache for group in self.groups}) == 1 and len(set(taken)) < len(taken):
            raise ValueError("two groups have the same block: give each group its own blocks")

    @property
    def cache(self) -> KVCache:
        """Return the cache of the groups."""
        return self.groups[0].cache

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the cache can hold. Each group must hold all tokens, so the smallest group
        decides."""
        return min(group.max_tokens for group in self.groups)

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit the cache."""
        for group in self.groups:
            group.check(sizes)

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass over ``positions`` in every group."""
        for group in self.groups:
            group.begin(positions)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write K and V, and compute attention, in the group of the layer."""
        return self.groups[layer % len(self.groups)](layer, query, key, value)


@dataclass(eq=False)
class PlainBackend:
    """The reference: keeps K and V in ordinary tensors, rounded to ``dtype``."""

    dtype: torch.dtype = torch.float32
    max_tokens: int = 8192
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)

    def check(self, sizes: ModelConfig) -> None:
        """Accept a model of any size."""

    def begin(self, positions: torch.Tensor) -> None:
        """Forget all K and V if the pass starts at position 0, which means a new prompt."""
        if int(positions[0]) == 0:
            self.kept.clear()

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Append K and V, then return causal attention in float32."""
        new = tuple(t.to(self.dtype).float() for t in (key, value))
        if layer in self.kept:
            new = tuple(torch.cat(pair) for pair in zip(self.kept[layer], new, strict=True))
        self.kept[layer] = new
        keys, values = (t.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(0, 1) for t in new)
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
        hidden = torch.ones(len(query), keys.shape[1], dtype=torch.bool, device=query.device)
        hidden = hidden.triu(keys.shape[1] - len(query) + 1)
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1)


Backend = PagedBackend | GroupedBackend | PlainBackend


@dataclass(frozen=True)
class Generation:
    """A generated answer: token ids, their text, and the difference of the two largest logits at each token."""

    token_ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]


def generate(
    model: LanguageModel,
    backend: Backend,
    prompt: list[int],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    num_computed_tokens: int = 0,
) -> Generation:
    """Prefill ``prompt``, then decode greedily until the stop token or ``max_new_tokens``.

    Args:
        chunk: number of tokens to prefill per forward pass. Default: the whole prompt at once.
        num_computed_tokens: number of tokens at the start of the prompt whose K and V are already in the cache.

    Raises:
        ValueError: the prompt is empty, a token is outside the vocabulary, prompt plus answer do not fit into the
            blocks, or all tokens of the prompt are computed already.
    """
    steps = list(tokens(model, backend, prompt, max_new_tokens, chunk=chunk, num_computed_tokens=num_computed_tokens))
    answer = [token for token, _ in steps]
    return Generation(tuple(answer), model.decode(answer), tuple(margin for _, margin in steps))


def tokens(
    model: LanguageModel,
    backend: Backend,
    prompt: list[int],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    num_computed_tokens: int = 0,
) -> Iterator[tuple[int, float]]:
    """Yield the tokens of :func:`generate` one by one, as (token, margin). Other requests may run in between."""
    if not prompt or max_new_tokens < 1:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and max_new_tokens is {max_new_tokens}: both must be at least 1"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk, the number of tokens per forward pass, must be at least 1, not {chunk}")
    if not 0 <= num_computed_tokens < len(prompt):
        raise ValueError(
            f"num_computed_tokens is {num_computed_tokens}, but must be 0 to {len(prompt) - 1}: the last of the "
            f"{len(prompt)} tokens of the prompt must be computed, because its logits give the first new token"
        )
    if len(prompt) + max_new_tokens > backend.max_tokens:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and {max_new_tokens} will be generated, but the cache has room for "
            f"{backend.max_tokens}: build a cache with more blocks, or generate fewer tokens"
        )
    model.check_tokens(prompt)
    backend.check(model.config)
    answer, done = [], num_computed_tokens
    while len(answer) < max_new_tokens:
        for part in torch.tensor([*prompt, *answer][done:], device=model.device).split(chunk or len(prompt)):
            positions = torch.arange(done, done + len(part), device=model.device)
            backend.begin(positions)
            logits = model.forward(part, positions, backend)[-1]
            done += len(part)
        best = logits.topk(2)
        answer.append(int(best.indices[0]))
        yield answer[-1], float(best.values[0] - best.values[1])
        if answer[-1] == model.stop_token:
            break
