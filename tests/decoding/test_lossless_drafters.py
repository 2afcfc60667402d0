"""Untrained drafters beside a real architecture: the answer stays the target's, and drafts are accepted on the way."""

from dataclasses import replace

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
        if ahead < len(self.answer) and ahead % 5:
            logits[:, self.answer[ahead]] += 100.0
        return logits


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
