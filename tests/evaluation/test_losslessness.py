"""What counts as lossless: exact answers, near-ties in half precision, and nothing else."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import RandomProposer
from fovea.decoding.selection import GumbelNoise, Selection
from fovea.decoding.speculative import generate
from fovea.evaluation import losslessness
from fovea.evaluation.losslessness import Comparison
from fovea.targets.base import Encoded
from fovea.targets.ties import TIE_STEPS

#: A cap beyond all answers here.
compare = partial(losslessness.compare, max_new_tokens=60)
ENCODED = Encoded("q1", torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(3), 3, torch.zeros(3))


class FixedLogits:
    """A target whose logits behind any answer of a given length are given; it counts how often it is asked."""

    def __init__(self, dtype: torch.dtype, rows: list[list[float]]) -> None:
        self.dtype, self.device = dtype, torch.device("cpu")
        self.spec = SimpleNamespace(eos_ids=(), max_positions=100)
        self.rows = torch.tensor(rows, dtype=dtype)
        self.asked = 0

    def prefill(self, encoded, max_new_tokens, draft_rows=0):
        self.asked += 1
        state = SimpleNamespace(text_positions=lambda offsets: offsets[None])
        return state, SimpleNamespace(hidden=torch.tensor([[-1], [-1], [0]]))

    def extend(self, state, ids, positions, tree_mask=None):
        assert ids.tolist() == [7] * len(ids)
        return positions[0, :, None] + 1

    def lm_head(self, hidden):
        return self.rows[hidden[..., 0]]


def test_equal_answers_need_no_target():
    target = FixedLogits(torch.bfloat16, [[0.0, 0.0]])
    assert compare(target, ENCODED, [1, 2, 3], [1, 2, 3]) == Comparison("q1", "exact")
    assert compare(target, ENCODED, [], []).outcome == "exact"
    assert target.asked == 0


@pytest.mark.parametrize("length", [0, 1, 4])
def test_half_precision_is_excused_at_a_near_tie_only(length):
    shared = [7] * length
    far = [0.0, -50.0, 8.0, 2.0]
    step = torch.finfo(torch.bfloat16).eps * 8.0
    near = [8.0, -50.0, 8.0 - 2 * step, 8.0 - 2 * TIE_STEPS * step]
    target = FixedLogits(torch.bfloat16, [far] * length + [near])
    tied = compare(target, ENCODED, [*shared, 0, 5], [*shared, 2, 6])
    assert (tied.outcome, tied.position, tied.expected, tied.got) == ("tie", length, 0, 2)
    assert tied.gap == pytest.approx(2 * step)
    apart = compare(target, ENCODED, [*shared, 0], [*shared, 3])
    assert apart.outcome == "unexplained"
    assert apart.tolerance == pytest.approx(TIE_STEPS * step)
    # Equal logits of two tokens excuse nothing if a third one is far above both.
    both_low = FixedLogits(torch.bfloat16, [far] * length + [[1.0, 1.0, 8.0, 0.0]])
    assert compare(both_low, ENCODED, [*shared, 0], [*shared, 1]).outcome == "unexplained"


def test_fp32_excuses_nothing():
    target = FixedLogits(torch.float32, [[1.0, 1.0]])
    comparison = compare(target, ENCODED, [0, 1], [1, 1])
    assert (comparison.outcome, comparison.position) == ("unexplained", 0)
    assert str(comparison) == "'q1': token 0 is 1 instead of 0, unexplained"


@pytest.mark.parametrize(("ar", "spec"), [([7, 7], [7]), ([7], [7, 7]), ([7], [])])
def test_an_answer_that_only_ends_earlier_is_unexplained(ar, spec):
    target = FixedLogits(torch.bfloat16, [[1.0] * 8] * 3)
    assert compare(target, ENCODED, ar, spec).outcome == "unexplained"


@pytest.fixture(scope="module")
def half_target(small_target):
    """The small target in bf16."""
    half = copy.deepcopy(small_target)
    half.model.to(torch.bfloat16)
    return half


def test_bf16_differences_of_the_loops_are_ties(half_target, small_conversations):
    """Passes of different widths round differently; what that changes is always explained, a wrong token never."""
    vocab, outcomes = half_target.spec.vocab_size, []
    for conversation in small_conversations[:6]:
        encoded = half_target.encode(replace(conversation, messages=conversation.messages[:1]))
        answer = generate_autoregressive(half_target, encoded, max_new_tokens=60, eos_ids=()).tokens
        for nodes, hit_rate in ((0, 0.0), (12, 0.8), (40, 0.9)):
            proposer = RandomProposer(vocab_size=vocab, nodes=nodes, answer=answer, hit_rate=hit_rate)
            tokens = generate(half_target, proposer, encoded, max_new_tokens=60, eos_ids=()).tokens
            outcomes.append(compare(half_target, encoded, answer, tokens).outcome)
        for place in (0, 7, 59):
            wrong = [*answer[:place], (answer[place] + 1) % vocab, *answer[place + 1 :]]
            comparison = compare(half_target, encoded, answer, wrong)
            outcomes.append("wrong " + comparison.outcome)
    assert outcomes.count("unexplained") == 0
    assert outcomes.count("exact") > 0
    assert outcomes.count("wrong unexplained") >= 16, "a neighbouring id is hardly ever a tie"


#: Noise of the first token of the conversation that the made-up targets answer.
NOISE = GumbelNoise(0, ENCODED.key, torch.device("cpu")).draw(3).tolist()
SAMPLED = Selection(sampled=True)


@pytest.mark.parametrize(("apart", "outcome"), [(1e-7, "tie"), (3e-2, "unexplained")])
def test_a_draw_may_be_decided_by_rounding_in_fp32_too(apart, outcome):
    """The noise of the answers is known, so the logits can be such that two tokens tie with it."""
    rows = [[8.0 - NOISE[0], 8.0 - apart - NOISE[1], -5.0]]
    comparison = compare(FixedLogits(torch.float32, rows), ENCODED, [0, 1], [1, 1], selection=SAMPLED)
    assert (comparison.outcome, comparison.position) == (outcome, 0)
    assert comparison.gap == pytest.approx(apart, abs=1e-5)
    assert comparison.gap < 1e-5 or comparison.gap > comparison.tolerance
    assert compare(FixedLogits(torch.float32, rows), ENCODED, [0], [2], selection=SAMPLED).outcome == "unexplained"


def test_a_token_at_the_rim_of_a_nucleus_is_explained_by_rounding():
    """The second token is out by a hair, and where it is in, it is drawn."""
    favoured = next(s for s in range(99) if torch.diff(GumbelNoise(s, "q1", torch.device("cpu")).draw(3)[:2]) > 1)
    selection = Selection({"top_p": 0.5}, sampled=True, seed=favoured)
    near, far = ([8.0, 8.0 - apart, -9.0] for apart in (0.0625, 1.0))
    at_the_rim = compare(FixedLogits(torch.bfloat16, [near]), ENCODED, [0], [1], selection=selection)
    assert (at_the_rim.outcome, at_the_rim.gap) == ("tie", None)
    assert "logit gap" not in str(at_the_rim)
    assert compare(FixedLogits(torch.bfloat16, [far]), ENCODED, [0], [1], selection=selection).outcome == "unexplained"
    assert compare(FixedLogits(torch.bfloat16, [near]), ENCODED, [0], [2], selection=selection).outcome == "unexplained"


def test_processors_take_part_in_a_comparison():
    """Without the penalty on the first token, which is in the prompt, the gap would be no tie."""
    selection = Selection({"repetition_penalty": 1.25})
    target = FixedLogits(torch.bfloat16, [[10.0, 8.0, 2.0]])
    assert compare(target, ENCODED, [0], [1], selection=selection).outcome == "tie"
    assert compare(target, ENCODED, [0], [1]).outcome == "unexplained"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sampled_differences_of_the_loops_are_explained(dtype, small_target, half_target, small_conversations):
    target = small_target if dtype == "fp32" else half_target
    vocab, outcomes = target.spec.vocab_size, []
    for conversation in small_conversations[:6]:
        encoded = target.encode(replace(conversation, messages=conversation.messages[:1]))
        for selection in (Selection({"top_p": 0.8, "temperature": 0.7}, sampled=True), Selection({"top_k": 9}, True)):
            decode = {"max_new_tokens": 60, "eos_ids": (), "selection": selection}
            answer = generate_autoregressive(target, encoded, **decode).tokens
            proposer = RandomProposer(vocab_size=vocab, nodes=12, answer=answer, hit_rate=0.9)
            tokens = generate(target, proposer, encoded, **decode).tokens
            outcomes.append(compare(target, encoded, answer, tokens, selection=selection).outcome)
            wrong = [*answer[:30], (answer[30] + 1) % vocab]
            outcomes.append("wrong " + compare(target, encoded, answer, wrong, selection=selection).outcome)
    assert outcomes.count("unexplained") == 0
    assert outcomes.count("exact") == 12 if dtype == "fp32" else outcomes.count("exact") > 0
    assert outcomes.count("wrong unexplained") >= 10
