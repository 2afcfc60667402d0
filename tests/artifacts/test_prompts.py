"""Prompts that a model writes itself: where the user speaks, and which texts count."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from datamodules.conversations import JsonlConversations
from fovea.artifacts import prompts
from fovea.artifacts.prompts import NucleusDraw, main, user_prefix, write_prompts
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
    assert list(islice(write_prompts(small_target, batch_size=5), 2)) == [expected, []]
    assert isinstance(calls[0]["logits_processor"][0], NucleusDraw)
    assert calls[0]["eos_token_id"] == list(small_target.spec.eos_ids)


@pytest.fixture
def command(small_target, tmp_path, monkeypatch):
    """Runs the command into this file, which is returned."""
    monkeypatch.setattr(prompts, "load_target", lambda *_, **__: small_target)
    monkeypatch.setattr(prompts, "weights_fingerprint", lambda _: "w")

    def run(name: str, *options: str) -> Path:
        main(["--target", "anything", "--out", str(tmp_path / name), *options])
        return tmp_path / name

    return run


def test_the_file_is_what_data_jsonl_reads(writing, command) -> None:
    path = command("p.jsonl", "--count", "2", "--batch-size", "5")
    assert [conversation.messages[0]["content"] for conversation in JsonlConversations(path)] == writing[1]
    assert len({json.loads(line)["key"] for line in path.read_text().splitlines()}) == 2


@pytest.mark.parametrize("torn", [False, True])
def test_a_stopped_call_goes_on_to_the_same_file(torn, small_target, command, tmp_path, monkeypatch) -> None:
    """Batches are real draws; the second call is stopped in its third batch, with or without half a line written."""
    generate, calls = small_target.model.generate, []

    def stopped(*args, **settings):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        written = generate(*args, **{**settings, "max_new_tokens": 12})
        written[:, -1] = small_target.spec.eos_ids[0]
        return written

    monkeypatch.setattr(small_target.model, "generate", stopped)
    options = ("--count", "9", "--batch-size", "3", "--seed", "5")
    with pytest.raises(KeyboardInterrupt):
        command("p.jsonl", *options)
    (partial,) = tmp_path.glob(".p.jsonl.*.partial")
    if torn:
        partial.write_text(partial.read_text()[:-9])
    resumed = command("p.jsonl", *options).read_text()
    assert not partial.exists()
    asked = len(calls)
    assert command("whole.jsonl", *options).read_text() == resumed
    assert resumed.count("\n") == 9
    assert asked - 3 < len(calls) - asked


def test_a_missing_target_is_one_sentence(tmp_path) -> None:
    with pytest.raises(SystemExit, match="error: "):
        prompts.main(["--target", str(tmp_path / "nowhere"), "--out", str(tmp_path / "p.jsonl")])


@pytest.mark.parametrize(("spread", "top_p"), [(4.0, 0.95), (1.0, 0.9), (0.01, 0.95), (3.0, 1.0)])
def test_draws_are_those_of_transformers_warpers(spread, top_p) -> None:
    """Steep rows, and rows so flat that the most likely tokens do not make up the mass."""
    vocabulary, draws = 3 * prompts._LIKELY, 4000
    torch.manual_seed(0)
    scores = torch.randn(1, vocabulary) * spread
    warped = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(0.8)(None, scores.clone())).softmax(dim=-1)[0]
    given = NucleusDraw(0.8, top_p)(torch.empty(draws, 0), scores.expand(draws, -1))
    assert (given == 0).sum(dim=-1).eq(1).all()
    assert given.isinf().sum() == draws * (vocabulary - 1)
    drawn = given.argmax(dim=-1).bincount(minlength=vocabulary)
    assert not drawn[warped == 0].any()
    # By groups: most tokens are drawn once or never.
    for group in warped.argsort(descending=True).split(vocabulary // 8):
        expected = warped[group].sum().item()
        assert drawn[group].sum() / draws == pytest.approx(expected, abs=4 * (expected / draws) ** 0.5 + 1e-3)


def test_each_row_is_drawn_from_its_own_nucleus() -> None:
    """One row is covered by the likely tokens and its neighbour is not."""
    vocabulary = 2 * prompts._LIKELY
    scores = torch.zeros(2, vocabulary)
    scores[0, 7] = 50.0
    torch.manual_seed(1)
    seen = {tuple(NucleusDraw(1.0, 0.95)(torch.empty(2, 0), scores).argmax(dim=-1).tolist()) for _ in range(200)}
    assert {first for first, _ in seen} == {7}
    assert len({second for _, second in seen}) > 150


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "0"), "--temperature must be above 0"),
        (("--top-p", "0"), "--top-p must be in"),
        (("--top-p", "1.5"), "--top-p must be in"),
        (("--batch-size", "0"), "--batch-size must be 1 or more"),
    ],
)
def test_settings_that_cannot_draw_are_refused(command, capsys, options, said) -> None:
    with pytest.raises(SystemExit):
        command("p.jsonl", *options)
    assert said in capsys.readouterr().err


def test_a_model_that_has_nothing_new_to_say_ends_the_call(writing, command, tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"error: the last 20 batches brought no new prompt behind the 2 in .*--count"):
        command("p.jsonl", "--count", "3", "--batch-size", "5")
    assert command("p.jsonl", "--count", "2", "--batch-size", "5").read_text().count("\n") == 2
