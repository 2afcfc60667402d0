"""Untrained drafters beside a real architecture: the answer stays the target's, and drafts are accepted on the way."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import build_drafter, drafter_type

CAP = 24
DRAFTERS = ("dream", "vispec", "specvlm")
#: One picture, two, none, and a second turn with a picture of its own.
PROMPTS = {"image": 1, "two": 1, "between": 1, "text": 1, "turns": 5}


class Prompted(NeuralProposer):
    """A drafter whose best children are, now and then, what the target will say: so that some drafts are accepted."""

    def __init__(self, drafter, tree, answer: list[int]) -> None:
        super().__init__(drafter, tree)
        self.answer, self.said = answer, 0

    def commit(self, tokens, states) -> None:
        super().commit(tokens, states)
        self.said += len(tokens)

    def node_logits(self, tokens, parents, depth):
        logits = super().node_logits(tokens, parents, depth)
        ahead = self.said + depth
        if ahead < len(self.answer) and self.knows(ahead):
            logits[:, self.answer[ahead]] += 100.0
        return logits

    def knows(self, place: int) -> bool:
        return place % 5 != 0


@pytest.fixture(scope="module")
def prompts(small_target, small_conversations):
    return {
        conversation.key: small_target.encode(
            replace(
                conversation,
                messages=(messages := conversation.messages[: PROMPTS[conversation.key]]),
                images=conversation.images[: str(messages).count("'image'")],
            )
        )
        for conversation in small_conversations
        if conversation.key in PROMPTS
    }


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("key", PROMPTS)
def test_the_answer_is_the_autoregressive_one(name, key, small_target, prompts, enlarge):
    torch.manual_seed(0)
    drafter = build_drafter(name, small_target.spec, drafter_type(name).config_type(), small_target.head).eval()
    enlarge(drafter, seed=1)
    encoded = prompts[key]
    sampled = Selection({"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}, sampled=True)
    for selection, tree in (
        (GREEDY, TreeConfig(3, 3, 12)),
        (GREEDY, TreeConfig(1, 4, 5)),
        (sampled, TreeConfig(3, 3, 12)),
    ):
        decode = {"max_new_tokens": CAP, "eos_ids": (), "selection": selection}
        answer = generate_autoregressive(small_target, encoded, **decode).tokens
        plain = generate(small_target, NeuralProposer(drafter, tree), encoded, **decode)
        assert plain.tokens == answer
        lucky = generate(small_target, Prompted(drafter, tree, answer), encoded, **decode)
        assert lucky.tokens == answer
        assert len({r.accepted for r in lucky.rounds}) > 1


@pytest.mark.parametrize("rope", ["target", "1d"])
def test_a_drafter_reaches_to_the_end_of_the_targets_context(rope, small_target, prompts, enlarge):
    """It has no context of its own: trees whose nodes lie beyond the last position are drafted and cut."""
    torch.manual_seed(0)
    drafter = build_drafter("fovea", small_target.spec, drafter_type("fovea").config_type(rope=rope), small_target.head)
    enlarge(drafter.eval(), seed=1)
    left = small_target.spec.max_positions - len(prompts["image"].ids)
    encoded = followed_by(prompts["image"], [40 + place % 200 for place in range(left - 12)])
    answer = generate_autoregressive(small_target, encoded, max_new_tokens=CAP, eos_ids=()).tokens
    assert len(answer) == 12
    trace = generate(
        small_target, Prompted(drafter, TreeConfig(3, 6, 24), answer), encoded, max_new_tokens=CAP, eos_ids=()
    )
    assert trace.tokens == answer
    assert max(r.accepted for r in trace.rounds) > 1


class Remembered(Prompted):
    """Keeps its cache as every tree leaves it, beside the number of tokens committed by then."""

    def start(self, prefill) -> None:
        super().start(prefill)
        self.said, self.caches = 0, []

    def knows(self, place: int) -> bool:
        return place not in (2, 3, 7, 9, 12, 13, 14, 19, 25, 28, 29)

    def propose(self):
        tree = super().propose()
        assert self.cache.pending == 0
        self.caches.append((self.said, self.cache.buffer[..., : self.cache.length, :].clone()))
        return tree


@pytest.mark.parametrize("name", ["fovea", "eaglevlm", "msd", "eagle3", *DRAFTERS])
def test_what_a_drafter_remembers_comes_from_the_targets_states(name, small_target, prompts, enlarge):
    """After every round its cache is the one rebuilt from a plain pass of the target over the text; what it guessed
    below the root has left nothing behind."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"draft_vocabulary": None} if name == "eagle3" else {}
    config = drafter_type(name).config_type(**changes)
    drafter = build_drafter(name, small_target.spec, config, small_target.head).eval()
    enlarge(drafter, seed=1)
    encoded, tree = prompts["two"], TreeConfig(3, 3, 12)
    answer = generate_autoregressive(small_target, encoded, max_new_tokens=40, eos_ids=()).tokens
    proposer = Remembered(drafter, tree, answer)
    trace = generate(small_target, proposer, encoded, max_new_tokens=40, eos_ids=())
    assert trace.tokens == answer
    assert {r.accepted for r in trace.rounds} >= {0, 1, 2}

    prompt = len(encoded.ids)
    _, read = small_target.prefill(encoded, 40, draft_rows=tree.max_drafts, feature_layers=drafter.feature_layers)
    _, whole = small_target.prefill(followed_by(encoded, answer), 1, feature_layers=drafter.feature_layers)
    for said, cache in proposer.caches:
        rebuilt = NeuralProposer(drafter, tree)
        rebuilt.start(read)
        rebuilt.commit(torch.tensor(answer[:said]), whole.read[prompt - 1 : prompt - 1 + said])
        rebuilt.propose()
        torch.testing.assert_close(cache, rebuilt.cache.buffer[..., : rebuilt.cache.length, :], rtol=1e-4, atol=1e-4)


def followed_by(encoded, answer: list[int]):
    """``encoded`` with ``answer`` behind it, as a prompt."""
    count = len(answer)
    places = (encoded.next_position + torch.arange(count)).expand(len(encoded.positions), -1)
    return replace(
        encoded,
        ids=torch.cat([encoded.ids, torch.tensor(answer)]),
        positions=torch.cat([encoded.positions, places], 1),
        answer_mask=torch.cat([encoded.answer_mask, torch.ones(count, dtype=torch.bool)]),
        is_visual=torch.cat([encoded.is_visual, torch.zeros(count, dtype=torch.bool)]),
        next_position=encoded.next_position + count,
    )
