"""SpecVLM's drafter: equal to its formulas in training and decoding, its gate by question, its size, its notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import generate
from fovea.decoding.trace import GenerationTrace
from fovea.drafters.checkpoint import CheckpointError, load_drafter, save_drafter
from fovea.drafters.eaglevlm import EagleVlmConfig, EagleVlmDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.specvlm import SpecVlmConfig, SpecVlmDrafter
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.training.gates import PARITY_TOLERANCE, parity_gate
from fovea.training.unroll import committed_text, unroll
from fovea.visual.compression import BRANCHES, CompressionConfig
from tests.drafters.plain import Rows, eagle, sample
from tests.visual.branches import by_hand

#: Ratios at which pictures of 6 and 12 visual tokens differ by branch.
SMALL = {"prune_ratio": 4, "pool_ratio": 5, "conv_ratio": 2, "weight_ratio": 2}
MODES = ("weight", "concat", "select", "prune", "resampler", "text_only")
#: p is a picture of 6 visual tokens; pictures side by side are one.
SHAPES = (
    "tptt" + "a" * 7 + "ttt" + "a" * 3,
    "ttt" + "a" * 4,
    "tpptptt" + "a" * 5,
    "tpt" + "aaa" + "tptt" + "aaaa",
    "ptt" + "aaa" + "tp" + "aaa",
)


@pytest.fixture
def make(spec: TargetSpec, head: TargetHead) -> Callable[..., SpecVlmDrafter]:
    """Float64 drafters whose weights are all of visible size."""

    def make(mode: str = "select", state: str = "pooled", seed: int = 0, **changes: Any) -> SpecVlmDrafter:
        torch.manual_seed(seed)
        compression = CompressionConfig(mode=mode, **{**SMALL, **changes})  # pyright: ignore
        config = SpecVlmConfig(depth=4, compression=compression, compressed_state=state)  # pyright: ignore
        drafter = SpecVlmDrafter(spec, config, head.to("cpu", torch.float64)).double()
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if weight.ndim == 1 or name.startswith("compressor.gate"):
                    weight.add_(0.5 * torch.randn_like(weight))
                elif name.startswith("compressor.conv"):
                    weight.add_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
                elif name.endswith("qkv_proj.weight"):
                    weight.mul_(2)
        return drafter.eval()

    return make


@pytest.fixture
def samples(spec: TargetSpec) -> list[TeacherSample]:
    return [sample(spec, seed, parts) for seed, parts in enumerate(SHAPES)]


def letters(taught: TeacherSample) -> str:
    marks = zip(taught.is_visual.tolist(), taught.answer_mask.tolist(), strict=True)
    return "".join("p" if seen else "a" if said else "t" for seen, said in marks)


def logits_along(drafter: SpecVlmDrafter, taught: TeacherSample, anchor: int, path: list[int]) -> Tensor:
    """Draft logits [V] at the end of ``path`` below the root token ``anchor`` + 1, from the formulas."""
    compressor, config = drafter.compressor, drafter.config.compression
    text, embedding = letters(taught), drafter.head.embedding
    draws = torch.Generator().manual_seed(config.seed)
    visual = iter(taught.visual[1:] if text[0] == "p" else taught.visual)
    rows: list[tuple[Tensor, Tensor, bool]] = []
    place = 1
    while place <= anchor + 1:
        if text[place] != "p":
            rows.append((embedding[taught.ids[place]], taught.last[place - 1], False))
            place += 1
            continue
        end = next(i for i in range(place, len(text)) if text[i] != "p")
        answer = text.index("a", end)
        asked = [i for i in range(end, answer) if text[i] == "t"] or list(range(answer))
        x = torch.stack([next(visual) for _ in range(place, end)])
        f = taught.last[place - 1 : end - 1]
        weights = torch.ones(len(config.branches), dtype=torch.float64)
        if compressor.gate is not None:
            logits = compressor.gate.weight @ taught.last[asked].mean(0) + compressor.gate.bias
            weights = logits.softmax(0) if config.mode == "weight" else (logits == logits.max()).double()
        if config.mode == "weight":
            parts = [by_hand(compressor, branch, x, f, draws) for branch in config.branches]
            blended = [sum(w * torch.stack(p[side]) for w, p in zip(weights, parts, strict=True)) for side in (0, 1)]
            made = list(zip(*blended, strict=True))
        else:
            taken = [branch for branch, w in zip(config.branches, weights, strict=True) if w]
            made = [row for b in taken for row in zip(*by_hand(compressor, b, x, f, draws), strict=True)]
            made = made if len(made) <= len(x) else list(zip(x, f, strict=True))
        rows += [(row, state, True) for row, state in made]
        place = end
    weights, h = drafter.state_dict(), torch.zeros(0)
    for token in [*path, None]:
        embeds, states, seen = (list(column) for column in zip(*rows, strict=True))
        stacked = Rows(
            torch.stack(embeds), torch.stack(states), torch.tensor(seen), torch.arange(1, len(rows) + 1)[None]
        )
        h = eagle(weights, stacked, drafter.spec, bypass=drafter.config.compressed_state == "none")
        if token is not None:
            rows.append((embedding[token], h[-1], False))
    return drafter.head.lm_head_weight @ h[-1]


VARIANTS = [(mode, "pooled") for mode in MODES] + [("concat", "none"), ("select", "none")]


@torch.no_grad()
@pytest.mark.parametrize(("mode", "state"), VARIANTS)
@pytest.mark.parametrize("number", [0, 2, 4])
def test_every_node_of_a_tree_scores_as_the_formula_along_its_path(
    mode: str, state: str, number: int, make: Callable[..., SpecVlmDrafter], samples: list[TeacherSample]
) -> None:
    drafter, taught = make(mode, state), samples[number]
    batch = TeacherBatch.collate([taught])
    start = letters(taught).rindex("ta") + 1
    proposer = NeuralProposer(drafter, TreeConfig(width=3, depth=4, nodes=12))
    shown = taught.visual[: int(taught.is_visual[:start].sum())]
    proposer.start(replace(committed_text(drafter, batch, 0, shown, start), capacity=len(taught.ids) + 12))
    draw = np.random.default_rng(0)
    for first, last in ((start, start + 1), (start + 1, start + 3)):
        proposer.commit(taught.ids[first:last], batch.last[0, first - 1 : last - 1])
        paths: list[list[int]] = [[]]
        for depth, parents in enumerate(([-1], [0, 0, 0], [0, 2, 0])):
            tokens = draw.integers(3, drafter.spec.vocab_size - 1, len(parents))
            if depth:
                paths = [[*paths[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
            else:
                tokens = np.array([int(taught.ids[last - 1])])
            logits = proposer.node_logits(tokens, np.array(parents), depth)
            expected = [logits_along(drafter, taught, last - 2, path) for path in paths]
            torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-9, atol=1e-9)
        proposer.drop_tree()


@torch.no_grad()
@pytest.mark.parametrize(("mode", "state"), VARIANTS)
def test_every_unrolled_row_scores_as_the_formula_along_its_chain(
    mode: str, state: str, make: Callable[..., SpecVlmDrafter], samples: list[TeacherSample]
) -> None:
    drafter, batch = make(mode, state), TeacherBatch.collate(samples)
    unrolled = unroll(drafter, batch, steps=3)
    logits, length = drafter.logits(unrolled.h_hat), batch.ids.shape[1]
    teachers = batch.last.flatten(0, 1)
    assert len(logits) > 40
    for row, step in enumerate(unrolled.step.tolist()):
        teacher = unrolled.teacher[unrolled.teacher_index[row]]
        (place,) = (teachers == teacher).all(-1).nonzero()[:, 0].tolist()
        taught, anchor = samples[place // length], place % length - step
        expected = logits_along(drafter, taught, anchor, taught.ids[anchor + 2 : anchor + 1 + step].tolist())
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mode", "state"), VARIANTS)
def test_training_and_decoding_agree(
    mode: str, state: str, make: Callable[..., SpecVlmDrafter], samples: list[TeacherSample]
) -> None:
    drafter = make(mode, state).float().train()
    drafter.head = drafter.head.to("cpu", torch.float32)
    assert parity_gate(drafter, TeacherBatch.collate(samples).to("cpu", torch.float32)) <= PARITY_TOLERANCE


def prompt(drafter: SpecVlmDrafter, spec: TargetSpec, parts: str, seed: int = 0, end: int | None = None):
    taught = sample(spec, seed, parts)
    return committed_text(drafter, TeacherBatch.collate([taught]), 0, taught.visual, end)


@torch.no_grad()
def test_the_question_decides(make: Callable[..., SpecVlmDrafter], spec: TargetSpec) -> None:
    """One gate row per branch; a question whose states point along it takes that branch, whatever the picture."""
    drafter = make(queries=3)
    gate = drafter.compressor.gate
    assert gate is not None
    gate.weight.copy_(torch.linalg.qr(torch.randn(spec.hidden_size, 5, dtype=torch.float64)).Q.T)
    gate.bias.zero_()
    lengths = {"prune": 3, "pool": 3, "conv": 6, "resampler": 3, "text_only": 0}
    for seed in range(2):
        committed = prompt(drafter, spec, "tppttt", seed)
        for number, branch in enumerate(BRANCHES):
            hidden = committed.hidden.clone()
            hidden[-3:] += 9 * gate.weight[number]
            context = drafter.context(replace(committed, hidden=hidden))
            chosen = {b: context.notes[f"gate_{b}"].tolist() for b in BRANCHES}
            assert chosen == {b: [float(b == branch)] for b in BRANCHES}
            assert context.notes["visual_rows"].tolist() == [lengths[branch]]
            assert int(context.is_visual.sum()) == lengths[branch]
            elsewhere = committed.hidden.clone()
            elsewhere[:-3] += 9 * gate.weight[number]
            same = [drafter.context(replace(committed, hidden=h)).notes for h in (committed.hidden, elsewhere)]
            assert all(torch.equal(same[0][f"gate_{b}"], same[1][f"gate_{b}"]) for b in BRANCHES)


@torch.no_grad()
def test_context_is_contiguous_and_maps_every_pair(make: Callable[..., SpecVlmDrafter], spec: TargetSpec) -> None:
    drafter = make("concat", queries=1)
    context = drafter.context(prompt(drafter, spec, "ttppttptt"))
    # 12 tokens: 3 + 3 + 6 + 1 rows are more than 12, so the picture stays; 6 tokens: 2 + 2 + 3 + 1 likewise.
    assert context.notes["visual_rows"].tolist() == [12, 6]
    drafter = make("conv")
    context = drafter.context(prompt(drafter, spec, "ttppttptt"))
    assert context.is_visual.tolist() == [False, *[True] * 6, *[False] * 2, *[True] * 3, *[False] * 2]
    assert context.positions.tolist() == [list(range(1, 15))]
    assert context.next_position == 15
    text, first, second = [0, 7, 8, 12, 13], [0] * 11 + [6], [8] * 5 + [11]
    assert context.place.tolist() == [text[0], *first, *text[1:3], *second, *text[3:]]


@torch.no_grad()
def test_without_pictures_it_is_eaglevlm(make: Callable[..., SpecVlmDrafter], spec: TargetSpec) -> None:
    drafter = make()
    plain = EagleVlmDrafter(spec, EagleVlmConfig(depth=4, rope="1d"), drafter.head).double()
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("compressor")})
    committed = prompt(drafter, spec, "ttttt")
    trees = []
    for one in (drafter, plain):
        proposer = NeuralProposer(one, TreeConfig(width=3, depth=3, nodes=12))
        proposer.start(replace(committed, capacity=40))
        proposer.commit(torch.tensor([7]), committed.hidden[-1:])
        trees.append(proposer.propose())
        assert proposer.notes == {}
    assert np.array_equal(trees[0].tokens, trees[1].tokens)
    assert np.array_equal(trees[0].log_probs, trees[1].log_probs)


@torch.no_grad()
def test_pruning_repeats_itself_but_for_training(make: Callable[..., SpecVlmDrafter], spec: TargetSpec) -> None:
    drafter = make("prune")
    committed = prompt(drafter, spec, "tppttptt")

    def drawn(seed: int) -> Tensor:
        return drafter.context(committed, torch.Generator().manual_seed(seed)).embeds

    still = drafter.context(committed).embeds
    assert torch.equal(still, drafter.context(committed).embeds)
    assert torch.equal(still, drawn(1)), "validation measures what decoding does"
    drafter.train()
    assert torch.equal(still, drafter.context(committed).embeds)
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_all_parts_learn_and_the_notes_reach_the_log(
    make: Callable[..., SpecVlmDrafter], samples: list[TeacherSample]
) -> None:
    batch = TeacherBatch.collate([samples[0], samples[2]])
    for mode in ("weight", "concat", "select"):
        drafter = make(mode, queries=1, pool_ratio=6, prune_ratio=6, conv_ratio=3, weight_ratio=3).train()
        moved: set[str] = set()
        for seed in range(12):
            drafter.zero_grad()
            unrolled = unroll(drafter, batch, steps=2, generator=torch.Generator().manual_seed(seed))
            unrolled.h_hat.square().sum().backward()
            moved |= {n for n, p in drafter.named_parameters() if p.grad is not None and bool(p.grad.any())}
            assert unrolled.notes["visual_tokens"].tolist() == [6, 12, 6]
            if mode != "concat":
                shares = torch.stack([unrolled.notes[f"gate_{b}"] for b in drafter.config.compression.branches])
                torch.testing.assert_close(shares.sum(0), torch.ones(3))
        assert moved == {n for n, _ in drafter.named_parameters()}, mode


def test_parameters_at_the_sizes_of_the_paper() -> None:
    """EAGLE's 0.24 billion at 7B, and a compressor whose convolution outweighs its parameter-free branches."""
    d = 4096
    spec = TargetSpec("llava", d, 11008, 32, 32, 32, 128, 32064, 1e-5, False, RopeSpec(1e4), 4096, (2,))
    with torch.device("meta"):
        head = TargetHead(torch.empty(8, d), torch.empty(8, d), torch.ones(d))
        drafter = SpecVlmDrafter(spec, SpecVlmConfig(), head)
        concat = SpecVlmDrafter(spec, SpecVlmConfig(compression=CompressionConfig(mode="concat")), head)
        weight = SpecVlmDrafter(spec, SpecVlmConfig(compression=CompressionConfig(mode="weight")), head)
    counts = drafter.trainable_parameters()
    conv, resampler = 3 * d * d + d, 4 * d * d + 2 * d + 2 * d
    assert counts["compressor"] == conv + resampler + 5 * (d + 1)
    assert concat.trainable_parameters()["compressor"] == conv + resampler
    assert weight.trainable_parameters()["compressor"] == conv + 3 * (d + 1)
    assert counts["total"] - counts["compressor"] == pytest.approx(0.24e9, rel=0.02)
    assert counts["total"] == pytest.approx(0.353e9, rel=0.01)


@pytest.fixture(scope="module")
def prompts(small_target, small_conversations):
    return [
        small_target.encode(replace(conversation, messages=conversation.messages[:1]))
        for conversation in small_conversations
        if conversation.key in ("image", "two", "text")
    ]


@pytest.mark.parametrize(("mode", "state"), VARIANTS)
def test_decoding_is_lossless_and_notes_what_it_compressed(mode: str, state: str, small_target, prompts) -> None:
    torch.manual_seed(0)
    compression = CompressionConfig(mode=mode)  # pyright: ignore
    config = SpecVlmConfig(depth=3, compression=compression, compressed_state=state)  # pyright: ignore
    drafter = SpecVlmDrafter(small_target.spec, config, small_target.head).eval()
    if drafter.compressor.gate is not None:
        torch.nn.init.normal_(drafter.compressor.gate.weight)
    proposer = NeuralProposer(drafter, TreeConfig(width=3, depth=3, nodes=9))
    for encoded in prompts:
        answer = generate_autoregressive(small_target, encoded, max_new_tokens=12, eos_ids=())
        trace = generate(small_target, proposer, encoded, max_new_tokens=12, eos_ids=())
        assert trace.tokens == answer.tokens
        assert GenerationTrace.from_json(trace.to_json()) == trace
        if not trace.visual_tokens:
            assert trace.notes == {}
            continue
        assert trace.notes["visual_tokens"] == trace.visual_tokens
        assert trace.notes["visual_rows"] <= trace.visual_tokens
        shares = [value for name, value in trace.notes.items() if name.startswith("gate_")]
        assert bool(shares) == compression.gated
        if shares:
            assert sum(shares) == pytest.approx(2 if encoded.key == "two" else 1)


@torch.no_grad()
def test_a_prompt_has_the_context_that_the_whole_conversation_teaches(small_target, small_conversations) -> None:
    """Two questions about one picture, then another picture: earlier answers in a prompt are no part of a question."""
    (conversation,) = (c for c in small_conversations if c.key == "turns")
    taught = small_target.teach([small_target.encode(conversation)], (1, 2))
    batch = TeacherBatch.collate(taught)
    torch.manual_seed(0)
    compression = CompressionConfig(mode="weight", weight_ratio=2)
    drafter = SpecVlmDrafter(small_target.spec, SpecVlmConfig(compression=compression), small_target.head).eval()
    torch.nn.init.normal_(drafter.compressor.gate.weight)  # pyright: ignore
    whole = drafter.context(committed_text(drafter, batch, 0, taught[0].visual))
    for turns, pictures in ((1, 1), (3, 1), (5, 2)):
        asked = replace(conversation, messages=conversation.messages[:turns], images=conversation.images[:pictures])
        encoded = small_target.encode(asked)
        assert torch.equal(encoded.ids, taught[0].ids[: len(encoded.ids)])
        _, prefill = small_target.prefill(encoded, 4)
        context = drafter.context(prefill)
        rows = len(context.embeds)
        torch.testing.assert_close(context.embeds, whole.embeds[:rows], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(context.states, whole.states[:rows], rtol=1e-4, atol=1e-4)
        for name, figures in context.notes.items():
            torch.testing.assert_close(figures, whole.notes[name][:pictures], rtol=1e-4, atol=1e-5)


def test_checkpoints_keep_ratios_changeable_and_modes_fixed(
    tmp_path, make: Callable[..., SpecVlmDrafter], spec: TargetSpec
) -> None:
    drafter = make("select").float()
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, drafter.head, spec, {"compression": {"pool_ratio": 3, "seed": 4}})
    assert loaded.config.compression == replace(drafter.config.compression, pool_ratio=3, seed=4)
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in loaded.state_dict().items())
    for other in ({"mode": "weight"}, {"conv_ratio": 7}, {"queries": 9}):
        with pytest.raises(CheckpointError, match="does not fit"):
            load_drafter(tmp_path, drafter.head, spec, {"compression": other})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope": "target"}, "drafter.rope=1d"),
        ({"compressed_state": "mean"}, "compressed_state is 'mean'"),
        ({"depth": 0}, "drafter.depth"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpecVlmConfig(**changes)
