"""Both decoding loops on a target made of tables: golden runs, partial acceptance, caches, stop rules."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.speculative import generate
from fovea.decoding.trace import load_traces, save_traces

GOLDEN = Path(__file__).parents[1] / "golden" / "decode"
CASES = json.loads((GOLDEN / "index.json").read_text())
VOCAB = 20


@pytest.fixture
def random_table():
    return np.random.default_rng(5).normal(size=(257, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_golden(name, table_target, table_proposer):
    case, arrays = CASES[name], np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    expected = case["expected"]
    target = table_target(arrays["target_logprob"], eos_ids=tuple(case["eos_ids"]))
    drafts = case["nodes"] - case["count_root"]
    proposer = table_proposer(arrays["draft_logprob"], case["width"], case["passes"], drafts)
    encoded = target.encode_ids(case["prompt"])

    baseline = generate_autoregressive(target, encoded, max_new_tokens=case["max_new_tokens"])
    trace = generate(target, proposer, encoded, max_new_tokens=case["max_new_tokens"])

    for result in (baseline, trace):
        assert result.tokens == expected["tokens"]
        assert result.finish == expected["finish"]
    tokens = trace.tokens[1:]
    committed = []
    for done in trace.rounds:
        committed.append(tokens[: done.committed])
        tokens = tokens[done.committed :]
    assert not tokens, "first token and rounds must account for every token"
    assert committed == [r["committed"] for r in expected["rounds"]]
    assert proposer.root_states == [r["root_state"] for r in expected["rounds"]]
    for field in ("draft_nodes", "tree_depth", "accepted"):
        assert [getattr(r, field) for r in trace.rounds] == [r[field] for r in expected["rounds"]]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("wrong_from", [1, 2, 3, 4, 5, None])
def test_right_down_to_a_level(width, wrong_from, random_table, table_target):
    target = table_target(random_table)
    encoded = target.encode_ids([3, 1, 4])
    answer = generate_autoregressive(target, encoded, max_new_tokens=43).tokens
    target.cache_lengths.clear()
    proposer = OracleProposer(answer, vocab_size=VOCAB, depth=4, width=width, wrong_from=wrong_from)
    trace = generate(target, proposer, encoded, max_new_tokens=43)

    assert trace.tokens == answer
    right = (wrong_from or 5) - 1
    assert all(r.accepted == right and r.committed == right + 1 for r in trace.rounds[:-1])
    assert max(r.draft_nodes for r in trace.rounds) == proposer.max_drafts
    # One row per committed token but the last, which is the next root.
    lengths = 3 + 1 + np.cumsum([r.committed for r in trace.rounds]) - 1
    assert target.cache_lengths == lengths.tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(0, 30), hit_rate=st.floats(0, 1), cap=st.integers(1, 40))
def test_random_trees_never_change_the_answer(seed, nodes, hit_rate, cap, table_target):
    random = np.random.default_rng(seed)
    eos = tuple(random.choice(VOCAB, size=random.integers(0, 3), replace=False).tolist())
    target = table_target(random.normal(size=(257, VOCAB)).astype(np.float32), eos_ids=eos)
    encoded = target.encode_ids(random.integers(0, VOCAB, size=5).tolist())
    baseline = generate_autoregressive(target, encoded, max_new_tokens=cap)
    target.cache_lengths.clear()
    proposer = RandomProposer(vocab_size=VOCAB, nodes=nodes, seed=seed, answer=baseline.tokens, hit_rate=hit_rate)
    trace = generate(target, proposer, encoded, max_new_tokens=cap)

    assert (trace.tokens, trace.finish) == (baseline.tokens, baseline.finish)
    assert sum(r.committed for r in trace.rounds) + 1 == len(trace.tokens)
    assert all(r.committed - 1 <= r.accepted <= r.committed for r in trace.rounds)
    assert all(1 <= r.committed <= r.tree_depth + 1 for r in trace.rounds)
    assert target.cache_lengths == [5 + int(n) for n in np.cumsum([r.committed for r in trace.rounds])]


class Interrupted(RandomProposer):
    """Lets a second request run from start to end before every draft of the first."""

    def __init__(self, interruption, **settings):
        super().__init__(**settings)
        self.interruption = interruption

    def propose(self):
        self.interruption()
        return super().propose()


def test_interleaved_requests_share_nothing(random_table, table_target):
    target = table_target(random_table)
    first, second = (target.encode_ids(ids) for ids in ([3, 1, 4], [1, 5, 9, 2, 6]))
    answers = [generate_autoregressive(target, prompt, max_new_tokens=30).tokens for prompt in (first, second)]
    assert answers[0] != answers[1]

    def drafts(answer):
        return {"vocab_size": VOCAB, "nodes": 12, "answer": answer, "hit_rate": 0.8}

    def other_request():
        proposer = RandomProposer(**drafts(answers[1]))
        assert generate(target, proposer, second, max_new_tokens=30).tokens == answers[1]

    proposer = Interrupted(other_request, **drafts(answers[0]))
    assert generate(target, proposer, first, max_new_tokens=30).tokens == answers[0]
    assert generate(target, proposer, second, max_new_tokens=30).tokens == answers[1], "start forgets the last request"


def test_the_cap_shrinks_where_the_context_ends(random_table, table_target):
    target = table_target(random_table, max_positions=12)
    encoded = target.encode_ids([1, 2, 3, 4])
    proposer = RandomProposer(vocab_size=VOCAB, nodes=9)
    for trace in (
        generate_autoregressive(target, encoded, max_new_tokens=100),
        generate(target, proposer, encoded, max_new_tokens=100),
    ):
        assert (len(trace.tokens), trace.finish) == (8, "cap")
    full = target.encode_ids(list(range(12)), key="scan-7")
    with pytest.raises(ValueError, match=r"'scan-7' has 12 tokens .* context of 12"):
        generate(target, proposer, full, max_new_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generate_autoregressive(target, encoded, max_new_tokens=0)


def test_an_empty_set_of_end_tokens_never_stops(random_table, table_target):
    target = table_target(random_table, eos_ids=tuple(range(VOCAB)))
    encoded = target.encode_ids([2, 2])
    proposer = RandomProposer(vocab_size=VOCAB, nodes=9)
    assert generate(target, proposer, encoded, max_new_tokens=9).finish == "eos"
    trace = generate(target, proposer, encoded, max_new_tokens=9, eos_ids=())
    assert (len(trace.tokens), trace.finish) == (9, "cap")


def test_traces_survive_the_file(tmp_path, random_table, table_target):
    target = table_target(random_table)
    traces = []
    for key in ("a.b/ü", "c"):
        encoded = target.encode_ids([1, 2, 3], key=key)
        proposer = RandomProposer(vocab_size=VOCAB, nodes=6, seed=1)
        traces.append(generate(target, proposer, encoded, max_new_tokens=7, method="random", source="toy"))
    traces[0].rounds[0].retrieval = [(4, 7), (8, 8)]
    save_traces(tmp_path / "traces.jsonl", traces)
    assert load_traces(tmp_path / "traces.jsonl") == traces
    first = traces[0]
    assert (first.key, first.method, first.source, first.prompt_tokens, first.visual_tokens) == (
        "a.b/ü",
        "random",
        "toy",
        3,
        0,
    )
    assert all(r.draft_s + r.verify_s <= r.total_s for r in first.rounds)
    assert first.prefill_s + sum(r.total_s for r in first.rounds) <= first.total_s
