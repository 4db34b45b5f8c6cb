"""Generates text with a language model and a KV cache. Each new token is the token with the largest logit.

A *backend* stores K and V, and computes attention. :class:`PagedBackend` uses a paged cache and the kernels.
:class:`PlainBackend` uses ordinary tensors. It is the reference for the other backends.
"""

from collections.abc import Callable, Iterator, Sequence
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
    """Says where one forward pass writes tokens, and which tokens attention reads. The names are the names of vLLM.

    All tensors are on the device of the cache. T is the number of new tokens, S the number of sequences, and W the
    number of blocks per sequence.

    Args:
        slot_mapping: int64 tensor of shape ``(T,)``, the slot of each token.
        block_table: int32 tensor of shape ``(S, W)``, the blocks of each sequence.
        seq_lens: int32 tensor of shape ``(S,)``, the number of tokens of each sequence.
        query_start_loc: int32 tensor of shape ``(S + 1,)``, the row of the first query of each sequence, then T.
        max_query_len: the most queries of one sequence, as a Python integer. Reading it from a tensor would wait for
            the GPU.
        max_seq_len: the most tokens of one sequence, also as a Python integer.
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
        cache: the cache with the buffers.
        scales: the scale views of every layer. None in a mode without scales.
        blocks: the block ids of the sequence that is generated. Default: all blocks in order.

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
                    f"block {block!r} does not exist: the cache has the blocks 0 to {self.cache.spec.num_blocks - 1}"
                )
            if self.blocks.count(block) > 1:
                raise ValueError(
                    f"block {block} is named twice, so two tokens of the sequence would have the same slot: name each "
                    "block once"
                )
        self.blocks = tuple(map(int, self.blocks))

    @property
    def max_tokens(self) -> int:
        """Return how many tokens fit into the blocks of the sequence."""
        return len(self.blocks) * self.cache.spec.block_size

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit the cache."""
        spec = self.cache.spec
        for name in ("num_layers", "num_kv_heads", "head_size"):
            ours, theirs = getattr(spec, name), getattr(sizes, name)
            if ours != theirs:
                raise ValueError(
                    f"the cache has {name} {ours}, but the model has {name} {theirs}: allocate a cache for this model"
                )

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass over T new tokens of the sequence.

        Args:
            positions: int64 tensor of shape ``(T,)``, the positions of these tokens. The positions must be consecutive.
        """
        device = self.cache.storages[0].device
        table = torch.tensor([self.blocks], dtype=torch.int32, device=device)
        block_size = self.cache.spec.block_size
        length = int(positions[-1]) + 1
        if length > self.max_tokens:
            raise ValueError(
                f"position {length - 1} has no slot, because {counted(len(self.blocks), 'block')} have only "
                f"{self.max_tokens} slots: use more blocks"
            )
        slots = table[0].long()[positions // block_size] * block_size + positions % block_size
        counts = torch.tensor([0, len(positions)], dtype=torch.int32, device=device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(slots, table, lengths, counts, len(positions), length)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write K and V of this layer. Then compute attention, and return float32 of shape ``(T, Hq, D)``."""
        kv, mode, meta = self.cache.kv_caches[layer], self.cache.spec.kv_cache_dtype, self.metadata
        scales = self.scales[layer] if self.scales is not None else (None, None)
        write_kv(key, value, kv, meta.slot_mapping, mode, *scales, slots_checked=True)
        return paged_attention(
            query, kv, meta.block_table, meta.seq_lens, meta.query_start_loc, mode, *scales,
            max_query_len=meta.max_query_len, max_seq_len=meta.max_seq_len,
        )  # fmt: skip


class GroupedBackend:
    """Divides the layers into KV cache groups. Layer ``i`` belongs to group ``i % len(groups)``.

    Each group has its own blocks.

    Raises:
        ValueError: no group is given, or two groups have the same block of one cache.
    """

    def __init__(self, groups: Sequence[PagedBackend]) -> None:
        self.groups = tuple(groups)
        if not self.groups:
            raise ValueError("0 groups are given: pass one backend per KV cache group")
        taken = [block for group in self.groups for block in group.blocks]
        if len({group.cache for group in self.groups}) == 1 and len(set(taken)) < len(taken):
            shared = next(block for block in taken if taken.count(block) > 1)
            raise ValueError(f"two groups have block {shared}: give each group its own blocks")

    @property
    def cache(self) -> KVCache:
        """Return the cache of the groups."""
        return self.groups[0].cache

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the cache can hold. Each group stores all tokens, so the smallest group decides."""
        return min(group.max_tokens for group in self.groups)

    def check(self, sizes: ModelConfig) -> None:
        """Raise ValueError if a model of these sizes does not fit the cache."""
        for group in self.groups:
            group.check(sizes)

    def begin(self, positions: torch.Tensor) -> None:
        """Prepare a forward pass in every group. ``positions`` are described at ``PagedBackend.begin``."""
        for group in self.groups:
            group.begin(positions)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Call the group of the layer. The group writes K and V, and computes attention."""
        return self.groups[layer % len(self.groups)](layer, query, key, value)


@dataclass(eq=False)
class PlainBackend:
    """Keeps K and V in ordinary tensors, rounded to ``dtype``. This backend is the reference."""

    dtype: torch.dtype = torch.float32
    max_tokens: int = 8192
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)

    def check(self, sizes: ModelConfig) -> None:
        """Do nothing, because this backend works with a model of any size."""

    def begin(self, positions: torch.Tensor) -> None:
        """Forget all K and V if the forward pass starts at position 0, because a new prompt starts there."""
        if int(positions[0]) == 0:
            self.kept.clear()

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Append K and V to the earlier tokens. Then compute causal attention in float32."""
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
    """A generated answer.

    Attributes:
        token_ids: the tokens of the answer.
        text: the text of these tokens.
        margins: for each token, the difference between the largest and the second largest logit.
        tokens: the text of each token.
    """

    token_ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    tokens: tuple[str, ...] = ()


def generate(
    model: LanguageModel,
    backend: Backend,
    prompt: list[int],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    num_computed_tokens: int = 0,
    on_token: Callable[[str, float], None] | None = None,
) -> Generation:
    """Generate an answer. Stop after the stop token, or after ``max_new_tokens`` tokens.

    Args:
        prompt: the token ids of the prompt.
        chunk: number of tokens of the prompt per forward pass. Default: the whole prompt at once.
        num_computed_tokens: K and V of this many tokens are in the cache already. They are the first tokens of the
            prompt.
        on_token: called with the text and the margin of each token, when the token is known.

    Raises:
        ValueError: the prompt is empty, or a number is too small. Or a token is not in the vocabulary. Or prompt and
            answer together do not fit into the blocks. Or all tokens of the prompt are computed already.
    """
    answer, margins, texts = [], [], []
    steps = tokens(model, backend, prompt, max_new_tokens, chunk=chunk, num_computed_tokens=num_computed_tokens)
    for token, margin in steps:
        answer.append(token)
        margins.append(margin)
        texts.append(model.decode([token]))
        if on_token is not None:
            on_token(texts[-1], margin)
    return Generation(tuple(answer), model.decode(answer), tuple(margins), tuple(texts))


def tokens(
    model: LanguageModel,
    backend: Backend,
    prompt: list[int],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    num_computed_tokens: int = 0,
) -> Iterator[tuple[int, float]]:
    """Yield the tokens of :func:`generate` one by one, each as a pair (token, margin).

    Between two tokens, the caller can run other requests. Arguments and errors are described at :func:`generate`.
    """
    if not prompt:
        raise ValueError("the prompt has 0 tokens: pass at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but it must be at least 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}, but a forward pass needs at least 1 token: use a chunk of at least 1")
    if not 0 <= num_computed_tokens < len(prompt):
        raise ValueError(
            f"num_computed_tokens is {num_computed_tokens}, but it must be 0 to {len(prompt) - 1}. The prompt has "
            f"{len(prompt)} tokens, and the last token must be computed, because its logits give the first new token."
        )
    if len(prompt) + max_new_tokens > backend.max_tokens:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, but the cache has slots for "
            f"only {backend.max_tokens} tokens: allocate a cache with more blocks, or generate fewer tokens"
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
