"""Writes kvviz's language model as a folder that vLLM can load: weights, config and tokenizer.

The folder is ``engines/SmolLM2-135M-Instruct`` in the cache folder. It is made from the unpacked weights of
``kvviz.engine``, so nothing is downloaded for it. The numbers stay float32. Only the rows of Q and K change their
order, because GGUF stores the two halves of a rotary pair next to each other.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvviz.bench.engine_packages import engines_folder, made_whole

NAME = "SmolLM2-135M-Instruct"
NEEDED_BYTES = 700 << 20

_MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""GGUF's name of each part of a layer, and the name in a Hugging Face folder."""

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def model_folder(progress: Callable[[str], None] = print) -> Path:
    """Return the model's folder. Make it if it is absent.

    Raises:
        ModelMissingError: the model file was not fetched.
        EngineError: the folder cannot be written.
    """
    target = engines_folder() / NAME
    if not target.is_dir():
        from safetensors.numpy import save_file

        from kvviz.engine import unpacked_weights, weights

        model = unpacked_weights.unpack(weights.find())
        progress(f"Writing the language model for vLLM (540 MB) into {target} ...")
        with made_whole(target, NEEDED_BYTES) as part:
            save_file(tensors(model.fields, model.tensors), part / "model.safetensors", {"format": "pt"})
            tied = "output.weight" not in model.tensors
            for name, content in (("config", config(model.fields, tied)), ("tokenizer", tokenizer(model.fields)),
                                  ("tokenizer_config", tokenizer_config(model.fields))):  # fmt: skip
                (part / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return target


def tensors(fields: dict, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors by their Hugging Face names."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    found = {}
    for name, tensor in given.items():
        first, _, rest = name.partition(".")
        if first != "blk":
            found[f"{_OUTSIDE_LAYERS[first]}.{rest}"] = tensor
            continue
        layer, part, kind = rest.split(".")
        tensor = rows_in_halves(tensor, heads[part]) if part in heads else tensor
        found[f"model.layers.{layer}.{_MODULES[part]}.{kind}"] = tensor
    return found


def rows_in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return Q or K rows in Hugging Face's order: per head, first all first members of pairs, then all second ones.

    Args:
        weight: shape ``(heads * D, hidden)``. In GGUF, rows 2i and 2i + 1 of a head are a rotary pair. The result has
            row i and row D / 2 + i instead.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def config(fields: dict, tied: bool) -> dict[str, Any]:
    """Return the content of config.json. ``tied`` is True if the output layer uses the embeddings."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float32",
        "hidden_size": hidden, "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"], "head_dim": hidden // heads,
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"], "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"], "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


CONTROL = 3
"""GGUF's token type of special tokens such as ``<|im_end|>``."""


def tokenizer(fields: dict) -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-level BPE that splits numbers into digits."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": number, "content": token, **flags, "special": True}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def tokenizer_config(fields: dict) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with the chat template of the GGUF."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{field}_token_id"]] for name, field in ids.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", **named,
        "model_max_length": fields["llama.context_length"], "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
