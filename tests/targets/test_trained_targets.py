"""The targets that the project makes itself, trained or with real weights: what they write is what transformers writes.

Minutes, and more the first time, because they are built into the cache of ``python train.py``: pytest -m whole.
The references are fed by the checkpoint's own processor and run with eager attention, so nothing is shared with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from fovea.app.launch import CONFIG_DIR
from fovea.app.settings import build_named
from fovea.app.targets import find_target
from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.speculative import extend_tree, generate
from fovea.decoding.tree import DraftTree
from fovea.targets.base import Encoded
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.conversation import Conversation
from fovea.targets.teacher_batch import TeacherBatch
from fovea.targets.tiny.families import conversations
from fovea.training.gates import Agreement, teacher_agreement, teacher_gate

pytestmark = pytest.mark.whole

#: Model, and what its pictures are.
TARGETS = {
    "tiny_qwen25vl": "grids",
    "tiny_llava_next": "banners",
    "tiny_llava15": "boards",
    "smollm2": None,
    "tiny_smollava": "boards",
}
TRAINED = ("tiny_qwen25vl", "tiny_llava_next", "tiny_llava15")
CAP = 24


@pytest.fixture(params=TARGETS, scope="module")
def one(request: pytest.FixtureRequest, twin_at: Callable[[Path, str], Any]) -> Any:
    """A target of the project's own, and transformers' view of it."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("train", overrides=[f"model={request.param}", "paths.output_dir=/run", "data=tiny"])
    try:
        return twin_at(find_target(cfg, build_named(cfg, "model.build")), request.param)
    except CheckpointError as missing:
        pytest.skip(str(missing))


QUESTIONS = (
    "Name three colours.",
    "What is 12 times 12?",
    "Write a haiku about rain.",
    "Why is the sky blue?",
    "Who wrote Faust?",
    "Spell 'Mississippi' backwards.",
    "List the planets.",
    "Translate 'good morning' into French.",
    "What comes after Tuesday?",
    "Give me a recipe for bread.",
    "Explain what a cache is.",
    "Is 91 a prime number?",
    "Write a function that adds two numbers in Python.",
    "Tell me a joke.",
    "What is the opposite of 'cold'?",
    "Summarise: the cat sat on the mat because it was warm.",
)


def prompts(name: str, count: int = 33) -> list[Conversation]:
    """``count`` prompts: a picture first or in the middle of the text, two, none, several turns."""
    pictures = TARGETS[name]
    if pictures is None:
        said = {"role": "assistant", "content": "I would rather not say."}
        asked = [{"role": "user", "content": text} for text in QUESTIONS]
        single = [Conversation(f"text-{n}", [turn]) for n, turn in enumerate(asked)]
        return single + [Conversation(f"turns-{n}", [asked[n - 1], said, turn]) for n, turn in enumerate(asked)]
    made = []
    for number, conversation in enumerate(conversations("train", count, 7, pictures)):
        first, *later = conversation.messages
        kind = (number + number // 9) % 3  # so that every family comes in every kind
        if kind == 1:
            *shown, text = first["content"]
            start, _, rest = text["text"].partition(" ")
            first = {"role": "user", "content": [{**text, "text": f"{start} "}, *shown, {**text, "text": rest}]}
        messages = [first, *later[:2]] if kind == 2 and len(later) > 1 else [first]
        made.append(replace(conversation, messages=messages))
    return made


def test_greedy_tokens_equal_generate(one: Any) -> None:
    vocab, seen = one.target.spec.vocab_size, set()
    for number, conversation in enumerate(prompts(one.name)):
        encoded = one.target.encode(conversation)
        expected = one.generate(conversation, CAP)
        assert generate_autoregressive(one.target, encoded, max_new_tokens=CAP).tokens == expected, conversation
        for proposer in (
            OracleProposer(expected, vocab_size=vocab, depth=4, width=2, wrong_from=(None, 1, 2, 3)[number % 4]),
            RandomProposer(vocab_size=vocab, nodes=20, seed=number, answer=expected, hit_rate=0.8),
        ):
            assert generate(one.target, proposer, encoded, max_new_tokens=CAP).tokens == expected, conversation
        seen |= set(expected)
    assert len(seen) > 40, "answers of few tokens would hide mistakes"


def test_requests_interleave(one: Any) -> None:
    chosen = [one.target.encode(conversation) for conversation in prompts(one.name)[:3]]
    expected = [generate_autoregressive(one.target, e, max_new_tokens=CAP, eos_ids=()).tokens for e in chosen]
    started = [one.target.prefill(encoded, CAP) for encoded in reversed(chosen)][::-1]
    answers = [[int(one.target.lm_head(prefill.hidden[-1]).argmax())] for _, prefill in started]
    for _ in range(CAP - 1):
        for answer, (state, _) in zip(answers, started, strict=True):
            hidden = one.target.extend(state, torch.tensor(answer[-1:]), state.text_positions(torch.tensor([0])))
            one.target.commit(state, [0])
            answer.append(int(one.target.lm_head(hidden[0]).argmax()))
    assert answers == expected


def test_own_answers_pass_the_teacher_gate(one: Any) -> None:
    found = Agreement()
    asked = prompts(one.name)[:9]
    for conversation, given in zip(asked, one.target.answer(asked, CAP, batch_size=4), strict=True):
        taught = one.target.teach([one.target.encode(conversation, given)], [1, 2])
        found += teacher_agreement(one.target.head, TeacherBatch.collate(taught))
    teacher_gate(found)
    assert (found.ties, found.wrong) == (0, 0)


def changed(one: Any, spoil: Callable[[Encoded], Encoded]) -> float:
    """Share of answers about pictures that are others when what the target reads is spoiled."""
    asked = [c for c in prompts(one.name) if c.images]
    others = 0
    for conversation in asked:
        encoded = one.target.encode(conversation)
        right, wrong = (generate_autoregressive(one.target, e, max_new_tokens=CAP) for e in (encoded, spoil(encoded)))
        others += right.tokens != wrong.tokens
    return others / len(asked)


def test_a_wrong_position_mask_or_order_shows(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparisons above would prove little."""
    if TARGETS[one.name] is None:
        pytest.skip("it reads text only")

    def late(encoded: Encoded) -> Encoded:
        """The answer stands five positions too far."""
        return replace(encoded, next_position=encoded.next_position + 5)

    assert changed(one, late) > 0.25
    read = one.target.read_visual
    with monkeypatch.context() as patch:
        patch.setattr(one.target, "read_visual", lambda batch: read(batch).flip(0))
        flipped = [generate_autoregressive(one.target, e, max_new_tokens=CAP).tokens for e in encoded_of(one)]
    plain = [generate_autoregressive(one.target, e, max_new_tokens=CAP).tokens for e in encoded_of(one)]
    assert sum(a != b for a, b in zip(flipped, plain, strict=True)) > 0.5 * len(plain)


def encoded_of(one: Any) -> list[Encoded]:
    return [one.target.encode(conversation) for conversation in prompts(one.name) if conversation.images]


def test_siblings_that_saw_each_other_would_show(one: Any) -> None:
    """The tree mask matters to what a node predicts, by far more than rounding."""
    encoded = one.target.encode(prompts(one.name)[0])
    answer = generate_autoregressive(one.target, encoded, max_new_tokens=8, eos_ids=()).tokens
    tokens = [answer[0], answer[1], 30, answer[2], 31]
    parents = [-1, 0, 0, 1, 1]
    tree = DraftTree(np.array(tokens), np.array(parents), np.array([0, 1, 1, 2, 2]), np.zeros(5))
    state, _ = one.target.prefill(encoded, 8, draft_rows=5)
    right = one.target.lm_head(extend_tree(one.target, state, tree))
    positions = state.text_positions(torch.from_numpy(tree.depths))
    wrong = one.target.lm_head(one.target.extend(state, torch.from_numpy(tree.tokens), positions))
    assert (right - wrong)[3:].abs().max() > 0.1
    assert int(right[1].argmax()) == answer[2]
