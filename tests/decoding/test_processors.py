"""Logits processors in the tree: every loop gives the answer of transformers' ``generate`` with the same settings.

The references are transformers itself on a real architecture, and processors written out over a table.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.logits_processors import PROCESSORS, WARPERS, SelectionError, make
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import GREEDY, SelectionConfig, resolve
from fovea.decoding.speculative import generate
from fovea.decoding.transformers_generate import generate_transformers

CAP = 16


def proposers(answer: list[int], vocab: int):
    yield OracleProposer(answer, vocab_size=vocab, depth=4, width=2, wrong_from=3)
    yield OracleProposer(answer, vocab_size=vocab, depth=6)
    yield RandomProposer(vocab_size=vocab, nodes=12, seed=1, answer=answer, hit_rate=0.7)


def selection_of(target, **processors):
    return resolve(SelectionConfig(processors=processors), None, target.spec)


@pytest.fixture(scope="module")
def prompts(small_target, small_conversations):
    return {
        conversation.key: small_target.encode(replace(conversation, messages=conversation.messages[:1]))
        for conversation in small_conversations
        if conversation.key in ("two", "text")
    }


@pytest.fixture(scope="module")
def plain(small_target, prompts):
    """Greedy answers without any processor or end."""
    return {
        key: generate_autoregressive(small_target, encoded, max_new_tokens=CAP, eos_ids=()).tokens
        for key, encoded in prompts.items()
    }


def settings_for(answer: list[int], prompt: list[int]) -> dict[str, tuple[dict[str, Any], tuple[int, ...]]]:
    """Settings that change ``answer``, by name, and end tokens."""
    end, rare = (answer[3],), min(set(range(20, 50)) - set(answer))
    return {
        "repetition_penalty": ({"repetition_penalty": 1.3}, ()),
        "encoder_repetition_penalty": ({"encoder_repetition_penalty": 3.0}, ()),
        "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, ()),
        "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, ()),
        "bad_words_ids": ({"bad_words_ids": [[answer[1]], answer[3:5], [answer[4], answer[5], answer[6]]]}, ()),
        "sequence_bias": ({"sequence_bias": [[[answer[0], answer[1]], -9.0], [[answer[5]], 2.0]]}, ()),
        "min_new_tokens": ({"min_new_tokens": 9}, end),
        "min_length": ({"min_length": len(prompt) + 9}, end),
        "both minima": ({"min_length": len(prompt) + 15, "min_new_tokens": 6}, end),
        "forced_eos_token_id": ({"forced_eos_token_id": 7}, ()),
        "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": [4, 1.9]}, (rare,)),
        "suppress_tokens": ({"suppress_tokens": [answer[2], answer[7]]}, ()),
        "begin_suppress_tokens": ({"begin_suppress_tokens": [answer[0]]}, ()),
        "all at once": (
            {
                "repetition_penalty": 1.1,
                "no_repeat_ngram_size": 2,
                "bad_words_ids": [[answer[1], answer[2]]],
                "min_new_tokens": 5,
                "forced_eos_token_id": answer[3],
                "suppress_tokens": [answer[6]],
                "remove_invalid_values": True,
                "renormalize_logits": True,
            },
            end,
        ),
    }


NAMES = list(settings_for(list(range(20)), []))


@pytest.mark.parametrize("key", ["two", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_all_loops_give_the_answer_of_transformers(name, key, small_target, prompts, plain):
    encoded = prompts[key]
    asked, eos = settings_for(plain[key], encoded.ids.tolist())[name]
    decode = {"max_new_tokens": CAP, "eos_ids": eos}
    expected = by_transformers(small_target, encoded, eos, **asked)
    without = generate_autoregressive(small_target, encoded, **decode).tokens
    assert expected != without, "the settings change nothing"
    decode["selection"] = selection_of(small_target, **asked)
    assert generate_transformers(small_target, encoded, **decode).tokens == expected
    assert generate_autoregressive(small_target, encoded, **decode).tokens == expected
    for proposer in proposers(expected, small_target.spec.vocab_size):
        trace = generate(small_target, proposer, encoded, **decode)
        assert trace.tokens == expected, vars(proposer)
    accepted = [r.accepted for r in trace.rounds]
    assert len(expected) < 6 or max(accepted) > 0, "nothing that was drafted behind the settings was accepted"


def by_transformers(target, encoded, eos: tuple[int, ...], **asked) -> list[int]:
    """The answer of the model's own ``generate``."""
    inputs = {"input_ids": encoded.ids[None], "attention_mask": torch.ones_like(encoded.ids[None])}
    inputs |= target.generation_inputs([encoded], encoded.is_visual[None])
    config = GenerationConfig(
        max_new_tokens=CAP, do_sample=False, eos_token_id=list(eos) or [target.spec.vocab_size], pad_token_id=0, **asked
    )
    answer = target.model.generate(**inputs, generation_config=config)[0, encoded.ids.shape[0] :].tolist()
    ends = [place for place, token in enumerate(answer, 1) if token in eos]
    return answer[: ends[0]] if ends else answer


# -- written out ------------------------------------------------------------------------------------------------------

VOCAB = 12


def naive_answer(table: np.ndarray, prompt: list[int], cap: int, eos: tuple[int, ...], asked: dict) -> list[int]:
    """Greedy decoding over a table, each processor as its definition has it."""
    text, answer = list(prompt), []
    state = 0
    for token in prompt:
        state = (31 * state + token + 1) % 257
    while len(answer) < cap:
        scores = table[state].astype(np.float32).copy()
        for token in set(text):
            penalty = np.float32(asked["repetition_penalty"])
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        size = asked["no_repeat_ngram_size"]
        seen = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        for token in range(VOCAB):
            if size and (*text[len(text) - size + 1 :], token) in seen:
                scores[token] = -np.inf
            for word in asked["bad_words_ids"]:
                if [*text, token][-len(word) :] == word:
                    scores[token] = -np.inf
        if len(answer) < asked["min_new_tokens"]:
            scores[list(eos)] = -np.inf
        if len(answer) == cap - 1 and asked["forced_eos_token_id"] is not None:
            scores[:] = -np.inf
            scores[asked["forced_eos_token_id"]] = 0.0
        scores[asked["suppress_tokens"]] = -np.inf
        token = int(scores.argmax())
        text.append(token)
        answer.append(token)
        state = (31 * state + token + 1) % 257
        if token in eos:
            break
    return answer


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_all_loops_equal_the_definitions(data, seed, table_target):
    random = np.random.default_rng(seed)
    tokens = st.integers(0, VOCAB - 1)
    asked = {
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2, 2.5, 0.5])),
        "no_repeat_ngram_size": data.draw(st.sampled_from([0, 2, 3])),
        "bad_words_ids": data.draw(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4)),
        "min_new_tokens": data.draw(st.integers(0, 12)),
        "forced_eos_token_id": data.draw(st.one_of(st.none(), tokens)),
        "suppress_tokens": data.draw(st.lists(tokens, max_size=2)),
    }
    eos = tuple(data.draw(st.sets(tokens, max_size=2)))
    # transformers lets an end token through that is a bad word of its own.
    asked["bad_words_ids"] = [w for w in asked["bad_words_ids"] if len(w) > 1 or w[0] not in eos] or [[VOCAB - 1] * 4]
    prompt = random.integers(0, VOCAB, size=data.draw(st.integers(1, 6))).tolist()
    cap = data.draw(st.integers(1, 25))
    table = random.normal(size=(257, VOCAB)).astype(np.float32)
    target = table_target(table, eos_ids=eos)
    expected = naive_answer(table, prompt, cap, eos, asked)

    encoded = target.encode_ids(prompt)
    decode = {"max_new_tokens": cap, "selection": selection_of(target, **asked)}
    baseline = generate_autoregressive(target, encoded, **decode)
    assert baseline.tokens == expected
    proposer = RandomProposer(vocab_size=VOCAB, nodes=14, seed=seed, answer=expected, hit_rate=0.8)
    trace = generate(target, proposer, encoded, **decode)
    assert (trace.tokens, trace.finish) == (expected, baseline.finish)


def test_a_forced_end_stands_at_the_cap_and_where_the_context_ends(table_target):
    target = table_target(np.random.default_rng(3).normal(size=(257, VOCAB)).astype(np.float32), max_positions=14)
    encoded = target.encode_ids([1, 2, 3, 4])
    selection = selection_of(target, forced_eos_token_id=9)
    for cap, length in ((5, 5), (30, 10)):
        decode = {"max_new_tokens": cap, "eos_ids": (9,), "selection": selection}
        answer = generate_autoregressive(target, encoded, **decode)
        proposer = OracleProposer(answer.tokens, vocab_size=VOCAB, depth=4, width=2, wrong_from=3)
        for trace in (answer, generate(target, proposer, encoded, **decode)):
            assert (len(trace.tokens), trace.tokens[-1], trace.finish) == (length, 9, "eos")


def test_bf16_logits_are_processed_as_transformers_does(small_target):
    """In fp32, whatever the model computes in: a penalty in bf16 would make ties."""
    selection = selection_of(small_target, repetition_penalty=1.05)
    selector = selection.begin(small_target, SimpleNamespace(key="", ids=torch.tensor([0, 1])), (), 4)
    logits = torch.tensor([[20.0, 19.0, 19.125] + [0.0] * 10], dtype=torch.bfloat16)
    # 20 / 1.05 = 19.0476: below 19.125, and above it when rounded to bf16's 19.0.
    assert selector.scores(logits).dtype == torch.float32
    assert int(selector.select(logits)) == 2


# -- settings ---------------------------------------------------------------------------------------------------------


def test_the_order_is_that_of_transformers(small_target):
    """With everything on, transformers builds the same processors in the same order."""
    asked: dict[str, Any] = {
        "sequence_bias": [[[1], 1.0]],
        "encoder_repetition_penalty": 1.1,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
        "bad_words_ids": [[5]],
        "min_length": 3,
        "min_new_tokens": 2,
        "forced_bos_token_id": 4,
        "forced_eos_token_id": 6,
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": (3, 1.1),
        "suppress_tokens": [7],
        "begin_suppress_tokens": [8],
        "temperature": 0.7,
        "top_h": 0.4,
        "top_k": 5,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.01,
        "renormalize_logits": True,
    }
    assert set(asked) == {*PROCESSORS, *WARPERS}
    prompt, eos = torch.tensor([[1, 2, 3]]), torch.tensor([9])
    config = GenerationConfig(do_sample=True, max_length=10, eos_token_id=9, **asked)
    config._eos_token_tensor = eos
    theirs = small_target.model._get_logits_processor(config, 3, prompt, device="cpu", model_kwargs={})
    *before, last = make(PROCESSORS, asked, prompt, eos, 7)
    ours = [*before, *make(WARPERS, asked, prompt, eos, 7), last]
    assert [type(processor) for processor in ours] == [type(processor) for processor in theirs]


QWEN = GenerationConfig(do_sample=True, temperature=1e-6, repetition_penalty=1.05, eos_token_id=[3, 4], bos_token_id=1)
SAMPLING = GenerationConfig(do_sample=True, temperature=0.9, top_p=0.6, max_length=4096)


class TestWhatIsInForce:
    @pytest.fixture
    def spec(self, table_target):
        return table_target(np.zeros((257, VOCAB), dtype=np.float32), eos_ids=(3,)).spec

    def test_nothing_by_default(self, spec):
        assert resolve(SelectionConfig(), None, spec) == GREEDY

    def test_settings_of_the_checkpoint_are_set_aside_and_said(self, spec, caplog):
        with caplog.at_level("INFO", logger="fovea.decoding.selection"):
            selection = resolve(SelectionConfig(), QWEN, spec)
        assert (selection.settings, selection.sampled) == ({}, False)
        assert selection.set_aside == ("repetition_penalty", "temperature")
        assert "set aside in all loops: repetition_penalty, temperature" in caplog.text
        assert selection.describe()["set_aside"] == ["repetition_penalty", "temperature"]

    def test_a_tiny_temperature_is_greedy(self, spec):
        selection = resolve(SelectionConfig("target"), QWEN, spec)
        assert (selection.settings, selection.sampled) == ({"repetition_penalty": 1.05}, False)
        assert selection.describe() == {"generation_config": "target", "temperature": 0.0, "repetition_penalty": 1.05}

    def test_a_checkpoint_that_samples(self, spec):
        """With the 50 most probable tokens that transformers takes where none are named."""
        selection = resolve(SelectionConfig("target"), SAMPLING, spec)
        assert selection.sampled
        assert selection.settings == {"temperature": 0.9, "top_p": 0.6, "top_k": 50}
        greedy = replace(SelectionConfig("target"), temperature=0.0)
        assert resolve(greedy, SAMPLING, spec).settings == {}

    def test_what_is_named_wins(self, spec):
        config = SelectionConfig("target", top_k=0, top_p=1.0, processors={"repetition_penalty": 1.0, "min_p": 0.1})
        selection = resolve(config, SAMPLING, spec)
        assert selection.settings == {"temperature": 0.9, "min_p": 0.1}
        assert resolve(config, QWEN, spec).settings == {}

    def test_greedy_answers_have_no_nucleus(self, spec):
        assert resolve(SelectionConfig(top_p=0.5, top_k=3, processors={"min_p": 0.1}), None, spec) == GREEDY

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("guidance_scale", 1.5),
            ("num_beams", 4),
            ("stop_strings", ["."]),
            ("max_time", 3.0),
            ("watermarking_config", {"greenlist_ratio": 0.25}),
            ("penalty_alpha", 0.6),
            ("made_up", 1),
        ],
    )
    def test_what_no_path_can_honour_is_refused_by_name(self, spec, name, value):
        own = GenerationConfig(**{name: value})
        with pytest.raises(SelectionError, match=rf"generation_config .*asks for {name}=.*node by node"):
            resolve(SelectionConfig("target"), own, spec)
        assert resolve(SelectionConfig(), own, spec).set_aside == (name,)
        with pytest.raises(SelectionError, match=rf"processors asks for {name}="):
            SelectionConfig(processors={name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("repetition_penalty", -1.0),
            ("repetition_penalty", "high"),
            ("no_repeat_ngram_size", 1.5),
            ("bad_words_ids", [3]),
            ("bad_words_ids", [[VOCAB]]),
            ("forced_eos_token_id", VOCAB),
            ("min_new_tokens", -1),
        ],
    )
    def test_values_that_transformers_refuses_are_refused_before_work(self, spec, name, value):
        with pytest.raises(SelectionError, match=f"asks for {name}=.*refused"):
            resolve(SelectionConfig(processors={name: value}), None, spec)

    def test_a_close_name_is_suggested(self):
        with pytest.raises(SelectionError, match="did you mean 'repetition_penalty'"):
            SelectionConfig(processors={"repetiton_penalty": 1.1})

    @pytest.mark.parametrize(
        ("field", "value"),
        [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
    )
    def test_impossible_values_are_refused(self, field, value):
        with pytest.raises(ValueError, match=f"{field} is {value}"):
            SelectionConfig(**{field: value})
        with pytest.raises(SelectionError, match=f"set {field} instead"):
            SelectionConfig(processors={field: value})
