"""Tree gate and cache gate of the target: against plain forward passes of transformers, in fp32."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea.decoding.tree import DraftTree
from fovea.targets.conversation import prompts_of

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
FEW = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def trees(draw, max_nodes: int = 9) -> DraftTree:
    """A root and up to ``max_nodes`` nodes below it, in any shape."""
    count = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, count)]
    tokens = draw(st.lists(st.integers(8, 299), min_size=count, max_size=count))
    depths = [0] * count
    for row in range(1, count):
        depths[row] = depths[parents[row]] + 1
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(count))


def path_to(tree: DraftTree, row: int) -> list[int]:
    rows = []
    while row >= 0:
        rows.append(row)
        row = int(tree.parents[row])
    return rows[::-1]


def verify(target, state, tree: DraftTree) -> torch.Tensor:
    return target.extend(
        state,
        torch.from_numpy(tree.tokens),
        state.text_positions(torch.from_numpy(tree.depths)),
        torch.from_numpy(tree.ancestor_mask()),
    )


def prompts(small_target, small_conversations):
    return [small_target.encode(prompts_of(c)[0]) for c in small_conversations]


@pytest.mark.parametrize("index", range(8))
def test_prefill_equals_a_plain_forward(small_target, small_conversations, reference_output, index) -> None:
    encoded = small_target.encode(small_conversations[index])
    _, prefill = small_target.prefill(encoded, 1)
    expected = reference_output(encoded, output_hidden_states=True)
    torch.testing.assert_close(prefill.hidden, expected.hidden_states[-1][0], **CLOSE)
    torch.testing.assert_close(prefill.embeds, expected.hidden_states[0][0], **CLOSE)
    torch.testing.assert_close(small_target.lm_head(prefill.hidden), expected.logits[0], **CLOSE)
    torch.testing.assert_close(prefill.embeds[prefill.is_visual], prefill.visual)


@FEW
@given(tree=trees(), index=st.integers(0, 7))
def test_every_node_equals_a_plain_forward_over_its_path(
    small_target, small_conversations, reference_output, tree, index
) -> None:
    encoded = prompts(small_target, small_conversations)[index]
    state, _ = small_target.prefill(encoded, 4, draft_rows=len(tree))
    logits = small_target.lm_head(verify(small_target, state, tree))
    for row in range(len(tree)):
        path = tree.tokens[path_to(tree, row)].tolist()
        torch.testing.assert_close(logits[row], reference_output(encoded, path).logits[0, -1], **CLOSE)


def test_a_slot_in_the_place_of_a_rotary_position_would_show(small_target, small_conversations) -> None:
    encoded = prompts(small_target, small_conversations)[0]
    state, _ = small_target.prefill(encoded, 4, draft_rows=4)
    assert state.rope_delta < 0
    ids, offsets = torch.tensor([20, 30]), torch.tensor([0, 1])
    right = small_target.extend(state, ids, state.text_positions(offsets))
    slots = (state.length + offsets).expand(3, -1)
    wrong = small_target.extend(state, ids, slots)
    assert (small_target.lm_head(right) - small_target.lm_head(wrong)).abs().max() > 0.1


def test_siblings_do_not_see_each_other(small_target, small_conversations) -> None:
    encoded = prompts(small_target, small_conversations)[3]
    state, _ = small_target.prefill(encoded, 4, draft_rows=8)
    tree = DraftTree(np.array([50, 60, 70, 80, 90]), np.array([-1, 0, 0, 1, 2]), np.array([0, 1, 1, 2, 2]), np.zeros(5))
    before = verify(small_target, state, tree)
    tree.tokens[1] = 61
    after = verify(small_target, state, tree)
    moved = (before - after).abs().amax(1)
    assert moved[[0, 2, 4]].max() < 1e-5
    assert moved[[1, 3]].min() > 1e-2


@FEW
@given(rounds=st.lists(st.tuples(trees(6), st.integers(0, 5)), min_size=1, max_size=4), index=st.integers(0, 7))
def test_after_any_acceptance_the_cache_is_that_of_a_fresh_pass(
    small_target, small_conversations, reference_output, rounds, index
) -> None:
    encoded = prompts(small_target, small_conversations)[index]
    state, _ = small_target.prefill(encoded, 40, draft_rows=8)
    committed: list[int] = []
    for tree, choice in rounds:
        verify(small_target, state, tree)
        accepted = path_to(tree, choice % len(tree))
        small_target.commit(state, accepted)
        committed += tree.tokens[accepted].tolist()
    assert state.length == encoded.ids.shape[0] + len(committed)
    reference = reference_output(encoded, committed, use_cache=True)
    layers = getattr(reference, "cache", None) or reference.past_key_values
    for ours, theirs in zip(state.cache.buffer, layers.layers, strict=True):
        torch.testing.assert_close(ours[0, :, :, : state.length], theirs.keys, **CLOSE)
        torch.testing.assert_close(ours[1, :, :, : state.length], theirs.values, **CLOSE)


def greedy_answer(target, encoded, count: int) -> list[int]:
    """Prefill, then one token at a time."""
    state, prefill = target.prefill(encoded, count)
    answer = [int(target.lm_head(prefill.hidden[-1]).argmax())]
    while len(answer) < count and answer[-1] not in target.spec.eos_ids:
        answer.append(step(target, state, answer[-1]))
    return answer


def step(target, state, token: int) -> int:
    hidden = target.extend(state, torch.tensor([token]), state.text_positions(torch.tensor([0])))
    target.commit(state, [0])
    return int(target.lm_head(hidden[0]).argmax())


def plain_generate(model, target, encoded, count: int) -> list[int]:
    """transformers' greedy ``generate``, without the repetition penalty of the checkpoint."""
    inputs = {"input_ids": encoded.ids[None], "attention_mask": torch.ones_like(encoded.ids[None])}
    inputs |= target.generation_inputs([encoded], encoded.is_visual[None])
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False, repetition_penalty=1.0)
    return output[0, encoded.ids.shape[0] :].tolist()


def test_one_token_at_a_time_equals_generate(small_target, small_conversations, reference_model) -> None:
    for encoded in prompts(small_target, small_conversations):
        expected = plain_generate(reference_model, small_target, encoded, 24)
        assert greedy_answer(small_target, encoded, 24) == expected
        assert plain_generate(small_target.model, small_target, encoded, 24) == expected


def test_requests_interleave_and_nothing_stays_on_the_model(small_target, small_conversations) -> None:
    first, second, text = (prompts(small_target, small_conversations)[i] for i in (0, 7, 5))
    alone = [greedy_answer(small_target, encoded, 12) for encoded in (first, second, text)]
    plain_generate(small_target.model, small_target, second, 3)  # leaves its rope delta on the module
    states = [small_target.prefill(encoded, 12) for encoded in (first, second, text)]
    answers = [[int(small_target.lm_head(prefill.hidden[-1]).argmax())] for _, prefill in states]
    for _ in range(11):
        for answer, (state, _) in zip(answers, states, strict=True):
            answer.append(step(small_target, state, answer[-1]))
    for answer, expected in zip(answers, alone, strict=True):
        assert answer[: len(expected)] == expected
    assert [greedy_answer(small_target, encoded, 12) for encoded in (text, second, first)] == alone[::-1]


def test_a_second_extend_drops_what_was_pending(small_target, small_conversations) -> None:
    encoded = prompts(small_target, small_conversations)[0]
    state, _ = small_target.prefill(encoded, 4)
    positions = state.text_positions(torch.tensor([0]))
    small_target.extend(state, torch.tensor([40]), positions)
    again = small_target.extend(state, torch.tensor([41]), positions)
    fresh, _ = small_target.prefill(encoded, 4)
    torch.testing.assert_close(again, small_target.extend(fresh, torch.tensor([41]), positions), rtol=0, atol=0)


def test_a_full_cache_says_so(small_target, small_conversations) -> None:
    encoded = prompts(small_target, small_conversations)[5]
    state, _ = small_target.prefill(encoded, 2)
    with pytest.raises(ValueError, match=r"KV cache holds \d+ rows"):
        small_target.extend(state, torch.arange(10, 14), state.text_positions(torch.arange(4)))


def test_a_prompt_beyond_the_context_is_refused_before_any_work(small_target, small_conversations) -> None:
    encoded = prompts(small_target, small_conversations)[0]
    with pytest.raises(ValueError, match=r"conversation 'image' reaches position .* has 2048 positions"):
        small_target.prefill(encoded, 2048)
    late = dataclasses.replace(encoded, next_position=2048 - 8)
    small_target.prefill(late, 8)


def test_the_target_is_frozen_and_shares_its_head(small_target) -> None:
    assert not any(p.requires_grad for p in small_target.model.parameters())
    assert not any(m.training for m in small_target.model.modules())
    head = small_target.head
    ids = torch.tensor([3, 9])
    assert torch.equal(head.embed(ids), small_target.embed(ids))
    hidden = torch.randn(2, small_target.spec.hidden_size)
    assert torch.equal(head.logits(hidden), small_target.lm_head(hidden))
