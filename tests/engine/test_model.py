"""Tests of the language model: tokenizer, forward pass, and greedy generation with the reference backend."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.engine import model as model_module
from kvviz.engine.generate import Generation, PagedBackend, PlainBackend, generate
from kvviz.engine.model import LanguageModel, ModelConfig, load_model
from kvviz.engine.scenarios import QUESTION
from kvviz.engine.weights import ModelMissingError
from tests.engine.tiny import VOCABULARY, tiny_model
from tests.kernels.reference import attention_reference

SIZES = ModelConfig(30, 9, 3, 64, 100_000.0, 1e-5)
PROMPT = [1, 4093, 198, 36971, 281, 1296, 8545, 1701, 260, 6376, 314, 4461, 30, 2, 198, 1, 520, 9531, 198]


@lru_cache
def load_once() -> LanguageModel:
    return load_model()


@lru_cache
def plain_run(dtype: torch.dtype, count: int) -> Generation:
    """Return the answer to QUESTION with K and V in ordinary tensors of that dtype."""
    return generate(load_once(), PlainBackend(dtype), PROMPT, count)


@pytest.fixture(scope="module")
def model(model_path) -> LanguageModel:
    return load_once()


def bare() -> LanguageModel:
    """Return a model with sizes and almost no weights."""
    return LanguageModel(SIZES, {"output_norm.weight": torch.zeros(1)}, None, 2)


def test_sizes_are_those_of_the_file(model):
    assert replace(model.config, norm_epsilon=1e-5) == SIZES
    assert model.config.norm_epsilon == pytest.approx(1e-5)
    assert model.stop_token == 2


def test_known_ids(model):
    assert QUESTION == "Explain in three sentences why the sky is blue."
    assert model.encode(QUESTION) == PROMPT
    assert model.encode(f"\n {QUESTION}  ") == PROMPT


@pytest.mark.parametrize(
    "text",
    [
        "12345 and 007, 3.14159",
        "naïve café, Größe, 東京, Ελλάδα",
        "an emoji 🙂 and a family 👩‍👩‍👧",
        "tabs\tand\nlines  and   spaces",
        "x = {'a': [1, 2]}  # code",
        "I'm, you're, we'll",
    ],
)
def test_text_comes_back(model, text):
    assert model.decode(model.encode(text)) == f"user\n{text}\nassistant\n"


def test_digits_are_taken_one_by_one(model):
    digits = [model.encode(digit)[3] for digit in "2024"]
    assert [len(model.encode(digit)) for digit in "2024"] == [10] * 4
    assert model.encode("2024")[3:7] == digits and len(model.encode("2024")) == 13


def test_special_tokens_are_single_and_left_out_of_the_text(model):
    ids = model.encode("a<|im_end|>b")
    assert ids.count(2) == 2 and ids.count(1) == 2
    assert model.decode(ids) == "user\nab\nassistant\n"
    assert model.decode([1, 2]) == ""


@pytest.mark.parametrize("question", ["", "  ", "\n\t"])
def test_an_empty_question_is_refused(question):
    with pytest.raises(ValueError, match="the question is empty"):
        bare().encode(question)


def test_a_missing_file_is_reported(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path))
    with pytest.raises(ModelMissingError, match="is absent: run kvviz fetch"):
        load_model()


def test_a_file_with_another_tokenizer_is_refused(model_path, monkeypatch):
    monkeypatch.setattr(model_module, "SPLITTING", "another")
    with pytest.raises(ValueError, match="uses the tokenizer splitting 'smollm', but kvviz supports only 'another'"):
        load_model("cpu")


def test_positions_turn_pairs_like_complex_numbers():
    positions = torch.tensor([0, 1, 7, 4095])
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    turned = model_module._rotate_pairs(x, *bare()._rope(positions))
    steps = 100_000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    turns = torch.polar(torch.ones(4, 1, 32, dtype=torch.float64), (positions[:, None] * steps)[:, None, :])
    want = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (32, 2))) * turns).flatten(-2)
    assert torch.allclose(turned.double(), want, atol=1e-5)
    assert torch.equal(turned[0], x[0])


def test_each_layer_hands_over_its_query_key_and_value(model):
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype))
        return torch.zeros_like(query)

    ids = torch.tensor(PROMPT[:4], device=model.device)
    logits = model.forward(ids, torch.arange(4, device=model.device), attend)
    assert seen == [(layer, (4, 9, 64), (4, 3, 64), (4, 3, 64), torch.float32) for layer in range(30)]
    assert tuple(logits.shape) == (4, 49_152) and logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_attends_causally_over_what_it_kept(dtype):
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(7, heads, 64, generator=generator) for heads in (9, 3, 3))
    backend, outputs = PlainBackend(dtype), []
    for part in torch.arange(7).split(3):
        backend.begin(part)
        outputs.append(backend(0, query[part], key[part], value[part]))
    want = attention_reference(query, key.to(dtype), value.to(dtype), 7)
    assert torch.allclose(torch.cat(outputs), want, atol=1e-5)
    assert tuple(backend.kept[0][0].shape) == (7, 3, 64)


def test_the_reference_answers(model):
    run = plain_run(torch.float32, 8)
    assert run.text == "The sky is blue because of a process"
    assert model.decode(list(run.token_ids)) == run.text
    assert len(run.margins) == len(run.token_ids) == 8 and min(run.margins) > 0


@pytest.mark.parametrize("chunk", [5, 19])
def test_a_prefill_in_chunks_gives_the_same(model, chunk):
    whole = plain_run(torch.float32, 8)
    parts = generate(model, PlainBackend(), PROMPT, 3, chunk=chunk)
    assert parts.token_ids == whole.token_ids[:3]
    assert parts.margins == pytest.approx(whole.margins[:3], abs=1e-3)


def test_a_backend_starts_afresh_with_a_new_prompt(model):
    backend = PlainBackend()
    generate(model, backend, PROMPT[:5], 1)
    assert generate(model, backend, PROMPT, 1).token_ids == plain_run(torch.float32, 8).token_ids[:1]


def test_generation_ends_at_the_stop_token(model, monkeypatch):
    second = plain_run(torch.float32, 8).token_ids[1]
    monkeypatch.setattr(model, "stop_token", second)
    run = generate(model, PlainBackend(), PROMPT, 8)
    assert run.token_ids == plain_run(torch.float32, 8).token_ids[:2]


@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [
        ([], 5, "the prompt has 0 tokens: pass at least one token"),
        ([1, 2, 3], 0, "max_new_tokens is 0, but it must be at least 1"),
        ([1, 2], -1, "max_new_tokens is -1, but it must be at least 1"),
    ],
)
def test_an_empty_request_is_refused(prompt, count, said):
    with pytest.raises(ValueError, match=said):
        generate(bare(), PlainBackend(), prompt, count)


@pytest.mark.parametrize(("prompt", "count"), [(30, 3), (1, 32), (33, 1)])
def test_a_request_that_does_not_fit_is_refused(prompt, count):
    cache = allocate(CacheSpec(1, 4, 16, 3, 64, "bfloat16"), "NHD", "meta")
    backend = PagedBackend(cache, None, blocks=(3, 1))
    assert (backend.max_tokens, PagedBackend(cache, None).max_tokens) == (32, 64)
    with pytest.raises(ValueError, match=f"has {prompt} tokens and max_new_tokens is {count}, but .* only 32 tokens"):
        generate(bare(), backend, [1] * prompt, count)


def test_positions_become_slots_of_the_blocks_given():
    cache = allocate(CacheSpec(1, 4, 4, 3, 64, "bfloat16"), "NHD")
    backend = PagedBackend(cache, None, blocks=(3, 0, 2))
    backend.begin(torch.arange(2, 10))
    meta = backend.metadata
    assert meta.slot_mapping.tolist() == [14, 15, 0, 1, 2, 3, 8, 9]
    assert meta.block_table.tolist() == [[3, 0, 2]]
    assert (meta.seq_lens.tolist(), meta.query_start_loc.tolist()) == ([10], [0, 8])
    dtypes = [t.dtype for t in (meta.slot_mapping, meta.block_table, meta.seq_lens, meta.query_start_loc)]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int32]


def test_a_position_without_a_slot_is_refused():
    spec = CacheSpec(1, 2, 4, 1, 16, "bfloat16")
    backend = PagedBackend(allocate(spec, "NHD"), None)
    backend.begin(torch.arange(8))
    with pytest.raises(ValueError, match="position 8 has no slot, because 2 blocks have only 8 slots"):
        backend.begin(torch.arange(6, 9))


@pytest.mark.parametrize(
    ("blocks", "said"),
    [((0, 0), "block 0 is named twice"), ((0, 4), "block 4 does not"), ((-1, 0), "block -1"), ((0.0,), "block 0.0")],
)
def test_wrong_blocks_of_a_sequence_are_refused(blocks, said):
    cache = allocate(CacheSpec(1, 4, 4, 1, 16, "bfloat16"), "NHD")
    with pytest.raises(ValueError, match=said):
        PagedBackend(cache, None, blocks)


def test_numpy_integers_are_blocks():
    cache = allocate(CacheSpec(1, 4, 4, 1, 16, "bfloat16"), "NHD")
    backend = PagedBackend(cache, None, tuple(np.array([3, 1])))
    backend.begin(torch.arange(2))
    assert backend.blocks == (3, 1) and {type(block) for block in backend.blocks} == {int}
    assert backend.metadata.slot_mapping.tolist() == [12, 13]


@pytest.mark.parametrize("token", [VOCABULARY, -1, 1.5])
def test_a_token_outside_the_vocabulary_is_one_sentence(token):
    model = tiny_model()
    said = rf"token 1 is {token}, but the vocabulary has only tokens 0 to {VOCABULARY - 1}$"
    with pytest.raises(ValueError, match=said):
        generate(model, PlainBackend(), [0, token], 1)
    if model.device.type == "cpu" and isinstance(token, int):
        with pytest.raises(ValueError, match=said):
            model.forward(torch.tensor([0, token]), torch.arange(2), lambda layer, query, *more: query)
    assert generate(model, PlainBackend(), list(np.array([0, 5])), 1).token_ids


def test_a_cache_for_another_model_is_refused():
    backend = PagedBackend(allocate(CacheSpec(2, 4, 4, 3, 64, "bfloat16"), "NHD"), None)
    with pytest.raises(ValueError, match="num_layers 2, but the model has num_layers 30"):
        backend.check(SIZES)


def test_each_token_is_told_when_it_is_known(model):
    told = []
    answer = generate(
        model, PlainBackend(), model.encode("Why is the sky blue?"), 3, on_token=lambda *one: told.append(one)
    )
    assert told == list(zip(answer.tokens, answer.margins, strict=True)) and "".join(answer.tokens) == answer.text
