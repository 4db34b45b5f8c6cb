"""A real language model: SmolLM2-135M-Instruct in float32, a plain forward pass that leaves K and V to others.

The model knows nothing of caches: for each layer it hands query, key and value to an ``attend`` callable and
goes on with what comes back. What happens to K and V in between is the business of ``kvviz.engine.generate``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvviz.engine import gpu_budget, weights
from kvviz.engine.unpacked_weights import unpack
from kvviz.kernels.runtime import device as kernel_device

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, query (T, Hq, D), key (T, H, D), value (T, H, D)) -> (T, Hq, D)``, all float32."""

DIGITS_THEN_BYTES = "smollm"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, in vLLM's words, as the file states them."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_base: float
    norm_epsilon: float


class _Released(dict):
    """In place of weights that were let go."""

    def __missing__(self, name: str):
        raise RuntimeError("This model was released, and its weights are gone: load it again with load_model().")


class LanguageModel:
    """Weights, tokenizer and forward pass. Build it with :func:`load`."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], tokenizer, stop_token: int) -> None:
        self.config = config
        self.stop_token = stop_token
        self._tensors = tensors
        self._tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._tensors["output_norm.weight"].device

    def encode(self, question: str) -> list[int]:
        """Token ids of one user message, ready to be answered.

        Raises:
            ValueError: the question is empty.
        """
        if not question.strip():
            raise ValueError("the prompt is empty: ask the model something")
        text = f"<|im_start|>user\n{question.strip()}<|im_end|>\n<|im_start|>assistant\n"
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens; special ones are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def release(self) -> None:
        """Let go of the weights, whoever still has this model; it cannot be used any more."""
        self._tensors = _Released()

    @gpu_budget.within()
    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits, float32 ``(T, vocabulary)``, of ``token_ids`` int64 ``(T,)`` at ``positions`` int64 ``(T,)``.

        Raises:
            MemoryError: the GPU, or this process's share of it, is exhausted.
            RuntimeError: the model was released.
        """
        hidden = F.embedding(token_ids, self._tensors["token_embd.weight"])
        cos, sin = self._rope(positions)
        for layer in range(self.config.num_layers):
            hidden = hidden + self._attention(layer, self._norm(f"blk.{layer}.attn_norm", hidden), cos, sin, attend)
            hidden = hidden + self._feed_forward(layer, self._norm(f"blk.{layer}.ffn_norm", hidden))
        return F.linear(self._norm("output_norm", hidden), self._tensors["token_embd.weight"])

    def _attention(self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend):
        query, key, value = (
            self._linear(f"blk.{layer}.attn_{name}", x).unflatten(-1, (-1, self.config.head_size)) for name in "qkv"
        )
        out = attend(layer, _rotate_pairs(query, cos, sin), _rotate_pairs(key, cos, sin), value)
        return self._linear(f"blk.{layer}.attn_output", out.flatten(-2))

    def _feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self._linear(f"blk.{layer}.ffn_gate", x))
        return self._linear(f"blk.{layer}.ffn_down", gate * self._linear(f"blk.{layer}.ffn_up", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self.config.norm_epsilon)

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config.head_size
        steps = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size
        angles = (positions[:, None].double() * self.config.rope_base**-steps)[:, None, :]
        return angles.cos().float(), angles.sin().float()


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over interleaved pairs (2i, 2i + 1), the order in which a GGUF keeps Llama's weights."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@gpu_budget.within()
def load_model(device: str | torch.device | None = None) -> LanguageModel:
    """Put the model in float32 on ``device`` (default: where kernels run).

    On the CPU its 540 MB are pages of a file that all processes share; the first load makes the file, in a few
    seconds: see :mod:`kvviz.engine.unpacked_weights`.

    Raises:
        ModelMissingError: the model file is not there; the message says how to get it.
        MemoryError: the GPU, or this process's share of it, is exhausted.
    """
    path = weights.find()
    unpacked = unpack(path)
    field = unpacked.fields
    if field["tokenizer.ggml.pre"] != DIGITS_THEN_BYTES:
        raise ValueError(f"{path.name} splits text by {field['tokenizer.ggml.pre']!r}, not by {DIGITS_THEN_BYTES!r}")
    device = kernel_device() if device is None else device
    tensors = {name: torch.from_numpy(array).to(device) for name, array in unpacked.tensors.items()}
    config = ModelConfig(
        num_layers=field["llama.block_count"],
        num_heads=field["llama.attention.head_count"],
        num_kv_heads=field["llama.attention.head_count_kv"],
        head_size=field["llama.rope.dimension_count"],
        rope_base=field["llama.rope.freq_base"],
        norm_epsilon=field["llama.attention.layer_norm_rms_epsilon"],
    )
    return LanguageModel(config, tensors, _tokenizer(field), field["tokenizer.ggml.eos_token_id"])


def _tokenizer(field: dict):
    """Byte-level BPE with digits taken one by one, from the tokens and merges in the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer
