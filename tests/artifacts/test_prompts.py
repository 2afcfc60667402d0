"""Prompts that a model writes itself: where the user speaks, and which texts count."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from fovea.artifacts import prompts
from fovea.artifacts.prompts import main, user_prefix, write_prompts
from fovea.targets.checkpoint import CheckpointError


def test_the_model_goes_on_where_a_user_speaks(small_target) -> None:
    whole = small_target.tokenizer.apply_chat_template([{"role": "user", "content": "hello there"}], tokenize=False)
    before = small_target.tokenizer.decode(user_prefix(small_target))
    assert whole.startswith(before + "hello there")
    assert "user" in before


def test_a_target_without_a_chat_template_is_refused(small_target, monkeypatch) -> None:
    monkeypatch.setattr(small_target.tokenizer, "chat_template", None)
    with pytest.raises(CheckpointError, match="no chat template"):
        user_prefix(small_target)


@pytest.fixture
def writing(small_target, monkeypatch):
    """The target writes these texts, then nothing but new ones."""
    encode = lambda text: small_target.tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    end = small_target.spec.eos_ids[0]
    first, second = encode("what is the red square?"), encode("count the blue circles, please")
    rows = [[*first, end], [*first, end], [first[0], end], second * 9, [*second, end, 5]]
    calls = []

    def generate(input_ids, attention_mask, **settings):
        calls.append(settings)
        width = max(map(len, rows))
        padded = torch.tensor([row + [end] * (width - len(row)) for row in rows])
        padded[3] = torch.tensor((second * width)[:width])  # never ends
        return torch.cat((input_ids[: len(rows)], padded), dim=1)

    monkeypatch.setattr(small_target.model, "generate", generate)
    return calls, [small_target.tokenizer.decode(ids).strip() for ids in (first, second)]


def test_cut_short_and_repeated_texts_are_left_out(small_target, writing) -> None:
    calls, expected = writing
    assert list(islice(write_prompts(small_target, batch_size=5), 2)) == expected
    assert calls[0]["do_sample"]
    assert calls[0]["eos_token_id"] == list(small_target.spec.eos_ids)


def test_the_file_is_what_data_jsonl_reads(small_target, writing, tmp_path, monkeypatch) -> None:
    from datamodules.conversations import JsonlConversations

    monkeypatch.setattr("fovea.targets.load.load_target", lambda *_, **__: small_target)
    main(["--target", "anything", "--out", str(tmp_path / "p.jsonl"), "--count", "2", "--batch-size", "5"])
    read = JsonlConversations(tmp_path / "p.jsonl")
    assert [conversation.messages[0]["content"] for conversation in read] == writing[1]
    assert len({json.loads(line)["key"] for line in (tmp_path / "p.jsonl").read_text().splitlines()}) == 2


def test_a_missing_target_is_one_sentence(tmp_path) -> None:
    with pytest.raises(SystemExit, match="error: "):
        prompts.main(["--target", str(tmp_path / "nowhere"), "--out", str(tmp_path / "p.jsonl")])
