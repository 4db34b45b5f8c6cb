"""Runs a real language model, SmolLM2-135M-Instruct, in float32.

The model has no cache. For each layer, the forward pass calls ``attend(layer, query, key, value)`` and continues with
the result. :mod:`kvviz.engine.generate` contains backends that store K and V in a cache.

To use another language model, change the file in kvviz/engine/weights.py, and the tensor names and fields here.
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
"""``(layer, query (T, Hq, D), key (T, H, D), value (T, H, D)) -> (T, Hq, D)``, all float32."""

SPLITTING = "smollm"
"""Name of the tokenizer's first step in the model file: take digits one by one, then split the bytes of the text."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, read from the model file. The names are vLLM's."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_base: float
    norm_epsilon: float


class _Released(dict):
    """Replaces the weights of a released model. Each access raises RuntimeError."""

    def __missing__(self, name: str):
        raise RuntimeError("This model was released, so it has no weights: load it again with load_model().")


class LanguageModel:
    """A language model: weights, tokenizer and forward pass. :func:`load_model` builds it."""

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
        """Return the token ids of one user message in the model's chat format.

        Raises:
            ValueError: the question is empty.
        """
        if not question.strip():
            raise ValueError("the question is empty: give a text")
        text = f"<|im_start|>user\n{question.strip()}<|im_end|>\n<|im_start|>assistant\n"
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of generated tokens. Special tokens are skipped."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def release(self) -> None:
        """Free the weights. Afterwards this model cannot be used, even if other variables refer to it."""
        self._tensors = _Released()

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError if a token id is not in the vocabulary.

        Without this check, torch raises an unclear error. On a GPU, the process cannot use the GPU after that error.
        """
        size = len(self._tensors["token_embd.weight"])
        for number, token in enumerate(token_ids):
            if not is_integer(token) or token >= size:
                raise ValueError(f"token {number} is {token!r}, but the vocabulary has only tokens 0 to {size - 1}")

    @gpu_budget.within()
    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the logits, float32 ``(T, vocabulary)``.

        Args:
            token_ids: int64 ``(T,)``. Each must be in the vocabulary.
            positions: int64 ``(T,)``, the positions of the tokens in their sequence.

        Raises:
            MemoryError: the memory of the GPU, or this process's share, is exhausted.
            RuntimeError: the model was released.
            ValueError: a token is not in the vocabulary. Only checked on the CPU: a check would wait for the GPU.
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
    """Rotate the pairs of columns (2i, 2i + 1). A GGUF file stores Llama's weights in this interleaved order."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@gpu_budget.within()
def load_model(device: str | torch.device | None = None) -> LanguageModel:
    """Load the model in float32 on ``device``. Default: the device on which kernels run.

    On the CPU, the 540 MB of weights are mapped from a file, and all processes share this memory. The first load
    makes the file in a few seconds: see :mod:`kvviz.engine.unpacked_weights`.

    Raises:
        ModelMissingError: the model file is missing. The message says how to get the file.
        MemoryError: the memory of the GPU, or this process's share, is exhausted.
        ValueError: the model file needs another tokenizer.
    """
    path = weights.find()
    unpacked = unpack(path)
    field = unpacked.fields
    if field["tokenizer.ggml.pre"] != SPLITTING:
        raise ValueError(
            f"{path.name} uses the tokenizer splitting {field['tokenizer.ggml.pre']!r}, but kvviz supports only "
            f"{SPLITTING!r}"
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
    """Build the byte-level BPE tokenizer from the tokens and merges in the file. Digits are taken one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's number for special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer
