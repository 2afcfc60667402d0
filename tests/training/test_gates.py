"""Both gates pass what is right and stop each fault that they are there for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fovea.targets.teacher_batch import TeacherBatch
from fovea.training import gates
from fovea.training.gates import GateError, parity_gate, teacher_gate
from fovea.visual.retrieval import RetrievalConfig


def test_teacher_gate_passes_states_that_give_the_answers(head, samples) -> None:
    assert teacher_gate(head, TeacherBatch.collate(samples)) == 1.0
    half = TeacherBatch.collate(samples).to("cpu", torch.bfloat16)
    assert teacher_gate(head, half) >= gates.LEAST_AGREEMENT


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda s: {"last": s.last.roll(1, 0)}, id="states one token late"),
        pytest.param(lambda s: {"last": s.last.flip(0)}, id="states of other tokens"),
        pytest.param(lambda s: {"ids": s.ids.roll(1)}, id="ids of other tokens"),
        pytest.param(lambda s: {"last": s.last * torch.nan}, id="not a number"),
    ],
)
def test_teacher_gate_stops_states_that_are_not_behind_the_answers(head, samples, fault) -> None:
    batch = TeacherBatch.collate([replace(s, **fault(s)) for s in samples])
    with pytest.raises(GateError, match=r"teacher gate.*export"):
        teacher_gate(head, batch)


def test_teacher_gate_stops_another_head(head, samples) -> None:
    other = replace(head, lm_head_weight=head.lm_head_weight.flip(0))
    with pytest.raises(GateError, match=r"model\.path"):
        teacher_gate(other, TeacherBatch.collate(samples))


def test_teacher_gate_names_artifacts_without_answers(head, make_sample) -> None:
    with pytest.raises(GateError, match="sample 3 have no answer token"):
        teacher_gate(head, TeacherBatch.collate([make_sample(3, "tpttt")]))


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
