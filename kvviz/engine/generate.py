"""Greedy generation over a KV cache: the paged one through the kernels, or a plain one as the reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.buffers import KVCache, ScaleViews
from kvviz.engine.model import LanguageModel, ModelConfig
from kvviz.kernels.attention import paged_attention
from kvviz.kernels.write import write_kv


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one forward pass go and what they see; vLLM's words, tensors on the cache's device.

    slot_mapping int64 ``(T,)``, block_table int32 ``(S, W)``, seq_lens int32 ``(S,)``, query_start_loc int32
    ``(S + 1,)``; the longest run of queries and the longest sequence are known without asking the GPU.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(eq=False)
class PagedBackend:
    """Writes K and V into a cache through the scale views given, and attends over what the cache then holds.

    Args:
        cache: the buffers.
        scales: the scale views of every layer, or None for a mode without them.
        blocks: block ids of the one sequence that is generated; default: all blocks in order.
    """

    cache: KVCache
    scales: ScaleViews | None
    blocks: tuple[int, ...] = ()
    metadata: AttentionMetadata | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.blocks = tuple(self.blocks) or tuple(range(self.cache.spec.num_blocks))
        for block in self.blocks:
            if not is_integer(block) or block >= self.cache.spec.num_blocks:
                raise ValueError(f"block {block!r} is none of the cache's 0 to {self.cache.spec.num_blocks - 1}")
            if self.blocks.count(block) > 1:
                raise ValueError(f"block {block} is given twice: two parts of the sequence would share its slots")

    @property
    def max_tokens(self) -> int:
        """Tokens of context for which there are blocks."""
        return len(self.blocks) * self.cache.spec.block_size

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit the cache."""
        spec = self.cache.spec
        for name in ("num_layers", "num_kv_heads", "head_size"):
            ours, theirs = getattr(spec, name), getattr(sizes, name)
            if ours != theirs:
                raise ValueError(f"the cache has {name} {ours} and the model {theirs}: build the cache for this model")

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass over ``positions`` (int64 ``(T,)``, consecutive) of the sequence."""
        device = self.cache.storages[0].device
        table = torch.tensor([self.blocks], dtype=torch.int32, device=device)
        block_size = self.cache.spec.block_size
        length = int(positions[-1]) + 1
        if length > self.max_tokens:
            raise ValueError(f"position {length - 1} has no slot: the {len(self.blocks)} blocks hold {self.max_tokens}")
        slots = table[0].long()[positions // block_size] * block_size + positions % block_size
        counts = torch.tensor([0, len(positions)], dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(slots, table, lengths, counts, len(positions), length)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write this layer's K and V, then attend."""
        kv, mode, meta = self.cache.kv_caches[layer], self.cache.spec.kv_cache_dtype, self.metadata
        scales = self.scales[layer] if self.scales is not None else (None, None)
        write_kv(key, value, kv, meta.slot_mapping, mode, *scales, slots_checked=True)
        return paged_attention(
            query, kv, meta.block_table, meta.seq_lens, meta.query_start_loc, mode, *scales,
            max_query_len=meta.max_query_len, max_seq_len=meta.max_seq_len,
        )  # fmt: skip


class GroupedBackend:
    """Layers in several KV cache groups, each with blocks of its own: layer ``i`` belongs to group ``i % len(groups)``.

    Raises:
        ValueError: no groups, or two that name the same block of a cache.
    """

    def __init__(self, groups: Sequence[PagedBackend]) -> None:
        self.groups = tuple(groups)
        if not self.groups:
            raise ValueError("no groups at all: give one backend a KV cache group")
        taken = [block for group in self.groups for block in group.blocks]
        if len({group.cache for group in self.groups}) == 1 and len(set(taken)) < len(taken):
            raise ValueError("two groups name the same block: a block belongs to one group at a time")

    @property
    def cache(self) -> KVCache:
        """The cache that all groups lie in."""
        return self.groups[0].cache

    @property
    def max_tokens(self) -> int:
        """Tokens of context for which every group has blocks."""
        return min(group.max_tokens for group in self.groups)

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit."""
        for group in self.groups:
            group.check(sizes)

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass in every group."""
        for group in self.groups:
            group.begin(positions)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write and attend in the layer's own group."""
        return self.groups[layer % len(self.groups)](layer, query, key, value)


@dataclass(eq=False)
class PlainBackend:
    """The reference: K and V kept as they are, or rounded to ``dtype``, in ordinary tensors."""

    dtype: torch.dtype = torch.float32
    max_tokens: int = 8192
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)

    def check(self, sizes: ModelConfig) -> None:
        """Any model fits."""

    def begin(self, positions: torch.Tensor) -> None:
        """Nothing to prepare; a pass that starts at position 0 starts afresh."""
        if int(positions[0]) == 0:
            self.kept.clear()

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Append K and V, then attend causally in float32."""
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
    """What a run gave: token ids, their text, and how far the two best logits lay apart at each token."""

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
        chunk: prefill this many tokens a forward pass; default all at once.
        num_computed_tokens: tokens of the prompt whose K and V the backend's blocks hold already.

    Raises:
        ValueError: an empty prompt, one that with its answer does not fit the backend's blocks, or nothing of it
            left to compute.
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
    """Token after token what :func:`generate` gives, each with its margin; other requests may run in between."""
    if not prompt or max_new_tokens < 1:
        raise ValueError(f"nothing to do: a prompt of {len(prompt)} tokens and {max_new_tokens} new tokens")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is the number of tokens of a forward pass, at least 1, not {chunk}")
    if not 0 <= num_computed_tokens < len(prompt):
        raise ValueError(
            f"{num_computed_tokens} of the prompt's {len(prompt)} tokens are said to be computed: at least the last "
            f"one must be left, since its logits are the first answer"
        )
    if len(prompt) + max_new_tokens > backend.max_tokens:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and {max_new_tokens} are to be generated, but the cache has room for "
            f"{backend.max_tokens}: give it more blocks or ask for fewer tokens"
        )
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
