"""The compressor against the golden vectors and against its branches written out token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.targets.base import RopeSpec, TargetSpec
from fovea.visual.compression import BRANCHES, CompressionConfig, VisualCompressor, draw, pool, straight_through
from fovea.visual.pictures import pictures, questions
from tests.visual.branches import by_hand

GOLDEN = Path(__file__).parents[1] / "golden" / "compressor"
VALUES = {name: torch.from_numpy(array) for name, array in np.load(GOLDEN / "values.npz").items()}
CASES = [(12, 3), (13, 3), (2, 3), (41, 20)]
COUNTS = json.loads((GOLDEN / "counts.json").read_text())
WIDTH = 12
MODES = ("weight", "concat", "select", *BRANCHES)


def spec_of(width: int) -> TargetSpec:
    return TargetSpec("test", width, 8, 2, 2, 1, width // 2, 11, 1e-6, False, RopeSpec(1e4), 64, (2,))


def make(width: int = WIDTH, seed: int = 0, **config: Any) -> VisualCompressor:
    """A compressor in float64, all of whose weights are of visible size."""
    torch.manual_seed(seed)
    compressor = VisualCompressor(spec_of(width), CompressionConfig(**config)).double()
    with torch.no_grad():
        for weight in compressor.parameters():
            weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    return compressor


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: f"N{case['N']}")
def test_golden_counts(case: dict[str, Any]) -> None:
    tokens, config = case["N"], CompressionConfig()
    rows = {branch: config.rows(branch, tokens) for branch in BRANCHES}
    expected = (case["prune_20"], case["pool_20"], case["conv_3"], case["resampler_2"], case["text_only"])
    assert tuple(rows.values()) == expected
    concat = CompressionConfig(mode="concat")
    assert sum(concat.rows(branch, tokens) for branch in concat.branches) == case["concat"]
    for ratio, common in case["weight"].items():
        weight = CompressionConfig(mode="weight", weight_ratio=int(ratio))
        assert {weight.rows(branch, tokens) for branch in weight.branches} == {common}


@pytest.mark.parametrize(("tokens", "ratio"), CASES)
def test_golden_values(tokens: int, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def golden(name: str) -> Tensor:
        return VALUES[f"N{tokens}_r{ratio}_{name}"]

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)

    compressor = VisualCompressor(spec_of(4), CompressionConfig(mode="weight", weight_ratio=ratio)).double()
    assert compressor.conv is not None
    assert compressor.gate is not None
    compressor.conv.load_state_dict({"conv.weight": golden("conv_weight"), "conv.bias": golden("conv_bias")})
    compressor.gate.load_state_dict({"weight": torch.zeros(3, 4), "bias": golden("gate_logits")})
    x = golden("x")
    close(pool(x, ratio), golden("pool"))
    close(compressor.conv(x), golden("conv"))

    def kept(count: int, rows: int, generator: torch.Generator) -> Tensor:
        assert (count, rows) == (tokens, len(golden("prune_keep")))
        return golden("prune_keep")

    monkeypatch.setattr("fovea.visual.compression.draw", kept)
    weights = compressor.weigh(torch.zeros(1, 4, dtype=torch.float64))
    close(weights[0], golden("gate"))
    (made,) = compressor([(x, x)], weights)
    close(made.embeds, golden("weight_mix"))
    prune = VisualCompressor(spec_of(4), CompressionConfig(mode="prune", prune_ratio=ratio))
    (made,) = prune([(x, x)], torch.ones(1, 1))
    close(made.embeds, golden("prune"))


@pytest.mark.parametrize("case", json.loads((GOLDEN / "gumbel.json").read_text()))
def test_golden_gumbel(case: dict[str, Any]) -> None:
    logits = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    compressor = VisualCompressor(spec_of(4), CompressionConfig()).double()
    assert compressor.gate is not None
    compressor.gate.load_state_dict({"weight": torch.zeros(5, 4), "bias": logits.detach()})
    assert compressor.weigh(torch.zeros(1, 4, dtype=torch.float64))[0].nonzero().item() == case["decode_choice"]
    if "noise" not in case:
        return
    noise, cotangent = (torch.tensor(case[name], dtype=torch.float64) for name in ("noise", "cotangent"))
    hard = straight_through(logits, noise, case["temperature"])
    assert hard.tolist() == case["forward"], "exact, so that training sees what decoding sees"
    (cotangent @ hard).backward()
    torch.testing.assert_close(logits.grad, torch.tensor(case["grad_logits"], dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), tokens=st.integers(1, 50), ratio=st.integers(1, 7), seed=st.integers(0, 99))
@torch.no_grad()
def test_every_mode_is_its_branches_and_never_longer(mode: str, tokens: int, ratio: int, seed: int) -> None:
    ratios = {"prune_ratio": ratio + 2, "pool_ratio": ratio + 1, "conv_ratio": ratio, "weight_ratio": ratio}
    compressor = make(mode=mode, seed=seed, **ratios)
    config = compressor.config
    x, f = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    weights = compressor.weigh(torch.randn(1, WIDTH, dtype=torch.float64))
    (made,) = compressor([(x, f)], weights)
    assert made.embeds.shape == made.states.shape
    assert len(made.embeds) <= tokens
    draws = torch.Generator().manual_seed(config.seed)
    parts = [by_hand(compressor, branch, x, f, draws) for branch in config.branches]
    if mode == "weight":
        expected = [
            sum(w * torch.stack(part[side]) for w, part in zip(weights[0], parts, strict=True)) for side in (0, 1)
        ]
    else:
        if mode == "select":
            parts = [parts[int(weights.argmax())]]
        both = [[row for part in parts for row in part[side]] for side in (0, 1)]
        expected = [torch.stack(side) if side else torch.zeros(0, WIDTH) for side in both]
        if len(expected[0]) > tokens:
            expected = [x, f]
    for actual, side in zip(made, expected, strict=True):
        torch.testing.assert_close(actual, side.double(), rtol=1e-9, atol=1e-12)


def test_pruning_is_random_in_training_and_repeats_itself_otherwise() -> None:
    compressor = make(mode="prune", prune_ratio=3)
    two = [(torch.randn(30, WIDTH), torch.randn(30, WIDTH)) for _ in range(2)]
    ones = torch.ones(2, 1)
    first, again = compressor(two, ones), compressor(two, ones)
    alone = compressor(two[:1], ones[:1])
    assert all(torch.equal(one.embeds, two.embeds) for one, two in zip(first, again, strict=True))
    assert torch.equal(first[0].embeds, alone[0].embeds), "a later picture changes nothing"
    generator = torch.Generator().manual_seed(5)
    drawn = [compressor(two, ones, generator)[0].embeds for _ in range(2)]
    assert not torch.equal(*drawn)
    assert torch.equal(drawn[0], compressor(two, ones, torch.Generator().manual_seed(5))[0].embeds)
    other = make(mode="prune", prune_ratio=3)
    other.config = CompressionConfig(mode="prune", prune_ratio=3, seed=1)
    assert not torch.equal(other(two, ones)[0].embeds, first[0].embeds)


def test_pruning_keeps_every_token_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.stack([torch.zeros(12).index_fill(0, draw(12, 4, generator), 1.0) for _ in range(3000)])
    assert kept.sum(1).unique().tolist() == [4]
    # Standard error sqrt(p (1 - p) / n) = 0.0086.
    torch.testing.assert_close(kept.mean(0), torch.full((12,), 1 / 3), atol=0.04, rtol=0)


def test_gate_in_training_draws_with_its_probabilities() -> None:
    compressor = make()
    questions = torch.randn(1, WIDTH, dtype=torch.float64).expand(4000, -1)
    assert compressor.gate is not None
    weights = compressor.weigh(questions, torch.Generator().manual_seed(0))
    assert weights.sum(1).unique().tolist() == [1.0]
    expected = compressor.gate(questions[:1])[0].softmax(-1)
    torch.testing.assert_close(weights.mean(0), expected, atol=0.03, rtol=0)
    still = compressor.weigh(questions[:1])
    assert still.argmax() == expected.argmax()


def test_selected_rows_teach_the_gate_and_keep_their_values() -> None:
    """The gradient is that of the drawn branch's soft weight: d/d logits of <cotangent, rows> times that weight."""
    compressor = make(conv_ratio=2)
    assert compressor.gate is not None
    compressor.gate.weight.data *= 0.2
    compressor.gate.bias.data *= 0.2
    x, f, cotangent = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    question = torch.randn(1, WIDTH, dtype=torch.float64)
    tried = set()
    for seed in range(40):
        weights = compressor.weigh(question, torch.Generator().manual_seed(seed))
        chosen = int(weights.argmax())
        (made,) = compressor([(x, f)], weights, torch.Generator().manual_seed(1))
        alone = make(mode=BRANCHES[chosen], conv_ratio=2)
        alone.load_state_dict({k: v for k, v in compressor.state_dict().items() if k in alone.state_dict()})
        (plain,) = alone([(x, f)], weights[:, :1], torch.Generator().manual_seed(1))
        assert torch.equal(made.embeds, plain.embeds), "exact: training sees what decoding sees"
        assert torch.equal(made.states, plain.states)
        rows = len(made.embeds)
        tried.add(BRANCHES[chosen])
        compressor.zero_grad()
        ((made.embeds + 2 * made.states) * cotangent[:rows]).sum().backward()
        noise = -torch.empty(1, 5).exponential_(generator=torch.Generator().manual_seed(seed)).log()
        logits = compressor.gate(question).detach().requires_grad_()
        soft = (logits + noise).softmax(-1)[0, chosen]
        (soft * ((plain.embeds + 2 * plain.states) * cotangent[:rows]).sum().detach()).backward()
        torch.testing.assert_close(compressor.gate.bias.grad, logits.grad[0])  # pyright: ignore
    assert tried == set(BRANCHES)


def test_gate_learns_which_branch_a_question_needs() -> None:
    """Questions with a sign; for one sign the rows cost, for the other they pay: text_only against the rest."""
    torch.manual_seed(0)
    compressor = VisualCompressor(spec_of(WIDTH), CompressionConfig(conv_ratio=2))
    optimizer = torch.optim.Adam(list(compressor.gate.parameters()), lr=0.1)  # pyright: ignore
    direction = torch.randn(WIDTH)
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(8, WIDTH)
    for step in range(150):
        sign = 1 if step % 2 else -1
        weights = compressor.weigh(sign * direction[None], generator)
        (made,) = compressor([(x, x)], weights, generator)
        loss = sign * made.states.mean() if len(made.states) else torch.zeros(())
        if loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    choices = compressor.weigh(torch.stack((direction, -direction))).argmax(-1).tolist()
    assert BRANCHES[choices[0]] == "text_only"
    assert BRANCHES[choices[1]] != "text_only"


def test_convolution_and_gate_start_neutral() -> None:
    compressor = VisualCompressor(spec_of(WIDTH), CompressionConfig(mode="weight"))
    x = torch.randn(9, WIDTH)
    assert compressor.conv is not None
    torch.testing.assert_close(compressor.conv(x), pool(x, 3))
    torch.testing.assert_close(compressor.weigh(torch.randn(2, WIDTH)), torch.full((2, 3), 1 / 3))


def test_modes_own_what_they_use() -> None:
    owned = {mode: {name.split(".")[0] for name, _ in make(mode=mode).named_parameters()} for mode in MODES}
    assert owned["weight"] == {"gate", "conv"}
    assert owned["concat"] == {"conv", "resampler"}
    assert owned["select"] == {"gate", "conv", "resampler"}
    assert owned["prune"] == owned["pool"] == owned["text_only"] == set()
    assert (owned["conv"], owned["resampler"]) == ({"conv"}, {"resampler"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mode": "chose"}, "compression.mode is 'chose'"),
        ({"prune_ratio": 0}, "compression.prune_ratio is 0"),
        ({"weight_ratio": -1}, "compression.weight_ratio is -1"),
        ({"queries": 0}, "compression.queries is 0"),
        ({"temperature": 0.0}, "compression.temperature is 0.0"),
    ],
)
def test_bad_numbers_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CompressionConfig(**changes)


def mask(text: str, marks: str) -> Tensor:
    return torch.tensor([letter in marks for letter in text])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("tppqqqaaa", [[3, 4, 5]]),
        ("tppqqq", [[3, 4, 5]]),
        ("ppqppqqa", [[2, 5, 6], [5, 6]]),
        ("tpqaatqaaptqqa", [[2], [10, 11, 12]]),
        ("ttpaa", [[0, 1, 2]]),
        ("tpqaattpa", [[2], [0, 1, 2, 3, 4, 5, 6, 7]]),
        ("pp", [[0, 1]]),
        ("ttt", []),
    ],
)
def test_a_question_is_the_text_between_picture_and_answer(text: str, asked: list[list[int]]) -> None:
    """t, q text, p visual tokens, a answers."""
    found = questions(mask(text, "p"), mask(text, "a"))
    assert [places.tolist() for places in found] == asked
    if "a" not in text:
        assert [places.tolist() for places in questions(mask(text, "p"), None)] == asked


@settings(max_examples=100, deadline=None)
@given(text=st.text("tpa", min_size=1, max_size=25), data=st.data())
def test_a_longer_conversation_keeps_the_questions_of_its_prompt(text: str, data: st.DataObject) -> None:
    prompts = [end for end in range(1, len(text)) if text[end] == "a" != text[end - 1]]
    if not prompts:
        return
    end = data.draw(st.sampled_from(prompts))
    whole, prompt = (questions(mask(part, "p"), mask(part, "a")) for part in (text, text[:end]))
    # The picture at the end of the prompt is whole: an answer follows it.
    assert [q.tolist() for q in whole[: len(prompt)]] == [q.tolist() for q in prompt]


@given(flags=st.lists(st.booleans(), max_size=30))
def test_pictures_are_runs(flags: list[bool]) -> None:
    spans = pictures(torch.tensor(flags, dtype=torch.bool))
    covered = torch.zeros(len(flags) + 1, dtype=torch.bool)
    for start, end in spans:
        assert start < end
        assert not covered[max(0, start - 1) : end].any(), "runs do not touch"
        covered[start:end] = True
    assert covered[:-1].tolist() == flags
