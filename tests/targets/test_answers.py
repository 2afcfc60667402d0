import dataclasses

import pytest
import torch

from fovea.targets.chat_template import PromptError


@pytest.fixture(scope="module")
def answers(small_target, small_conversations):
    return small_target.answer(small_conversations, 12, batch_size=3)


def test_every_turn_equals_generate_on_the_same_prompt(
    small_target, small_conversations, reference_model, answers
) -> None:
    for conversation, given in zip(small_conversations, answers, strict=True):
        asked = [number for number, m in enumerate(conversation.messages) if m["role"] == "user"]
        assert len(given) == len(asked)
        for turn, number in enumerate(asked):
            messages = conversation.messages[: number + 1]
            shown = sum(
                part["type"] == "image"
                for m in messages
                if m["role"] == "user"
                for part in m["content"]
                if isinstance(part, dict)
            )
            prompt = dataclasses.replace(conversation, messages=messages, images=conversation.images[:shown])
            encoded = small_target.encode(prompt, given[:turn])
            inputs = {"input_ids": encoded.ids[None], "attention_mask": torch.ones_like(encoded.ids[None])}
            inputs |= small_target.generation_inputs([encoded], encoded.is_visual[None])
            output = reference_model.generate(**inputs, max_new_tokens=12, do_sample=False, repetition_penalty=1.0)
            assert output[0, encoded.ids.shape[0] :].tolist() == given[turn]


def test_batch_size_and_order_change_nothing(small_target, small_conversations, answers) -> None:
    assert small_target.answer(small_conversations, 12, batch_size=1) == answers
    assert small_target.answer(small_conversations[::-1], 12, batch_size=8) == answers[::-1]


def test_answers_end_with_their_end_token_or_at_the_cap(small_target, answers) -> None:
    ended = 0
    for answer in (answer for given in answers for answer in given):
        assert not set(answer[:-1]) & set(small_target.spec.eos_ids)
        ended += answer[-1] in small_target.spec.eos_ids
        assert len(answer) == 12 or answer[-1] in small_target.spec.eos_ids
    assert ended > 0


def test_what_the_assistant_says_in_the_conversation_is_ignored(small_target, small_conversations, answers) -> None:
    conversation = small_conversations[6]
    messages = [
        {**m, "content": "something <|im_end|> else"} if m["role"] == "assistant" else m for m in conversation.messages
    ]
    assert small_target.answer([dataclasses.replace(conversation, messages=messages)], 12, 1) == [answers[6]]


def test_the_targets_own_answers_pass_the_teacher_gate(small_target, small_conversations, answers) -> None:
    """State, LM head, argmax reproduces every token of an answer, its end token included."""
    encoded = [small_target.encode(c, given) for c, given in zip(small_conversations, answers, strict=True)]
    for one, sample in zip(encoded, small_target.teach(encoded, [1]), strict=True):
        said = one.answer_mask.nonzero().squeeze(-1)
        assert torch.equal(small_target.lm_head(sample.last[said - 1]).argmax(-1), one.ids[said])


def test_no_conversations_no_answers(small_target) -> None:
    assert small_target.answer([], 5, 2) == []


def test_answers_end_where_the_context_ends(small_target, small_conversations, answers, monkeypatch) -> None:
    """A later turn that has no room left is answered with nothing, and its conversation is refused by name."""
    conversation, given = small_conversations[6], answers[6]
    first = dataclasses.replace(conversation, messages=conversation.messages[:1], images=conversation.images[:1])
    room = 4
    context = len(small_target.encode(first).ids) + room
    monkeypatch.setattr(small_target, "spec", dataclasses.replace(small_target.spec, max_positions=context))
    (short,) = small_target.answer([conversation], 12, 1)
    assert short == [given[0][:room], [], []]
    with pytest.raises(
        PromptError, match=rf"'turns' has \d+ tokens, 16 of them visual, and .* context holds {context}"
    ):
        small_target.encode(conversation, short)
