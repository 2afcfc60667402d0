"""Speed evaluation on the small target: what is measured, in which order, on which rank, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from torch import Tensor

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import Selection
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.transformers_generate import generate_transformers
from fovea.decoding.tree import DraftTree
from fovea.evaluation import race
from fovea.evaluation.prompts import balanced, user_turns
from fovea.evaluation.results import ALL, LosslessnessError, SpeedResult
from fovea.evaluation.speed import evaluate_and_save, evaluate_speed
from fovea.evaluation.speed_config import SpeedConfig
from fovea.targets.base import Prefill
from fovea.targets.conversation import Conversation

CONFIG = SpeedConfig(max_new_tokens=12, warmup_prompts=1, warmup_tokens=4, transformers_prompts=2)


class KnowingProposer:
    """An oracle for every prompt it was told the answer of, right down to depth 2."""

    max_drafts = 9

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab_size: int) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.starts: list[tuple[int, ...]] = []

    def start(self, prefill: Prefill) -> None:
        prompt = tuple(prefill.ids.tolist())
        self.starts.append(prompt)
        self.oracle = OracleProposer(self.answers[prompt], vocab_size=self.vocab_size, depth=3, width=2, wrong_from=3)
        self.oracle.start(prefill)

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self.oracle.commit(tokens, states)

    def propose(self) -> DraftTree:
        return self.oracle.propose()


@pytest.fixture(scope="module")
def oracle(small_target, small_conversations):
    """An oracle that knows the small target's answer to every turn of the small conversations."""
    answers = {}
    for conversation in small_conversations:
        earlier: list[list[int]] = []
        for turn in user_turns(conversation):
            encoded = small_target.encode(turn, earlier)
            trace = generate_autoregressive(small_target, encoded, max_new_tokens=CONFIG.max_new_tokens)
            answers[tuple(encoded.ids.tolist())] = trace.tokens
            earlier.append(trace.tokens)
    return KnowingProposer(answers, small_target.spec.vocab_size)


@pytest.fixture(scope="module")
def result(small_target, small_conversations, oracle) -> SpeedResult:
    return evaluate_speed(small_target, oracle, small_conversations, CONFIG, method="oracle", settings={"note": 1})


def test_every_user_turn_is_answered_behind_the_targets_own_answers(result, small_conversations):
    keys = [prompt.speculative.key for prompt in result.prompts]
    assert keys == ["image", "wide", "tall", "two", "between", "text", "turns#1", "turns#2", "turns#3", "prompt"]
    turns = {p.speculative.key: p.autoregressive for p in result.prompts if p.speculative.key.startswith("turns")}
    # The second prompt holds the first one, its answer and at least the words of the next question.
    assert turns["turns#2"].prompt_tokens > turns["turns#1"].prompt_tokens + len(turns["turns#1"].tokens)
    assert turns["turns#3"].visual_tokens > turns["turns#2"].visual_tokens == turns["turns#1"].visual_tokens
    assert {p.speculative.source for p in result.prompts} == {c.source for c in small_conversations}


def test_figures_follow_from_the_traces(result):
    assert [prompt.comparison.outcome for prompt in result.prompts] == ["exact"] * 10
    pooled = result.figures()[ALL]
    rounds = [r for trace in result.speculative for r in trace.rounds]
    assert pooled["samples"] == 10
    assert pooled["tau"] == pytest.approx(sum(r.committed for r in rounds) / len(rounds))
    assert 2 < pooled["tau"] <= 3  # two right drafts and the bonus, but for the last round
    assert pooled["new_tokens"] == sum(len(trace.tokens) for trace in result.speculative)
    ar = sum(p.autoregressive.total_s for p in result.prompts)
    assert pooled["speedup"] == pytest.approx(ar / sum(t.total_s for t in result.speculative))
    assert pooled["exact"] == 10
    assert pooled["exact_matches"] == 1.0
    tokens = sum(len(p.autoregressive.tokens) - 1 for p in result.prompts)
    seconds = sum(p.autoregressive.total_s - p.autoregressive.prefill_s for p in result.prompts)
    assert pooled["ar_token_ms"] == pytest.approx(1e3 * seconds / tokens)
    assert result.summary()["accepted"] == pooled["accepted_drafts_per_round"]
    assert list(result.figures()) == ["image", "text", "turns", "two", ALL]
    assert result.settings["max_new_tokens"] == 12
    assert result.settings["note"] == 1


def test_transformers_answers_some_prompts_alike(result):
    beside = [prompt for prompt in result.prompts if prompt.transformers]
    assert [prompt.speculative.key for prompt in beside] == ["image", "wide"]
    for prompt in beside:
        assert prompt.transformers.tokens == prompt.autoregressive.tokens
    ours = sum(prompt.speculative.total_s for prompt in beside)
    theirs = sum(prompt.transformers.total_s for prompt in beside)
    assert result.figures()[ALL]["speedup_over_transformers"] == pytest.approx(theirs / ours)


@pytest.mark.parametrize(("temperature", "differ"), [(0.0, 1), (0.7, 0)])
def test_answers_that_transformers_gives_otherwise_are_counted_unless_drawn(result, temperature, differ):
    assert result.figures()[ALL]["differ_from_transformers"] == 0
    first = result.prompts[0]
    other = replace(first, transformers=replace(first.transformers, tokens=[*first.transformers.tokens[:-1], 0]))
    settings = result.settings | {"selection": {"temperature": temperature}}
    wrong = replace(result, prompts=[other, *result.prompts[1:]], settings=settings)
    assert wrong.figures()[ALL]["differ_from_transformers"] == differ
    assert wrong.differ_from_transformers == [first.autoregressive.key][:differ]


def test_a_target_that_is_run_otherwise_than_its_model_is_warned_of(
    monkeypatch, caplog, small_target, small_conversations, oracle, tmp_path
):
    def other(target, encoded, **limits):
        trace = generate_transformers(target, encoded, **limits)
        return replace(trace, tokens=[*trace.tokens, 0])

    monkeypatch.setattr("fovea.evaluation.race.generate_transformers", other)
    config = replace(CONFIG, transformers_prompts=1)
    evaluate_and_save(small_target, oracle, small_conversations[:2], config, tmp_path)
    key = small_conversations[0].key
    assert f"generate answers 1 prompts otherwise than the autoregressive loop, first '{key}'" in caplog.text


def test_a_memory_forgets_the_warm_up_and_keeps_what_is_measured(small_target, small_conversations, oracle):
    class Remembering(KnowingProposer):
        def forget(self) -> None:
            self.starts.append("forgot")

    proposer = Remembering(oracle.answers, small_target.spec.vocab_size)
    evaluate_speed(small_target, proposer, small_conversations[:3], replace(CONFIG, warmup_prompts=2))
    assert [start == "forgot" for start in proposer.starts] == [False, False, True, False, False, False]
    assert proposer.starts[3] == proposer.starts[0]


@pytest.mark.parametrize("with_transformers", [0, 100])
def test_each_decoder_goes_first_in_turn(monkeypatch, small_target, small_conversations, oracle, with_transformers):
    order: list[str] = []
    for name in ("generate_autoregressive", "generate", "generate_transformers"):
        real = getattr(race, name)

        def noted(*args, _real=real, _name=name, **kwargs):
            order.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(race, name, noted)
    config = replace(CONFIG, warmup_prompts=0, transformers_prompts=with_transformers)
    evaluate_speed(small_target, oracle, small_conversations[:6], config)
    decoders = 3 if with_transformers else 2
    firsts = order[::decoders]
    assert Counter(firsts) == dict.fromkeys(set(order), 6 // decoders)
    assert all(first != second for first, second in pairwise(firsts))
    assert len(set(order)) == decoders


def test_warm_up_is_not_measured(small_target, small_conversations, oracle):
    oracle.starts.clear()
    config = replace(CONFIG, warmup_prompts=2, transformers_prompts=0)
    result = evaluate_speed(small_target, oracle, small_conversations[:3], config)
    assert len(result.prompts) == 3
    assert len(oracle.starts) == 5
    assert oracle.starts[:2] == oracle.starts[2:4]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_measure_what_one_measures(small_target, small_conversations, oracle, result, world):
    shards = [
        evaluate_speed(small_target, oracle, small_conversations, CONFIG, method="oracle", rank=rank, world=world)
        for rank in range(world)
    ]
    assert all(shard.prompts for shard in shards)
    pooled, alone = SpeedResult.merged(shards).figures(), result.figures()
    assert pooled.keys() == alone.keys()
    counted = ("samples", "rounds", "new_tokens", "tau", "accepted_drafts_per_round", "reach_rate", "exact")
    for source in alone:
        assert {name: pooled[source][name] for name in counted} == {name: alone[source][name] for name in counted}


@pytest.mark.parametrize(
    "selection",
    [
        Selection({"temperature": 0.8, "top_p": 0.9}, sampled=True, seed=3),
        Selection({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
    ],
    ids=["sampled", "processed"],
)
def test_all_loops_select_alike_and_the_result_says_how(selection, small_target, small_conversations, result):
    drafter = RandomProposer(vocab_size=small_target.spec.vocab_size, nodes=9)
    measured = evaluate_speed(small_target, drafter, small_conversations, CONFIG, selection=selection)
    assert [prompt.comparison.outcome for prompt in measured.prompts] == ["exact"] * 10
    answers = [prompt.autoregressive.tokens for prompt in measured.prompts]
    assert answers != [prompt.autoregressive.tokens for prompt in result.prompts]
    for prompt in measured.prompts[:2]:
        assert prompt.transformers.tokens == prompt.autoregressive.tokens
    assert measured.settings["selection"] == selection.describe()
    shard = evaluate_speed(small_target, drafter, small_conversations, CONFIG, selection=selection, rank=1, world=2)
    by_key = {prompt.speculative.key: prompt.speculative.tokens for prompt in measured.prompts}
    assert all(prompt.speculative.tokens == by_key[prompt.speculative.key] for prompt in shard.prompts)


def test_unreadable_prompts_are_counted_and_named(small_target, small_conversations, oracle, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    ask = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    long = [{"role": "user", "content": "and so on " * 3000}]
    prompts = [Conversation("cut", ask, (broken,)), small_conversations[0], Conversation("long", long)]
    result = evaluate_speed(small_target, oracle, prompts, CONFIG)
    assert [prompt.speculative.key for prompt in result.prompts] == ["image"]
    assert result.failed.keys() == {"cut", "long"}
    assert str(broken) in result.failed["cut"]
    assert "context" in result.failed["long"]
    with pytest.raises(ValueError, match="none of the 1 prompts"):
        evaluate_and_save(small_target, oracle, prompts[:1], CONFIG, tmp_path / "evaluation")


def test_result_survives_its_folder(result, tmp_path):
    result.save(tmp_path / "evaluation")
    assert SpeedResult.load(tmp_path / "evaluation") == result
    lines = (tmp_path / "evaluation" / "traces.jsonl").read_text().splitlines()
    assert [json.loads(line)["speculative"]["key"] for line in lines] == [p.speculative.key for p in result.prompts]
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        SpeedResult.load(tmp_path / "elsewhere")


def test_unexplained_difference_fails_after_the_traces_are_saved(
    monkeypatch, small_target, small_conversations, tmp_path
):
    real = race.generate

    def wrong(*args, **kwargs) -> GenerationTrace:
        trace = real(*args, **kwargs)
        if trace.key == "wide":
            trace.tokens[3] += 1
        return trace

    monkeypatch.setattr(race, "generate", wrong)
    proposer = RandomProposer(vocab_size=small_target.spec.vocab_size, nodes=4)
    with pytest.raises(LosslessnessError, match=r"1 of 3 .*'wide'.*token 3"):
        evaluate_and_save(small_target, proposer, small_conversations[:3], CONFIG, tmp_path)
    saved = SpeedResult.load(tmp_path)
    assert [prompt.comparison.outcome for prompt in saved.prompts] == ["exact", "unexplained", "exact"]
    assert saved.figures()[ALL]["unexplained"] == 1


def test_balanced_takes_from_all_sources_in_turn():
    prompts = [Conversation(f"{source}{i}", [], source=source) for source in "aab" for i in range(3)]
    prompts = list({prompt.key: prompt for prompt in prompts}.values())
    assert [prompt.key for prompt in balanced(prompts, 5)] == ["a0", "b0", "a1", "b1", "a2"]
    assert len(balanced(prompts, None)) == 6
    assert balanced([], 3) == []


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"prompts_per_epoch": 0}, {"prompts": 0}, {"warmup_prompts": -1}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SpeedConfig(**wrong)


def test_without_rounds_figures_are_undefined_not_wrong(small_target, small_conversations, oracle):
    result = evaluate_speed(small_target, oracle, small_conversations[:2], replace(CONFIG, max_new_tokens=1))
    pooled = result.figures()[ALL]
    assert pooled["tau"] is None
    assert pooled["rounds"] == 0
    assert "tau" not in result.summary()
    assert np.isfinite(result.summary()["speedup"])
