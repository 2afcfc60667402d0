"""The tokenizer: deterministic, lossless for any text, with Qwen's special tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fovea.targets.tiny.builder import _corpus
from fovea.targets.tiny.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(_corpus(0), 512)


def test_same_corpus_same_tokenizer(tokenizer):
    assert train_tokenizer(_corpus(0), 512).get_vocab() == tokenizer.get_vocab()


def test_special_tokens_are_single(tokenizer):
    for token in SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_digits_and_capitals_stand_alone(tokenizer):
    assert tokenizer.tokenize("KX72") == ["K", "X", "7", "2"]


def test_words_of_the_pictures_are_single_tokens(tokenizer):
    for word in (" circle", " purple", " centre", " triangles"):
        assert len(tokenizer.tokenize(word)) == 1


@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_loads_through_auto_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "The sign says K7Q. é 漢字"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "Read line 1."}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nRead line 1.<|im_end|>\n<|im_start|>assistant\n"
