"""Both gates pass what is right and stop each fault that they are there for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fovea.targets.teacher_batch import TeacherBatch
from fovea.training import gates
from fovea.training.gates import (
    Agreement,
    GateError,
    _probability_of_as_many,
    parity_gate,
    teacher_agreement,
    teacher_gate,
)
from fovea.visual.retrieval import RetrievalConfig


def judge(head, *batches: TeacherBatch) -> Agreement:
    """The teacher gate over ``batches``, and what it judged."""
    found = sum((teacher_agreement(head, batch) for batch in batches), Agreement())
    teacher_gate(found)
    return found


def test_teacher_gate_passes_states_that_give_the_answers(head, samples) -> None:
    batch = TeacherBatch.collate(samples)
    tokens = int(batch.answer_mask.sum())
    assert judge(head, batch) == Agreement(tokens)
    half = judge(head, batch.to("cpu", torch.bfloat16), batch)
    assert (half.tokens, half.wrong) == (2 * tokens, 0)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda s: {"last": s.last.roll(1, 0)}, id="states one token late"),
        pytest.param(lambda s: {"last": s.last.flip(0)}, id="states of other tokens"),
        pytest.param(lambda s: {"ids": s.ids.roll(1)}, id="ids of other tokens"),
        pytest.param(lambda s: {"last": s.last * torch.nan}, id="not a number"),
        pytest.param(lambda s: {"last": s.last * 0}, id="nothing captured"),
    ],
)
def test_teacher_gate_stops_states_that_are_not_behind_the_answers(head, samples, fault, count) -> None:
    """Also when there are no more than seven answer tokens."""
    batch = TeacherBatch.collate([replace(s, **fault(s)) for s in samples[:count]])
    for stored in (batch, batch.to("cpu", torch.bfloat16)):
        with pytest.raises(GateError, match=r"teacher gate.*export"):
            judge(head, stored)


def test_teacher_gate_stops_another_head(head, samples) -> None:
    other = replace(head, lm_head_weight=head.lm_head_weight.flip(0))
    with pytest.raises(GateError, match=r"model\.path"):
        judge(other, TeacherBatch.collate(samples))


def test_teacher_gate_needs_answer_tokens(head, make_sample) -> None:
    with pytest.raises(GateError, match="no answer token"):
        judge(head, TeacherBatch.collate([make_sample(3, "tpttt")]))


def test_a_near_tie_is_told_from_a_wrong_token(head, samples) -> None:
    """The best token's rival gets its logit less a hair, and is the one in the answer."""
    batch = TeacherBatch.collate(samples[:1])
    row, place = batch.answer_mask.nonzero()[0].tolist()
    token, rival = int(batch.ids[row, place]), 7
    state = batch.last[row, place - 1].bfloat16().float()
    weights = head.lm_head_weight.clone()
    for gap, expected in ((0.1, (1, 0)), (3.0, (0, 1))):
        weights[rival] = weights[token] - gap * state / state.square().sum()
        ids = batch.ids.clone()
        ids[row, place] = rival
        spoiled = replace(batch, ids=ids).to("cpu", torch.bfloat16)
        found = teacher_agreement(replace(head, lm_head_weight=weights), spoiled)
        assert (found.ties, found.wrong) == expected
        # What was not rounded has no near-ties.
        assert teacher_agreement(replace(head, lm_head_weight=weights), replace(batch, ids=ids)).ties == 0


@pytest.mark.parametrize(
    ("tokens", "ties", "wrong", "passes"),
    [
        (70, 0, 1, True),
        (70, 2, 1, True),
        (70, 0, 4, False),
        (3, 0, 1, True),
        (3, 0, 2, False),
        (200, 0, 5, True),
        (200, 0, 7, False),
        (200, 20, 0, True),
        (200, 30, 0, False),
        (10_000, 0, 50, True),
        (10_000, 0, 80, False),
        (10_000, 500, 0, True),
        (10_000, 700, 0, False),
    ],
)
def test_what_chance_explains(tokens, ties, wrong, passes) -> None:
    if passes:
        teacher_gate(Agreement(tokens, ties, wrong))
    else:
        with pytest.raises(GateError, match=f"of {tokens} answer tokens"):
            teacher_gate(Agreement(tokens, ties, wrong))


@pytest.mark.parametrize("tokens", [20, 200, 2000])
def test_a_right_capture_is_hardly_ever_refused(tokens) -> None:
    """At the worst share that is allowed, fewer than one in two hundred; three times that share shows soon enough."""
    draw = torch.Generator().manual_seed(tokens)

    def refused(share: float) -> float:
        counts = torch.binomial(torch.full((2000,), float(tokens)), torch.full((2000,), share), generator=draw)
        likely = {int(c): _probability_of_as_many(int(c), tokens, 0.005) for c in counts.unique()}
        return sum(likely[int(c)] < gates.SIGNIFICANCE for c in counts) / 2000

    assert refused(0.005) < 0.005
    if tokens >= gates.ENOUGH_TOKENS:
        assert refused(0.05) > 0.9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_correction_depth": 3, "recursion": "corrected"},
        {"max_correction_depth": -1},
        {"retrieval": RetrievalConfig(mode="random", k=2)},
        {"retrieval": RetrievalConfig(mode="once_per_block", k=2)},
        {"visual_prefix": "none"},
        {"feature_injection": "cross_attention"},
        {"rope": "1d"},
    ],
    ids=str,
)
def test_both_paths_agree(make_drafter, samples, changes) -> None:
    batch = TeacherBatch.collate(samples).to("cpu", torch.bfloat16)
    assert 0 < parity_gate(make_drafter(**changes), batch) < gates.PARITY_TOLERANCE


def test_parity_leaves_drafter_and_random_state_alone(make_drafter, samples) -> None:
    drafter = make_drafter()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    state = torch.random.get_rng_state()
    parity_gate(drafter, TeacherBatch.collate(samples))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


def test_parity_gate_stops_a_wrong_position(make_drafter, samples, monkeypatch) -> None:
    drafter = make_drafter()
    text = type(drafter.rotary).text

    def one_late(self, position, *rest):
        return text(self, position + 1, *rest)

    monkeypatch.setattr(type(drafter.rotary), "text", one_late)
    with pytest.raises(GateError, match=r"parity gate: at draft step 1 behind token \d+ of sample 0"):
        parity_gate(drafter, TeacherBatch.collate(samples))


def test_parity_gate_stops_a_correction_that_only_training_has(make_drafter, samples, monkeypatch) -> None:
    monkeypatch.setattr(gates.NeuralProposer, "start", _without_memory(gates.NeuralProposer.start))
    with pytest.raises(GateError, match="parity gate"):
        parity_gate(make_drafter(), TeacherBatch.collate(samples))


def _without_memory(start):
    def forgetful(self, prefill) -> None:
        start(self, prefill)
        self.memory = None

    return forgetful
