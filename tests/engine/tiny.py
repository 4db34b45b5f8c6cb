"""A very small language model for tests: two layers of random weights. Its text is a list of token ids."""

import torch

from kvviz.engine.model import LanguageModel, ModelConfig
from kvviz.kernels.runtime import device

VOCABULARY = 97


class Numbers:
    """A tokenizer whose text is the token ids themselves."""

    def encode(self, text, add_special_tokens=False):
        raise NotImplementedError("tests give token ids")

    def decode(self, token_ids, skip_special_tokens=True):
        return " ".join(map(str, token_ids))


def tiny_model(num_layers: int = 2, num_kv_heads: int = 2, head_size: int = 16) -> LanguageModel:
    """Return a model with random weights, the same in every call. No token ends its answers."""
    config = ModelConfig(num_layers, 2 * num_kv_heads, num_kv_heads, head_size, 10_000.0, 1e-5)
    width, inner = config.num_heads * head_size, num_kv_heads * head_size
    lot = torch.Generator().manual_seed(5)

    def weight(*shape):
        return (torch.randn(*shape, generator=lot) * shape[-1] ** -0.5).to(device())

    tensors = {
        "token_embd.weight": weight(VOCABULARY, width) * width**0.5,
        "output_norm.weight": weight(1, width)[0] * 9,
    }
    for layer in range(num_layers):
        name = f"blk.{layer}"
        tensors |= {f"{name}.attn_norm.weight": torch.ones(width).to(device())}
        tensors |= {f"{name}.ffn_norm.weight": torch.ones(width).to(device())}
        tensors |= {f"{name}.attn_q.weight": weight(width, width), f"{name}.attn_output.weight": weight(width, width)}
        tensors |= {f"{name}.attn_{half}.weight": weight(inner, width) * 2 for half in "kv"}
        tensors |= {f"{name}.ffn_{half}.weight": weight(width, width) for half in ("gate", "up", "down")}
    return LanguageModel(config, tensors, Numbers(), stop_token=-1)
