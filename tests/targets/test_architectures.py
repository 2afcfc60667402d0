"""Every architecture behind the one contract: ids, states, tokens and caches equal those of transformers, in fp32.

The references are fed by the checkpoint's own processor and run with eager attention, so nothing is shared with ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import SelectionConfig, resolve
from fovea.decoding.speculative import extend_tree, generate
from fovea.decoding.transformers_generate import generate_transformers
from fovea.decoding.tree import DraftTree
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.load import load_generation_config, load_head, load_spec
from fovea.targets.teacher_batch import supervised_positions

CLOSE = {"atol": 5e-4, "rtol": 1e-4}
NAMES = ("qwen25vl", "llava_next_vicuna", "llava_next_mistral", "llava15", "llama", "mistral", "qwen2", "qwen3")
CAP = 10
TREE = DraftTree(
    tokens=np.array([40, 41, 42, 43, 44, 45]),
    parents=np.array([-1, 0, 0, 2, 2, 4]),
    depths=np.array([0, 1, 1, 2, 2, 3]),
    log_probs=np.zeros(6),
)


@pytest.fixture(params=NAMES, scope="module")
def one(request: pytest.FixtureRequest, twin: Callable[[str], Any]) -> Any:
    return twin(request.param)


def prompts(sees: bool, count: int = 32) -> list[Conversation]:
    """``count`` prompts of every kind: a picture first, in the middle, two, none, several turns, a system turn."""
    draws = random.Random(5)
    words = ["what", "is", "the", "red", "square", "and", "blue", "circle", "in", "picture", "Zoë", "?", "7"]

    def text() -> dict[str, str]:
        return {"type": "text", "text": " ".join(draws.choices(words, k=draws.randint(2, 7)))}

    def picture() -> Image.Image:
        pixels = np.random.default_rng(draws.randint(0, 999)).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        return Image.fromarray(pixels).resize(
            (draws.randint(30, 130), draws.randint(30, 130)), Image.Resampling.NEAREST
        )

    place = {"type": "image"}
    kinds: list[Callable[[], list[Any]]] = [
        lambda: [[place, text()]],
        lambda: [[text(), place, text()]],
        lambda: [[place, place, text()]],
        lambda: [[place, text()], text()["text"], [text()]],
        lambda: [[text()], text()["text"], [place, text()], text()["text"], [text(), place]],
        lambda: [[text()]],
        lambda: [[text()], text()["text"], [text()]],
    ]
    made = []
    for number in range(count):
        contents = kinds[number % len(kinds)]() if sees else kinds[5 + number % 2]()
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]
        shown = sum(part == place for content in contents if isinstance(content, list) for part in content)
        made.append(Conversation(f"prompt-{number}", messages, tuple(picture() for _ in range(shown)), str(number % 7)))
    return made


def test_ids_and_pictures_are_the_processors(one: Any) -> None:
    for conversation in prompts(one.sees):
        encoded, expected = one.target.encode(conversation), one.inputs(conversation)
        assert encoded.ids.tolist() == expected["input_ids"][0].tolist(), conversation.messages
        assert int(encoded.is_visual.sum()) == sum(rows * columns for rows, columns in encoded.grids)
        assert [view.image for view in encoded.views] == sorted(view.image for view in encoded.views)
        assert len({view.image for view in encoded.views}) == len(conversation.images)
        if one.target.spec.rope.axes == 1:
            assert encoded.positions.tolist() == [list(range(len(encoded.ids)))]
            assert encoded.next_position == len(encoded.ids)


def test_greedy_tokens_equal_generate(one: Any) -> None:
    """Both loops, whatever is drafted; partly right trees of several shapes among the drafts."""
    vocab, distinct, ended = one.target.spec.vocab_size, set(), 0
    for number, conversation in enumerate(prompts(one.sees)):
        encoded = one.target.encode(conversation)
        expected = one.generate(conversation, CAP)
        plain = generate_autoregressive(one.target, encoded, max_new_tokens=CAP)
        assert plain.tokens == expected
        proposers = [
            OracleProposer(
                expected, vocab_size=vocab, depth=3, width=1 + number % 3, wrong_from=(None, 1, 2, 3)[number % 4]
            ),
            RandomProposer(vocab_size=vocab, nodes=12, seed=number, answer=expected, hit_rate=0.7),
        ]
        for proposer in proposers:
            assert generate(one.target, proposer, encoded, max_new_tokens=CAP).tokens == expected
        distinct |= set(expected)
        ended += plain.finish == "eos"
    assert len(distinct) > 40, "answers of few tokens would hide mistakes"


def test_a_wrong_position_or_order_shows(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparisons here would prove little."""
    encoded = [one.target.encode(conversation) for conversation in prompts(one.sees, 7)]

    def answers(read: list[Encoded]) -> list[list[int]]:
        return [generate_autoregressive(one.target, e, max_new_tokens=CAP, eos_ids=()).tokens for e in read]

    right = answers(encoded)
    late = answers([replace(e, next_position=e.next_position + 5) for e in encoded])
    assert sum(a != b for a, b in zip(late, right, strict=True)) > len(right) / 2
    if one.sees:
        seeing = [number for number, e in enumerate(encoded) if e.is_visual.any()]
        read_visual = one.target.read_visual
        monkeypatch.setattr(one.target, "read_visual", lambda batch: read_visual(batch).flip(0))
        flipped = answers([encoded[number] for number in seeing])
        assert sum(a != right[n] for a, n in zip(flipped, seeing, strict=True)) > len(seeing) / 2


def test_what_an_oracle_drafts_is_accepted_whole(one: Any) -> None:
    """Behind pictures and text alike, at every depth: a row or position that is off would cut a round short."""
    for conversation in prompts(one.sees, 6)[::5]:
        encoded = one.target.encode(conversation)
        answer = generate_autoregressive(one.target, encoded, max_new_tokens=2 * CAP, eos_ids=()).tokens
        for depth in range(1, 7):
            oracle = OracleProposer(answer, vocab_size=one.target.spec.vocab_size, depth=depth, width=1 + depth % 3)
            trace = generate(one.target, oracle, encoded, max_new_tokens=2 * CAP, eos_ids=())
            assert trace.tokens == answer
            assert [r.accepted for r in trace.rounds[:-1]] == [depth] * (len(trace.rounds) - 1)


def test_what_a_prefill_gave_is_not_overwritten(one: Any) -> None:
    """A drafter keeps it while the target goes on, and while another request starts."""
    first, second = (one.target.encode(conversation) for conversation in prompts(one.sees, 3)[::2])
    state, prefill = one.target.prefill(first, 8, draft_rows=len(TREE))
    before = {name: value.clone() for name, value in vars(prefill).items() if isinstance(value, torch.Tensor)}
    one.target.prefill(second, 8)
    hidden = extend_tree(one.target, state, TREE)
    verified = hidden.clone()
    one.target.commit(state, [0, 2])
    extend_tree(one.target, state, TREE)
    assert torch.equal(hidden, verified)
    for name, value in before.items():
        assert torch.equal(getattr(prefill, name), value), name


def test_the_transformers_baseline_is_fed_all_it_needs(one: Any) -> None:
    for conversation in prompts(one.sees, 7):
        trace = generate_transformers(one.target, one.target.encode(conversation), max_new_tokens=4)
        assert trace.tokens == one.generate(conversation, 4)


def test_the_checkpoints_own_settings_are_applied_as_generate_does(one: Any) -> None:
    """A repetition penalty over prompt, placeholders of pictures and answer; each tree node counts its own path."""
    selection = resolve(SelectionConfig("target"), load_generation_config(one.folder), one.target.spec)
    assert selection.settings.keys() == {"repetition_penalty"}
    decode, changed = {"max_new_tokens": CAP, "selection": selection}, 0
    for number, conversation in enumerate(prompts(one.sees, 7)):
        inputs = one.inputs(conversation)
        expected = one.model.generate(**inputs, max_new_tokens=CAP)[0, inputs["input_ids"].shape[1] :].tolist()
        encoded = one.target.encode(conversation)
        assert generate_autoregressive(one.target, encoded, **decode).tokens == expected
        proposer = OracleProposer(
            expected, vocab_size=one.target.spec.vocab_size, depth=4, width=2, wrong_from=(None, 3)[number % 2]
        )
        assert generate(one.target, proposer, encoded, **decode).tokens == expected
        changed += expected != one.generate(conversation, CAP)
    assert changed > 1


def test_requests_interleave_in_any_order(one: Any) -> None:
    """Three requests advance by turns, drafts of theirs pending and dropped in between."""
    chosen = prompts(one.sees, 6)[:1] + prompts(one.sees, 6)[4:]
    encoded = [one.target.encode(conversation) for conversation in chosen]
    expected = [generate_autoregressive(one.target, e, max_new_tokens=CAP, eos_ids=()).tokens for e in encoded]
    started = [one.target.prefill(e, CAP, draft_rows=len(TREE)) for e in reversed(encoded)][::-1]
    answers = [[int(one.target.lm_head(prefill.hidden[-1]).argmax())] for _, prefill in started]
    for turn in range(CAP - 1):
        for answer, (state, _) in zip(answers, started, strict=True):
            if turn % 2:
                extend_tree(one.target, state, TREE)
            hidden = one.target.extend(state, torch.tensor(answer[-1:]), state.text_positions(torch.tensor([0])))
            one.target.commit(state, [0])
            answer.append(int(one.target.lm_head(hidden[0]).argmax()))
    assert answers == expected


def test_every_node_equals_a_plain_forward_over_its_path(one: Any) -> None:
    """Tree gate, behind pictures and several turns."""
    for conversation in prompts(one.sees, 6)[::2]:
        encoded = one.target.encode(conversation)
        state, _ = one.target.prefill(encoded, 8, draft_rows=len(TREE))
        one.target.extend(state, torch.tensor([50, 51]), state.text_positions(torch.tensor([0, 1])))
        one.target.commit(state, [0, 1])
        logits = one.target.lm_head(extend_tree(one.target, state, TREE))
        for row in range(len(TREE)):
            path = [int(token) for token in TREE.tokens[TREE.ancestor_mask()[row]]]
            expected = one.forward(conversation, [50, 51, *path]).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, **CLOSE)


def test_the_cache_equals_a_fresh_pass_after_any_acceptance(one: Any) -> None:
    """Cache gate: rows that are not contiguous, none, all of a path."""
    conversation = prompts(one.sees, 5)[4]
    encoded = one.target.encode(conversation)
    state, _ = one.target.prefill(encoded, 16, draft_rows=len(TREE))
    committed: list[int] = []
    for rows in ([0, 2, 4, 5], [0], [0, 2, 3], [0, 1]):
        extend_tree(one.target, state, TREE)
        one.target.commit(state, rows)
        committed += TREE.tokens[rows].tolist()
    output = one.forward(conversation, committed, use_cache=True)
    layers = getattr(output, "cache", None) or output.past_key_values
    assert state.length == layers.layers[0].keys.shape[2]
    for ours, theirs in zip(state.cache.buffer, layers.layers, strict=True):
        torch.testing.assert_close(ours[0, :, :, : state.length], theirs.keys, **CLOSE)
        torch.testing.assert_close(ours[1, :, :, : state.length], theirs.values, **CLOSE)


def test_prefill_and_teaching_hold_the_models_states(one: Any) -> None:
    conversations = [with_answer(conversation) for conversation in prompts(one.sees, 5)]
    encoded = [one.target.encode(conversation) for conversation in conversations]
    for conversation, read, sample in zip(conversations, encoded, one.target.teach(encoded, [2]), strict=True):
        expected = one.forward(conversation, output_hidden_states=True)
        _, prefill = one.target.prefill(read, 1)
        torch.testing.assert_close(prefill.embeds, expected.hidden_states[0][0], **CLOSE)
        torch.testing.assert_close(prefill.hidden, expected.hidden_states[-1][0], **CLOSE)
        torch.testing.assert_close(prefill.embeds[prefill.is_visual], prefill.visual)
        torch.testing.assert_close(sample.last, expected.hidden_states[-1][0], **CLOSE)
        torch.testing.assert_close(sample.visual, prefill.visual, **CLOSE)
        rows = supervised_positions(read.answer_mask)
        assert rows.any()
        torch.testing.assert_close(sample.mid, expected.hidden_states[2][0][rows], **CLOSE)
        torch.testing.assert_close(one.target.lm_head(sample.last), expected.logits[0], **CLOSE)


def with_answer(conversation: Conversation) -> Conversation:
    return replace(conversation, messages=[*conversation.messages, {"role": "assistant", "content": "the red circle"}])


def test_answers_equal_generate_turn_by_turn_and_pass_the_teacher_gate(one: Any) -> None:
    """The target's own answers, batched; their states lead to their tokens, the end token of the last one included."""
    conversations = [with_answer(conversation) for conversation in prompts(one.sees, 7)]
    answers = one.target.answer(conversations, CAP, batch_size=4)
    for conversation, given in zip(conversations, answers, strict=True):
        first = replace(conversation, messages=conversation.messages[:1])
        first = replace(first, images=conversation.images[: str(first.messages).count("'image'")])
        assert given[0] == one.generate(first, CAP)
        encoded = one.target.encode(conversation, given)
        (sample,) = one.target.teach([encoded], [1])
        said = encoded.answer_mask.nonzero().squeeze(-1)
        assert torch.equal(one.target.lm_head(sample.last[said - 1]).argmax(-1), encoded.ids[said])
        assert encoded.ids[said].tolist()[-len(given[-1]) :] == given[-1]


def test_near_the_end_of_the_context_the_answer_is_still_generates(one: Any) -> None:
    asked = prompts(one.sees, 1)[0]

    def longer(words: int) -> Conversation:
        content = [*asked.messages[0]["content"], {"type": "text", "text": words * " red"}]
        return replace(asked, messages=[{"role": "user", "content": content}])

    def tokens(words: int) -> int:
        return len(one.target.encode(longer(words)).ids)

    room = one.target.spec.max_positions - tokens(0)
    conversation = longer((room - 6) * 50 // (tokens(50) - tokens(0)))
    encoded = one.target.encode(conversation)
    left = one.target.spec.max_positions - len(encoded.ids)
    assert 0 < left < 20
    expected = one.generate(conversation, left)
    assert generate_autoregressive(one.target, encoded, max_new_tokens=2 * CAP).tokens == expected
    oracle = OracleProposer(expected, vocab_size=one.target.spec.vocab_size, depth=4, width=2, wrong_from=3)
    assert generate(one.target, oracle, encoded, max_new_tokens=2 * CAP).tokens == expected


def test_up_to_the_end_of_the_context(one: Any) -> None:
    encoded = one.target.encode(prompts(one.sees, 1)[0])
    room = one.target.spec.max_positions - len(encoded.ids)
    late = stretched(encoded, room - 3)
    trace = generate_autoregressive(one.target, late, max_new_tokens=20, eos_ids=())
    assert len(trace.tokens) == 3
    oracle = OracleProposer(trace.tokens, vocab_size=one.target.spec.vocab_size, depth=4)
    assert generate(one.target, oracle, late, max_new_tokens=20, eos_ids=()).tokens == trace.tokens
    with pytest.raises(ValueError, match="leaves no room"):
        generate_autoregressive(one.target, stretched(encoded, room), max_new_tokens=1)


def stretched(encoded: Encoded, by: int) -> Encoded:
    """``encoded`` with ``by`` more text tokens."""
    more, none = torch.arange(by), torch.zeros(by, dtype=torch.bool)
    return replace(
        encoded,
        ids=torch.cat([encoded.ids, 300 - more % 40 - 10]),
        positions=torch.cat([encoded.positions, (encoded.next_position + more).expand(len(encoded.positions), -1)], 1),
        answer_mask=torch.cat([encoded.answer_mask, none]),
        is_visual=torch.cat([encoded.is_visual, none]),
        next_position=encoded.next_position + by,
    )


def test_spec_and_head_need_no_model(one: Any) -> None:
    spec, head = load_spec(one.folder), load_head(one.folder, dtype=torch.float32)
    assert spec == one.target.spec
    assert spec.qkv_bias == (one.name in ("qwen2", "qwen25vl"))
    for name in ("embedding", "lm_head_weight", "norm_weight"):
        assert torch.equal(getattr(head, name), getattr(one.target.head, name))
    assert (head.lm_head_weight is head.embedding) == (one.name == "llama")
