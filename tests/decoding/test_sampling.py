"""Sampling: the law of what is drawn, for any drafter, and that every loop draws the same answer.

That the law is right is shown in three parts. The walk over a tree commits whatever the selector selects, whoever
drafted: by enumeration, without chance. The selector draws from the softmax of what transformers' processors leave: by
many draws. And both together give the exact joint distribution of the first tokens, through the real loop.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import GumbelNoise, Selection, SelectionConfig, resolve
from fovea.decoding.speculative import generate
from fovea.decoding.transformers_generate import generate_transformers
from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.decoding.verify import Verdict, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "verify_sampling"
CASES = json.loads((GOLDEN / "index.json").read_text())
STEPS = json.loads((GOLDEN / "accept_steps.json").read_text())
#: A drafter may draft anything of these.
SAMPLED = SelectionConfig(temperature=0.7, top_p=0.8)


def total_variation_bound(outcomes: int, draws: int) -> float:
    """What the total variation between a law of ``outcomes`` and the frequencies of ``draws`` from it stays below, but
    for one time in 10^9: its mean is at most sqrt(outcomes / draws) / 2, and McDiarmid's inequality bounds the rest."""
    return 0.5 * math.sqrt(outcomes / draws) + math.sqrt(math.log(1e9) / (2 * draws))


# -- the law of a walk ------------------------------------------------------------------------------------------------


def law_of_verify(tree: DraftTree, probs: np.ndarray) -> dict[tuple[tuple[int, ...], int], float]:
    """The exact law of (accepted tokens, bonus): ``verify`` is run for every course that the choices may take."""
    law: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)

    def follow(chosen: list[int], probability: float) -> None:
        asked: list[int] = []

        def choose(row: int) -> int:
            asked.append(row)
            if len(asked) > len(chosen):
                raise LookupError
            return chosen[len(asked) - 1]

        try:
            verdict: Verdict = verify(tree, choose, (), remaining=99)
        except LookupError:
            for token in np.flatnonzero(probs[asked[-1]]):
                follow([*chosen, int(token)], probability * float(probs[asked[-1], token]))
        else:
            assert len(asked) == len(chosen), "a choice was not asked for"
            law[tuple(tree.tokens[verdict.accepted_nodes].tolist()), verdict.bonus] += probability

    follow([], 1.0)
    return law


def in_turn(p: list[float], children: list[int], draws: Iterator[float]) -> tuple[int, list[float]]:
    """The rule as the literature words it, for one node: the place of the accepted child, or -1 and the residual."""
    remaining = list(p)
    for place, child in enumerate(children):
        if next(draws) < remaining[child]:
            return place, []
        remaining[child] = 0.0
        mass = sum(remaining)
        remaining = [value / mass for value in remaining]
    return -1, remaining


def law_in_turn(tree: DraftTree, probs: np.ndarray) -> dict[tuple[tuple[int, ...], int], float]:
    """The exact law of the same outcome under :func:`in_turn`'s rule, its draws integrated out."""
    law: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)

    def at(row: int, accepted: tuple[int, ...], probability: float) -> None:
        remaining = probs[row].astype(float)
        for child in np.flatnonzero(tree.parents == row):
            token = int(tree.tokens[child])
            at(child, (*accepted, token), probability * remaining[token])
            probability *= 1 - remaining[token]
            if not probability:
                return
            remaining[token] = 0.0
            remaining = remaining / remaining.sum()
        for token in np.flatnonzero(remaining):
            law[accepted, int(token)] += probability * remaining[token]

    at(0, (), 1.0)
    return {outcome: value for outcome, value in law.items() if value}


def golden_tree(arrays) -> DraftTree:
    tokens, parents = arrays["tree_token"], arrays["tree_parent"]
    depths = np.zeros(len(tokens), dtype=np.int64)
    for row in range(1, len(tokens)):
        depths[row] = depths[parents[row]] + 1
    return DraftTree(tokens, parents, depths, -depths.astype(float))


@pytest.mark.parametrize("name", CASES)
def test_golden_first_round(name):
    """The exact law of the first round, and its means; nothing of probability 0 ever happens."""
    arrays = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    law = law_of_verify(golden_tree(arrays), arrays["tree_node_probs"])
    expected = {(tuple(o["accepted"]), o["bonus"]): o["prob"] for o in CASES[name]["first_round"]}
    assert {outcome: value for outcome, value in law.items() if value} == pytest.approx(expected, rel=1e-12)
    accepted = sum(len(outcome[0]) * value for outcome, value in law.items())
    assert accepted == pytest.approx(CASES[name]["expected_accepted"], rel=1e-12)
    assert accepted + 1 == pytest.approx(CASES[name]["expected_committed"], rel=1e-12)


@pytest.mark.parametrize("step", STEPS, ids=[step["note"] for step in STEPS])
def test_golden_steps(step):
    """The rule draw by draw, by its reference; and our law at that node: each child in turn, then the residual."""
    place, residual = in_turn(step["p"], step["children"], iter(step["draws"]))
    assert place == step["accepted_child"]
    if place < 0:
        assert residual == pytest.approx(step["residual_after_all_rejected"])

    tree = TreeBuilder(0)
    for child in step["children"]:
        tree.add(child, 0)
    probs = np.zeros((len(tree), len(step["p"])))
    probs[0], probs[1:, 0] = step["p"], 1.0
    law = law_of_verify(tree.finish(), probs)
    left = 1.0
    for child, expected in zip(step["children"], step["accept_prob_in_turn"], strict=True):
        taken = law.get(((child,), 0), 0.0)
        assert taken == pytest.approx(left * expected)
        left -= taken
    if step["residual_after_all_rejected"] is not None and left:
        ours = [law.get(((), token), 0.0) / left for token in range(len(step["p"]))]
        assert ours == pytest.approx(step["residual_after_all_rejected"])


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(1, 6), nodes=st.integers(0, 9), zeros=st.floats(0, 0.9))
def test_the_law_is_that_of_testing_children_in_turn(seed, vocab, nodes, zeros):
    """For any tree and any probabilities, many of them 0, and some nodes certain."""
    random = np.random.default_rng(seed)
    tree = RandomProposer(vocab_size=vocab, nodes=nodes, seed=seed)
    tree.start(None)
    tree = tree.propose()
    probs = random.integers(1, 9, size=(len(tree), vocab)) * (random.random((len(tree), vocab)) >= zeros)
    probs[probs.sum(1) == 0, random.integers(vocab)] = 1
    probs = probs / probs.sum(1, keepdims=True)
    assert law_of_verify(tree, probs) == pytest.approx(law_in_turn(tree, probs))


# -- the law of the loop ----------------------------------------------------------------------------------------------


class ContextTarget:
    """Stands behind a table target: logits by the new tokens so far; past three, the last row again."""

    def __init__(self, table_target, arrays) -> None:
        vocab = len(arrays["p0"])
        self.logits = {(): arrays["p0"]}
        self.logits |= {(a,): arrays["p1"][a] for a in range(vocab)}
        self.logits |= {(a, b): arrays["p2"][a, b] for a, b in product(range(vocab), repeat=2)}
        self.inner = table_target(self._table(vocab), eos_ids=())

    def _table(self, vocab: int) -> np.ndarray:
        """[257, V] log-probabilities by the state of the text that starts from an empty one."""
        table = np.zeros((257, vocab), dtype=np.float32)
        states = {}
        for context, probs in self.logits.items():
            state = 0
            for token in (PROMPT, *context):
                state = (31 * state + token + 1) % 257
            assert states.setdefault(state, context) == context, "two contexts share a state"
            with np.errstate(divide="ignore"):
                table[state] = np.log(probs)
        return table


PROMPT = 1


class ByContext:
    """Drafts the children that a table names behind each context, ``levels`` deep, as the golden cases do."""

    def __init__(self, children: dict[str, list[int]], levels: int) -> None:
        self.children, self.levels = children, levels
        self.max_drafts = 400

    def start(self, prefill) -> None:
        self.text: list[int] = []

    def commit(self, tokens, states) -> None:
        self.text += tokens.tolist()

    def propose(self) -> DraftTree:
        tree = TreeBuilder(self.text[-1])

        def grow(row: int, context: list[int]) -> None:
            if len(context) - len(self.text) == self.levels:
                return
            for child in self.children.get(",".join(map(str, context)), []):
                grow(tree.add(child, row), [*context, child])

        grow(0, self.text)
        return tree.finish()


class Dictated:
    """Selects what is dictated, and keeps the logits that it was shown."""

    def __init__(self, answer: tuple[int, ...]) -> None:
        self.left, self.shown = list(answer), []

    def begin(self, target, encoded, eos_ids, cap):
        return self

    def select(self, logits):
        self.shown.append(logits[0])
        return torch.tensor([self.left.pop(0) if self.left else 0])

    def along(self, logits):
        return lambda row: int(self.select(logits[row : row + 1]))


@pytest.mark.parametrize("name", CASES)
def test_the_loop_commits_what_is_selected_by_the_logits_of_its_own_text(name, table_target):
    """So the joint law of the first three tokens is the product of the selector's laws: golden ``joint3``."""
    arrays = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    case, target = CASES[name], ContextTarget(table_target, arrays)
    proposer = ByContext(case["children"], case["levels"])
    encoded = target.inner.encode_ids([PROMPT])
    joint = np.zeros((6, 6, 6))
    for answer in product(range(6), repeat=3):
        dictated = Dictated(answer)
        trace = generate(target.inner, proposer, encoded, max_new_tokens=3, selection=dictated)
        assert trace.tokens == list(answer)
        rows = dictated.shown[:3]
        joint[answer] = np.prod([float(row.double().exp()[token]) for row, token in zip(rows, answer, strict=True)])
    np.testing.assert_allclose(joint, arrays["joint3"], rtol=1e-5, atol=1e-12)


def kinds(table: np.ndarray) -> dict[str, Callable[[], object]]:
    """A chain, a tree, and a tree of all tokens; ``benchmarks/sampling.py`` has more drafters, and 200,000 draws."""
    vocab = table.shape[1]
    likely = [2, 0, 3]
    return {
        "wrong chain": lambda: OracleProposer(likely, vocab_size=vocab, depth=3, wrong_from=2),
        "tree": lambda: OracleProposer(likely, vocab_size=vocab, depth=2, width=3),
        "all children": lambda: ByContext({key: list(range(vocab)) for key in contexts(vocab)}, 2),
    }


def contexts(vocab: int) -> list[str]:
    return [",".join(map(str, c)) for length in range(4) for c in product(range(vocab), repeat=length)]


def exact_joint(table: np.ndarray, selection: Selection, prompt: list[int]) -> np.ndarray:
    """[V, V, V] law of the first three tokens, of transformers' warpers over every context."""
    vocab = table.shape[1]
    warpers = selection.warpers(SimpleNamespace(device="cpu"), SimpleNamespace(ids=torch.tensor(prompt)), (), 3)

    def law(context: tuple[int, ...]) -> np.ndarray:
        state = 0
        for token in (*prompt, *context):
            state = (31 * state + token + 1) % 257
        scores = torch.from_numpy(table[state : state + 1])
        for warper in warpers:
            scores = warper(None, scores)
        return scores[0].double().softmax(-1).numpy()

    joint = np.zeros((vocab,) * 3)
    first = law(())
    for a, b in product(range(vocab), repeat=2):
        if first[a] > 0:
            second = law((a,))
            if second[b] > 0:
                joint[a, b] = first[a] * second[b] * law((a, b))
    return joint


@pytest.mark.parametrize("kind", list(kinds(np.zeros((1, 6)))))
def test_many_answers_have_the_exact_law(kind, table_target):
    """Temperature 0.7 and top-p 0.8 on a vocabulary of 6, a third of its tokens impossible."""
    draws = 1000
    random = np.random.default_rng(11)
    table = random.normal(size=(257, 6)).astype(np.float32) * 1.5
    table[random.random(table.shape) < 0.3] = -np.inf
    table[:, 2] = np.maximum(table[:, 2], 0.0)
    target = table_target(table)
    selection = resolve(SAMPLED, None, target.spec)
    joint = exact_joint(table, selection, [5, 1])
    proposer = kinds(table)[kind]()
    counts = np.zeros_like(joint)
    for number in range(draws):
        encoded = target.encode_ids([5, 1], key=f"{kind} {number}")
        trace = generate(target, proposer, encoded, max_new_tokens=3, selection=selection)
        counts[tuple(trace.tokens)] += 1
    assert not counts[joint == 0].any(), "an impossible answer was drawn"
    bound = total_variation_bound(int((joint > 0).sum()), draws)
    assert 0.5 * np.abs(counts / draws - joint).sum() < bound
    raw = exact_joint(table, resolve(SelectionConfig(temperature=1.0), None, target.spec), [5, 1])
    assert 0.5 * np.abs(counts / draws - raw).sum() > 1.5 * bound, "the draws could not tell one law from another"


# -- the selector's draws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probs",
    [
        [0.5, 0.25, 0.125, 0.125],
        [0.0, 0.5, 0.25, 0.25],
        [1.0, 0.0, 0.0],
        [0.2] * 5,
        [0.9999, 0.0001, 0.0],
    ],
)
def test_draws_have_the_frequencies_of_their_probabilities(probs):
    draws = 200_000
    noise = GumbelNoise(seed=1, key="a", device=torch.device("cpu")).draw(draws * len(probs)).view(draws, -1)
    chosen = (torch.tensor(probs, dtype=torch.float64).log() + noise).argmax(-1)
    counts = torch.bincount(chosen, minlength=len(probs)) / draws
    assert not counts[torch.tensor(probs) == 0].any()
    distance = 0.5 * float((counts - torch.tensor(probs)).abs().sum())
    assert distance < total_variation_bound(sum(p > 0 for p in probs), draws) < 0.015


def test_requests_and_places_draw_independently():
    """First and second draw of neighbouring requests and seeds: all pairs of outcomes are equally frequent."""
    draws = 20_000
    pairs = Counter()
    for number in range(draws):
        noise = GumbelNoise(seed=number % 2, key=f"{number // 2}", device=torch.device("cpu"))
        pairs[int(noise.draw(4).argmax()), int(noise.draw(4).argmax())] += 1
    counts = np.array([pairs[pair] for pair in product(range(4), repeat=2)]) / draws
    assert 0.5 * np.abs(counts - 1 / 16).sum() < total_variation_bound(16, draws)


@pytest.fixture(scope="module")
def encoded(small_target, small_conversations):
    (conversation,) = (c for c in small_conversations if c.key == "two")
    return small_target.encode(replace(conversation, messages=conversation.messages[:1]))


#: Settings of a draw, and some on top of processors.
RULES = {
    "temperature": SelectionConfig(temperature=1.0),
    "nucleus": SAMPLED,
    "top k": SelectionConfig(temperature=1.3, top_k=5),
    "both": SelectionConfig(temperature=0.9, top_k=7, top_p=0.9),
    "with processors": SelectionConfig(
        temperature=0.8, top_p=0.95, processors={"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_p": 0.02}
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_distribution_is_the_one_that_transformers_samples_from(rule, small_target, encoded):
    """Processed scores along an answer that ``generate(do_sample=True)`` has drawn itself."""
    selection = resolve(RULES[rule], None, small_target.spec)
    inputs = {"input_ids": encoded.ids[None], "attention_mask": torch.ones_like(encoded.ids[None])}
    inputs |= small_target.generation_inputs([encoded], encoded.is_visual[None])
    config = GenerationConfig(
        max_new_tokens=12,
        do_sample=True,
        eos_token_id=[small_target.spec.vocab_size],
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **{"top_k": 0} | dict(selection.settings),
    )
    torch.manual_seed(3)
    drawn = small_target.model.generate(**inputs, generation_config=config)
    answer = drawn.sequences[0, encoded.ids.shape[0] :].tolist()
    selector = selection.begin(small_target, encoded, (), 12)
    selector._noise = None  # what is drawn from, not the draw
    for place, (logits, theirs) in enumerate(zip(drawn.logits, drawn.scores, strict=True)):
        torch.testing.assert_close(selector.scores(logits), theirs)
        selector.follow(answer[place : place + 1])


@pytest.mark.parametrize("rule", RULES)
def test_every_loop_draws_the_same_answer(rule, small_target, encoded):
    vocab = small_target.spec.vocab_size
    decode = {"max_new_tokens": 24, "eos_ids": (), "selection": resolve(RULES[rule], None, small_target.spec)}
    answer = generate_autoregressive(small_target, encoded, **decode).tokens
    greedy = generate_autoregressive(small_target, encoded, max_new_tokens=24, eos_ids=()).tokens
    assert answer != greedy
    assert generate_transformers(small_target, encoded, **decode).tokens == answer
    proposers = [
        *(OracleProposer(answer, vocab_size=vocab, depth=4, width=2, wrong_from=k) for k in (1, 2, 3, None)),
        OracleProposer(answer, vocab_size=vocab, depth=5),
        RandomProposer(vocab_size=vocab, nodes=14, seed=1, answer=answer, hit_rate=0.7),
    ]
    for proposer in proposers:
        trace = generate(small_target, proposer, encoded, **decode)
        assert trace.tokens == answer, vars(proposer)
    right = generate(small_target, proposers[3], encoded, **decode)
    assert [r.accepted for r in right.rounds[:-1]] == [4] * (len(right.rounds) - 1)


def test_an_answer_belongs_to_seed_and_request_alone(small_target, encoded):
    """Not to the order of requests, to what was drawn before, or to the global generator."""

    def answer(key: str, seed: int) -> list[int]:
        selection = resolve(replace(SAMPLED, seed=seed), None, small_target.spec)
        request = replace(encoded, key=key)
        return generate_autoregressive(small_target, request, max_new_tokens=10, eos_ids=(), selection=selection).tokens

    asked = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = {request: answer(*request) for request in asked}
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert {request: answer(*request) for request in reversed(asked)} == first
    assert len({tuple(tokens) for tokens in first.values()}) == 4


def test_end_tokens_and_caps_cut_sampled_answers_alike(small_target, encoded):
    selection = resolve(SAMPLED, None, small_target.spec)
    whole = generate_autoregressive(small_target, encoded, max_new_tokens=12, eos_ids=(), selection=selection).tokens
    for place, cap in product((0, 3, 6, None), (1, 4, 7, 12)):
        eos = () if place is None else (whole[place],)
        decode = {"max_new_tokens": cap, "eos_ids": eos, "selection": selection}
        proposer = OracleProposer(whole, vocab_size=small_target.spec.vocab_size, depth=4, width=2)
        expected = whole[: min(cap, whole.index(whole[place]) + 1 if place is not None else 12)]
        assert generate_autoregressive(small_target, encoded, **decode).tokens == expected
        assert generate(small_target, proposer, encoded, **decode).tokens == expected
        assert generate_transformers(small_target, encoded, **decode).tokens == expected
