"""The importance of visual tokens against full attention matrices, and that training and decoding see the same."""

from dataclasses import replace

import pytest
import torch

from fovea.targets import attention
from fovea.targets.importance import visual_importance
from fovea.targets.teacher_batch import TeacherBatch, supervised_positions

CLOSE = {"atol": 1e-6, "rtol": 1e-4}


@pytest.fixture(scope="module")
def encoded(small_target, small_conversations):
    return [small_target.encode(conversation) for conversation in small_conversations]


@pytest.fixture(scope="module")
def taught(small_target, encoded):
    return small_target.teach(encoded, [1])


def test_importance_is_the_mean_attention_of_the_prompts_queries(encoded, taught, reference_output) -> None:
    turns = set()
    for one, sample in zip(encoded, taught, strict=True):
        weights = reference_output(one, output_attentions=True).attentions[-1][0].mean(0)
        answered = [*supervised_positions(one.answer_mask).nonzero()[:, 0].tolist(), len(one.ids) - 1]
        places = one.is_visual.nonzero()[:, 0].tolist()
        last = [next(end for end in answered if end >= place) for place in places]
        first = {end: place for place, end in reversed(list(zip(places, last, strict=True)))}
        expected = [weights[first[end] : end + 1, place].mean() for place, end in zip(places, last, strict=True)]
        turns.add(len(first))
        assert sample.importance is not None
        assert sample.importance.dtype == torch.float32
        torch.testing.assert_close(sample.importance, torch.tensor(expected), **CLOSE)
        if places:
            assert sample.importance.std() > 0.01 * sample.importance.mean()
    assert turns == {0, 1, 2}


def test_a_prompt_gives_the_importance_that_training_saw(small_target, small_conversations, taught) -> None:
    """Whatever the answer says, and whatever is asked later."""
    compared = 0
    for conversation, sample in zip(small_conversations, taught, strict=True):
        for turns in range(1, len(conversation.messages) + 1, 2):
            seen = sum(part["type"] == "image" for m in conversation.messages[:turns] for part in _parts(m))
            prompt = replace(conversation, messages=conversation.messages[:turns], images=conversation.images[:seen])
            _, prefill = small_target.prefill(small_target.encode(prompt), 8)
            importance = prefill.importance()
            torch.testing.assert_close(importance, sample.importance[: len(importance)], **CLOSE)
            compared += len(importance) > 0
    assert compared >= 9


def test_attention_of_single_tokens_is_that_of_the_full_matrix(small_target, encoded, reference_output) -> None:
    rows = torch.tensor([3, 0, 7])
    for one in encoded:
        prefill = small_target.prefill(one, 1)[1]
        weights = reference_output(one, output_attentions=True).attentions[-1][0].mean(0)
        found = prefill.visual_attention(rows)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, weights[rows][:, one.is_visual], **CLOSE)


def test_a_text_behind_a_prompt_is_the_longer_prompt(small_target, small_conversations) -> None:
    """The states of prompt and answer in one pass are those that decoding meets one by one."""
    prompt = small_target.encode(small_conversations[0], [])
    answer = [5, 9, 7]
    state, prefill = small_target.prefill(prompt, len(answer))
    ids = torch.tensor(answer)
    extended = small_target.extend(state, ids, state.text_positions(torch.arange(3)))
    _, whole = small_target.prefill(prompt.followed_by(answer), 1)
    torch.testing.assert_close(whole.hidden, torch.cat((prefill.hidden, extended)), **CLOSE)
    assert whole.answer_mask.tolist() == [False] * len(prompt.ids) + [True] * 3
    torch.testing.assert_close(whole.importance(), prefill.importance(), **CLOSE)


def _parts(message) -> list[dict]:
    return message["content"] if isinstance(message["content"], list) else []


@pytest.mark.parametrize("rows", [1, 7])
def test_a_chunk_of_rows_at_a_time_gives_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(4, 20, 8, generator=draw), torch.randn(2, 20, 8, generator=draw)
    is_visual, supervised = torch.zeros(2, 20, dtype=torch.bool)
    is_visual[3:9] = is_visual[14:16] = True
    supervised[11:13] = supervised[18] = True
    whole = visual_importance(queries, keys, 0.3, is_visual, supervised)
    monkeypatch.setattr(attention, "_CHUNK_NUMBERS", 4 * 20 * rows)
    torch.testing.assert_close(visual_importance(queries, keys, 0.3, is_visual, supervised), whole)
    assert len(visual_importance(queries, keys, 0.3, is_visual & False, supervised)) == 0


def test_a_batch_keeps_importance_exact_and_only_if_all_have_it(taught) -> None:
    batch = TeacherBatch.collate(taught).to("cpu", torch.bfloat16)
    assert batch.importance is not None
    assert batch.importance.dtype == torch.float32
    assert batch.last.dtype == torch.bfloat16
    for row, sample in enumerate(taught):
        found = batch.importance[row]
        assert torch.equal(found[: len(sample.importance)], sample.importance)
        assert not found[len(sample.importance) :].any()
    (with_picture, text) = (next(s for s in taught if bool(len(s.visual)) is seen) for seen in (True, False))
    unknown = replace(with_picture, importance=None)
    assert TeacherBatch.collate([with_picture, unknown]).importance is None
    assert TeacherBatch.collate([with_picture, replace(text, importance=None)]).importance is not None
