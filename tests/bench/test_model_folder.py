"""The model's folder for vLLM: names, order of rows, tokenizer."""

import json

import numpy as np
import pytest

from kvviz.bench import model_folder
from kvviz.engine import unpacked_weights, weights

FIELDS = {
    "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.embedding_length": 8,
    "llama.feed_forward_length": 6, "llama.block_count": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0, "llama.vocab_size": 3, "llama.context_length": 64,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1, 3, 3], "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip


def test_rows_of_a_pair_move_to_the_two_halves_of_the_head():
    weight = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    assert model_folder.rows_in_halves(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_only_q_and_k_change_and_every_name_is_known():
    given = {f"blk.0.{part}.weight": np.arange(32.0, dtype=np.float32).reshape(8, 4) for part in model_folder._MODULES}
    given |= {f"{name}.weight": np.ones((2, 2), np.float32) for name in model_folder._OUTSIDE_LAYERS}
    found = model_folder.tensors(FIELDS, given)
    assert len(found) == len(given) and {"model.norm.weight", "lm_head.weight"} <= found.keys()
    changed = {name for name, one in found.items() if "layers" in name and one[1, 0] != 4}
    assert changed == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"}


def test_the_tokenizer_marks_control_tokens_as_special():
    found = model_folder.tokenizer(FIELDS)
    assert [(one["id"], one["content"]) for one in found["added_tokens"]] == [(1, "<s>"), (2, "</s>")]
    assert found["model"]["merges"] == [["a", "b"], ["c", "d"]]
    assert model_folder.tokenizer_config(FIELDS)["pad_token"] == "</s>"


def test_the_folder_is_written_once_and_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path))
    model = unpacked_weights.Unpacked(FIELDS, {"token_embd.weight": np.ones((3, 8), np.float32)})
    monkeypatch.setattr(weights, "find", lambda: tmp_path)
    monkeypatch.setattr(unpacked_weights, "unpack", lambda path: model)
    folder = model_folder.model_folder(lambda sentence: None)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    monkeypatch.setattr(weights, "find", lambda: pytest.fail("the folder is there"))
    assert model_folder.model_folder() == folder


def test_without_the_model_the_sentence_says_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path))
    with pytest.raises(weights.ModelMissingError, match="run kvviz fetch"):
        model_folder.model_folder(lambda sentence: None)
