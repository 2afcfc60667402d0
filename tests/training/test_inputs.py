"""What a drafter reads while it trains is what it reads while it decodes, row by row, from one and the same target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fovea.artifacts.schema import META, TENSORS, SampleMeta, decode_sample, encode_sample
from fovea.decoding.growth import TreeConfig
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import build_drafter, drafter_type
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.training.unroll import unroll

ANSWER = [20, 31, 42, 53, 64, 75, 86]


class Recorded:
    """The rows of every call of a drafter: embeddings, states, rotations, and which of them show a picture."""

    def __init__(self, drafter) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []
        drafter.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, drafter, inputs, named) -> None:
        embeds, states, rotation, _ = inputs
        seen = named.get("is_visual")
        seen = torch.zeros(embeds.shape[:2], dtype=torch.bool) if seen is None else seen
        rotations = (part.reshape(-1, part.shape[-1]) for part in rotation)
        self.calls.append((embeds[0], states[0], *rotations, seen[0]))

    def rows(self, calls: int) -> list[torch.Tensor]:
        """The first ``calls`` calls, their rows behind one another."""
        return [torch.cat(parts).clone() for parts in zip(*self.calls[:calls], strict=True)]


def stored(sample: TeacherSample) -> TeacherSample:
    """``sample`` as an artifact gives it back."""
    members = encode_sample(sample, SampleMeta(), "fp32")
    data = torch.frombuffer(bytearray(members[TENSORS]), dtype=torch.uint8)
    return decode_sample(members[META], data, sample.feature_layers)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["fovea", "eaglevlm", "msd", "eagle3"])
def test_rows_of_training_and_decoding_are_the_same(name, small_target, small_conversations, monkeypatch) -> None:
    """Behind two pictures whose visual tokens bear their number: ids, embeddings, positions and mask are shifted alike,
    and the states are those of the tokens before."""
    (conversation,) = (c for c in small_conversations if c.key == "two")
    prompt, whole = small_target.encode(conversation, []), small_target.encode(conversation, [ANSWER])
    count, see = int(prompt.is_visual.sum()), small_target.visual_tokens

    def numbered(vision):
        visual = see(vision)
        visual[:, 0] = torch.arange(count)
        return visual

    monkeypatch.setattr(small_target, "visual_tokens", numbered)
    torch.manual_seed(0)
    changes: dict[str, Any] = {"draft_vocabulary": None} if name == "eagle3" else {}
    config = drafter_type(name).config_type(depth=2, **changes)
    drafter = build_drafter(name, small_target.spec, config, small_target.head).eval()
    layers = drafter.feature_layers

    (sample,) = small_target.teach([whole], [1, 2], **({"feature_layers": layers} if layers else {}))
    training = Recorded(drafter)
    unroll(drafter, TeacherBatch.collate([stored(sample)]), steps=2)

    decoding = Recorded(drafter)
    state, prefill = small_target.prefill(prompt, len(ANSWER), draft_rows=1, feature_layers=layers)
    proposer = NeuralProposer(drafter, TreeConfig(width=1, depth=2, nodes=3))
    proposer.start(replace(prefill, capacity=len(whole.ids) + 4))
    behind = prefill.read[-1:]
    for token in ANSWER:
        proposer.commit(torch.tensor([token]), behind)
        hidden = small_target.extend(state, torch.tensor([token]), state.text_positions(torch.tensor([0])))
        behind = state.read(hidden).clone()
        small_target.commit(state, [0])
    proposer.node_logits(np.array(ANSWER[-1:]), np.array([-1]), 0)

    length = len(prompt.ids) - 1 + len(ANSWER) - 1  # behind the last answer token nothing is taught
    trained = training.rows(1)
    decoded = [rows[:length] for rows in decoding.rows(2)]
    assert len(trained[0]) == length
    for place in (0, 2, 3, 4):  # embeddings, both parts of the rotations, mask
        assert torch.equal(trained[place], decoded[place])
    torch.testing.assert_close(trained[1], decoded[1], rtol=1e-4, atol=1e-4)

    embeds, states, _, _, seen = trained
    assert seen.tolist() == whole.is_visual[1 : length + 1].tolist()
    assert embeds[seen][:, 0].tolist() == list(range(count))
    assert torch.equal(embeds[~seen], small_target.embed(whole.ids[1 : length + 1][~seen]))
    true = sample.last if not layers else sample.features
    assert true is not None
    assert torch.equal(states, drafter.inject(true[:length]))
