"""Runs a real language model, SmolLM2-135M-Instruct, in float32.

The model has no cache. For each layer, the forward pass calls ``attend(layer, query, key, value)``, and continues with
the result. The backends of :mod:`kvviz.engine.generate` store K and V in a cache.

To use another language model, change the record ``MODEL`` in kvviz/engine/weights.py. Then change the names of tensors
and fields in this module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvviz.audit.arguments import is_integer
from kvviz.engine import gpu_budget, weights
from kvviz.engine.unpacked_weights import unpack
from kvviz.kernels.runtime import device as kernel_device

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function ``attend(layer, query, key, value)`` that returns the result of attention. All tensors are float32. The
query and the result have shape ``(T, Hq, D)``. Key and value have shape ``(T, H, D)``. T is the number of tokens, Hq of
query heads, H of KV heads, and D is the head size."""

SPLITTING = "smollm"
"""The name of the first step of the tokenizer in the model file. This step makes each digit a separate part. Then it
splits the text as a byte-level tokenizer does."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. They are read from the model file, and have the names of vLLM."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_base: float
    norm_epsilon: float


class _Released(dict):
    """Replaces the weights of a model after ``release()``. Each access raises RuntimeError."""

    def __missing__(self, name: str):
        raise RuntimeError("release() has freed the weights of this model: load the model again with load_model().")


class LanguageModel:
    """A language model with weights, tokenizer and forward pass. Call :func:`load_model` to make one."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], tokenizer, stop_token: int) -> None:
        self.config = config
        self.stop_token = stop_token
        self._tensors = tensors
        self._tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self._tensors["output_norm.weight"].device

    def encode(self, question: str) -> list[int]:
        """Convert a question to token ids, in the chat format of the model.

        Raises:
            ValueError: the question is empty.
        """
        if not question.strip():
            raise ValueError("the question is empty: pass a text with at least one visible character")
        text = f"<|im_start|>user\n{question.strip()}<|im_end|>\n<|im_start|>assistant\n"
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Convert generated tokens to text. Special tokens are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def release(self) -> None:
        """Free the weights, even if other variables refer to this model. Afterwards the model cannot be used."""
        self._tensors = _Released()

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError if a token id is not in the vocabulary.

        Without this check, torch raises an unclear error. After such an error on a GPU, this process cannot use the GPU
        any more.
        """
        size = len(self._tensors["token_embd.weight"])
        for number, token in enumerate(token_ids):
            if not is_integer(token) or token >= size:
                raise ValueError(f"token {number} is {token!r}, but the vocabulary has only tokens 0 to {size - 1}")

    @gpu_budget.within()
    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Compute the logits of T tokens. The result is float32 of shape ``(T, size of the vocabulary)``.

        Args:
            token_ids: int64 tensor of shape ``(T,)``. Each token must be in the vocabulary.
            positions: int64 tensor of shape ``(T,)``, the positions of the tokens in the sequence.
            attend: computes attention, see :data:`Attend`.

        Raises:
            MemoryError: GPU memory is exhausted, or this process has reached the limit of ``gpu_budget.keep``.
            RuntimeError: ``release()`` was called before.
            ValueError: a token is not in the vocabulary. On a GPU this is not checked, because the check would wait for
                the GPU.
        """
        if not token_ids.is_cuda:
            self.check_tokens(token_ids.tolist())
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
    """Rotate each pair of columns (2i, 2i + 1). A GGUF file stores the weights of Llama models for these pairs."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@gpu_budget.within()
def load_model(device: str | torch.device | None = None) -> LanguageModel:
    """Load the model in float32 on ``device``. Default: the device on which kernels run.

    On the CPU, the weights (540 MB) are mapped from a file, and all processes share this memory. The first call makes
    the file, which takes a few seconds (see :mod:`kvviz.engine.unpacked_weights`).

    Raises:
        ModelMissingError: the model file is missing or wrong. The message says how to get the file.
        MemoryError: GPU memory is exhausted, or this process has reached the limit of ``gpu_budget.keep``.
        ValueError: the model file needs a tokenizer that kvviz does not have.
    """
    path = weights.find()
    unpacked = unpack(path)
    field = unpacked.fields
    if field["tokenizer.ggml.pre"] != SPLITTING:
        raise ValueError(
            f"{path.name} uses the tokenizer splitting {field['tokenizer.ggml.pre']!r}, but kvviz supports only "
            f"{SPLITTING!r}: change _tokenizer in kvviz/engine/model.py, or use another model file"
        )
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
    """Build the byte-level BPE tokenizer from the tokens and merges in the model file. Each digit is one part."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # in a GGUF file, special tokens have this type
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer
