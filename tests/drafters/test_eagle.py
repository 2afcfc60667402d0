"""EAGLE's line of drafters: equal to their formulas in training and decoding, of published size, with their traits."""

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
from fovea.drafters.base import Drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import drafter_type
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample, supervised_positions
from fovea.training.gates import PARITY_TOLERANCE, parity_gate
from fovea.training.unroll import committed_text, unroll
from tests.drafters.plain import PLAIN, sample

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eaglevlm": ("eaglevlm", {}),
    "eagle2": ("eaglevlm", {"input_norm": False, "rope": "1d"}),
    "msd": ("msd", {}),
    "msd for llava": ("msd", {"input_norm": False, "rope": "target"}),
    "eagle3": ("eagle3", {"feature_layers": (4, 1, 2), "draft_vocabulary": 24}),
    "eagle3 of two layers": ("eagle3", {"draft_vocabulary": None}),
}
SHAPES = ("tptt" + "a" * 7 + "ttt" + "a" * 3, "ttt" + "a" * 4, "tpptt" + "a" * 5, "tpt" + "aaa" + "tpt" + "aaaa")


def enlarged(drafter: Drafter, spec: TargetSpec) -> Drafter:
    """``drafter`` with some vocabulary, biases and norms away from 0 and 1, and attention that discriminates."""
    draw = torch.Generator().manual_seed(1)
    drafter.choose_vocabulary(torch.rand(spec.vocab_size, generator=draw))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.5 * torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight.dtype))
            elif name.endswith("qkv_proj.weight"):
                weight.mul_(2)
    return drafter.eval()


@pytest.fixture
def make(spec: TargetSpec, head: TargetHead) -> Callable[[str], Drafter]:
    """Float64 drafters by name of their variant."""

    def make(variant: str) -> Drafter:
        name, changes = VARIANTS[variant]
        torch.manual_seed(0)
        kind = drafter_type(name)
        drafter = kind(spec, kind.config_type(depth=4, **changes), head.to("cpu", torch.float64)).double()
        return enlarged(drafter, spec)

    return make


@pytest.fixture
def samples(spec: TargetSpec) -> list[TeacherSample]:
    return [sample(spec, seed, parts) for seed, parts in enumerate(SHAPES)]


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_of_a_tree_scores_as_the_formula_along_its_path(
    variant: str, make: Callable[[str], Drafter], samples: list[TeacherSample]
) -> None:
    drafter, taught = make(variant), samples[0]
    plain, batch = PLAIN[drafter.name], TeacherBatch.collate(samples[:1])
    start = int(taught.answer_mask.nonzero()[0])
    proposer = NeuralProposer(drafter, TreeConfig(width=3, depth=4, nodes=12))
    proposer.start(replace(committed_text(drafter, batch, 0, taught.visual, start), capacity=64))
    draw = np.random.default_rng(0)
    for first, last in ((start, start + 1), (start + 1, start + 4), (start + 4, start + 5)):
        read = batch.read(drafter.feature_layers)[0, first - 1 : last - 1]
        proposer.commit(taught.ids[first:last], read)
        paths: list[list[int]] = [[]]
        for depth, parents in enumerate(([-1], [0, 0, 0], [0, 2, 0], [1, 1, 2])):
            tokens = draw.integers(3, drafter.spec.vocab_size - 1, len(parents))
            if depth:
                paths = [[*paths[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
            else:
                tokens = np.array([int(taught.ids[last - 1])])
            logits = proposer.node_logits(tokens, np.array(parents), depth)
            expected = [plain.logits_along(drafter, taught, last - 2, path) for path in paths]
            torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-9, atol=1e-9)
        proposer.drop_tree()


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_unrolled_row_scores_as_the_formula_along_its_chain(
    variant: str, make: Callable[[str], Drafter], samples: list[TeacherSample]
) -> None:
    drafter, plain = make(variant), PLAIN[make(variant).name]
    unrolled = unroll(drafter, TeacherBatch.collate(samples), steps=4)
    logits, compared = drafter.logits(unrolled.h_hat), 0
    length = max(len(taught.ids) for taught in samples)
    teachers = TeacherBatch.collate(samples).last.flatten(0, 1)
    for row, step in enumerate(unrolled.step.tolist()):
        teacher = unrolled.teacher[unrolled.teacher_index[row]]
        (place,) = (teachers == teacher).all(-1).nonzero()[:, 0].tolist()
        taught, anchor = samples[place // length], place % length - step
        path = taught.ids[anchor + 2 : anchor + 1 + step].tolist()
        expected = plain.logits_along(drafter, taught, anchor, path)
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)
        compared += 1
    longest = sum(int(supervised_positions(taught.answer_mask).sum()) for taught in samples)
    assert compared > longest


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_decoding_agree(
    variant: str, make: Callable[[str], Drafter], samples: list[TeacherSample]
) -> None:
    drafter = make(variant).float()
    drafter.head = drafter.head.to("cpu", torch.float32)
    batch = TeacherBatch.collate(samples).to("cpu", torch.float32)
    assert 0 < parity_gate(drafter, batch) < PARITY_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_drafters_are_lossless(variant: str, small_target, small_conversations) -> None:
    name, changes = VARIANTS[variant]
    torch.manual_seed(0)
    kind = drafter_type(name)
    spec = small_target.spec
    drafter = enlarged(kind(spec, kind.config_type(depth=3, **changes), small_target.head), spec)
    rounds = []
    for conversation in (c for c in small_conversations if c.key in ("image", "two", "text")):
        encoded = small_target.encode(replace(conversation, messages=conversation.messages[:1]))
        baseline = generate_autoregressive(small_target, encoded, max_new_tokens=24, eos_ids=())
        for tree in (TreeConfig(width=8, depth=2, nodes=60), TreeConfig(width=1, depth=3, nodes=5)):
            trace = generate(small_target, NeuralProposer(drafter, tree), encoded, max_new_tokens=24, eos_ids=())
            assert trace.tokens == baseline.tokens
            rounds += [r.accepted for r in trace.rounds]
    assert any(rounds), "not one draft was accepted: nothing was committed out of a tree"


def size(hidden: int, mlp: int, heads: int, kv_heads: int, *, bias: bool, vocabulary: int, layers: int) -> TargetSpec:
    return TargetSpec(
        "any", hidden, mlp, layers, heads, kv_heads, 128, vocabulary, 1e-5, bias, RopeSpec(1e4), 4096, (2,)
    )


LLAVA_7B = size(4096, 11008, 32, 32, bias=False, vocabulary=32064, layers=32)
LLAVA_13B = size(5120, 13824, 40, 40, bias=False, vocabulary=32064, layers=40)
QWEN_7B = size(3584, 18944, 28, 4, bias=True, vocabulary=152064, layers=28)


@pytest.mark.parametrize(
    ("name", "of", "billions"),
    [
        ("eaglevlm", LLAVA_7B, 0.24),
        ("eaglevlm", LLAVA_13B, 0.37),
        ("eaglevlm", QWEN_7B, 0.26),
        ("msd", LLAVA_7B, 0.24),
        ("msd", LLAVA_13B, 0.37),
        ("msd", QWEN_7B, 0.26),
        # Fusion 3 d^2, attention that reads 2 d, MLP, a head of 32,000 tokens; its paper gives no number.
        ("eagle3", LLAVA_7B, 0.43),
        ("eagle3", QWEN_7B, 0.40),
    ],
)
def test_drafters_have_the_papers_sizes(name: str, of: TargetSpec, billions: float) -> None:
    with torch.device("meta"):
        matrix = torch.empty(of.vocab_size, of.hidden_size)
        kind = drafter_type(name)
        drafter = kind(of, kind.config_type(), TargetHead(matrix, matrix, torch.empty(of.hidden_size)))
    assert round(drafter.trainable_parameters()["total"] / 1e9, 2) == billions


def alone(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return values.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def outputs(drafter: Drafter, embeds: Tensor, states: Tensor, is_visual: Tensor | None = None) -> Tensor:
    rotation = drafter.rotary.text(0, embeds.shape[1], torch.float64, torch.device("cpu"))
    return drafter(embeds, states, rotation, alone, is_visual=is_visual)[0]


@torch.no_grad()
def test_the_input_norm_bounds_what_attention_reads(make: Callable[[str], Drafter]) -> None:
    """A state a thousand times as large moves the attention of EAGLE-2 alone."""
    embeds, states = torch.randn(2, 1, 3, 32, dtype=torch.float64)
    for variant, bounded in (("eaglevlm", True), ("eagle2", False)):
        drafter = make(variant)
        read: list[Tensor] = []
        hook = drafter.blocks[0].qkv_proj.register_forward_pre_hook(lambda _, inputs, read=read: read.append(inputs[0]))  # pyright: ignore
        for scale in (1.0, 1000.0):
            outputs(drafter, embeds, scale * states)
        hook.remove()
        growth = (read[1].norm() / read[0].norm()).item()
        assert growth < 2 if bounded else growth > 100
    assert not any("input_norm" in name for name, _ in make("eagle2").named_parameters())


@torch.no_grad()
def test_image_positions_bypass_the_fusion_of_msd_alone(make: Callable[[str], Drafter]) -> None:
    embeds, states, others = torch.randn(3, 1, 4, 32, dtype=torch.float64)
    is_visual = torch.tensor([[False, True, True, False]])
    for variant, bypasses in (("msd", True), ("eaglevlm", False)):
        drafter = make(variant)
        moved = (outputs(drafter, embeds, states, is_visual) != outputs(drafter, embeds, others, is_visual)).any(-1)
        assert moved.tolist() == ([[True, False, False, True]] if bypasses else [[True] * 4])
        before = outputs(drafter, embeds, states, is_visual)
        drafter.fc.weight.zero_()  # pyright: ignore
        moved = (outputs(drafter, embeds, states, is_visual) != before).any(-1)
        assert moved.tolist() == ([[True, False, False, True]] if bypasses else [[True] * 4])
        # Draft nodes are text.
        assert torch.equal(outputs(drafter, embeds, states), outputs(drafter, embeds, states, is_visual & False))


@torch.no_grad()
def test_eagle3_reads_each_of_its_layers_and_nothing_else_of_the_target(
    make: Callable[[str], Drafter], samples: list[TeacherSample]
) -> None:
    drafter, taught = make("eagle3"), samples[0]
    width = taught.last.shape[1]

    def rows(drafter: Drafter, **changes: Tensor) -> Tensor:
        return unroll(drafter, TeacherBatch.collate([replace(taught, **changes)]), steps=3).h_hat

    def moved(place: int) -> Tensor:
        assert taught.features is not None
        features = taught.features.clone()
        features[:, width * place : width * (place + 1)] += 0.1
        return features

    before = rows(drafter)
    for place in range(3):
        assert (rows(drafter, features=moved(place)) != before).all(-1).all()
    assert torch.equal(rows(drafter, last=torch.randn_like(taught.last)), before)
    # A drafter of layers 1 and 2 picks them out of samples that hold 4, 1 and 2.
    fewer = make("eagle3 of two layers")
    assert fewer.feature_layers == (1, 2)
    before = rows(fewer)
    assert [torch.equal(rows(fewer, features=moved(place)), before) for place in range(3)] == [True, False, False]


def test_eagle3_fuses_true_states_once_and_trains_a_head_of_its_own(
    make: Callable[[str], Drafter], samples: list[TeacherSample]
) -> None:
    drafter, batch = make("eagle3"), TeacherBatch.collate(samples)
    fused: list[int] = []
    drafter.fc.register_forward_hook(lambda module, inputs, output: fused.append(1))  # pyright: ignore
    unrolled = unroll(drafter, batch, steps=4)
    assert len(fused) == len(samples)
    drafter.choose_vocabulary(torch.arange(drafter.spec.vocab_size))
    ids, own = drafter.token_ids, drafter.own_head
    assert ids is not None
    assert own is not None
    assert ids.tolist() == [*drafter.spec.eos_ids, *range(38, 61)]
    assert torch.equal(own, drafter.head.lm_head_weight[ids])
    names = {name for name, part in drafter.named_parameters() if part.requires_grad}
    drafter.logits(unrolled.h_hat).square().sum().backward()
    assert {name for name, part in drafter.named_parameters() if part.grad is not None and part.grad.any()} == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_layers": (1, 5)}, r"feature_layers=\[1, 5\] does not fit a target of 4 layers"),
        ({"feature_layers": (1, 1)}, r"feature_layers=\[1, 1\] does not fit"),
        ({"feature_layers": ()}, r"drafter\.feature_layers is empty"),
        ({"draft_vocabulary": 62}, r"drafter\.draft_vocabulary is 62; choose 2 .* to 61"),
    ],
)
def test_eagle3_refuses_layers_and_vocabularies_that_the_target_has_not(
    changes: dict, message: str, spec: TargetSpec, head: TargetHead
) -> None:
    kind = drafter_type("eagle3")
    with pytest.raises(ValueError, match=message):
        kind(spec, kind.config_type(**{"draft_vocabulary": 20, **changes}), head)


def test_samples_without_the_layers_are_refused(make: Callable[[str], Drafter], samples: list[TeacherSample]) -> None:
    drafter = make("eagle3")
    for kept in ({"features": None, "feature_layers": ()}, {"feature_layers": (4, 1, 3)}):
        batch = TeacherBatch.collate([replace(taught, **kept) for taught in samples])
        with pytest.raises(ValueError, match=r"reads the outputs of layers \[4, 1, 2\] and the samples hold those of"):
            unroll(drafter, batch, steps=2)


def test_states_are_noisy_in_training_alone(make: Callable[[str], Drafter], samples: list[TeacherSample]) -> None:
    drafter, batch = make("eaglevlm"), TeacherBatch.collate(samples)

    def rows(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        unrolled = unroll(drafter, batch, steps=1, generator=generator)
        teachers = batch.last.flatten(0, 1)
        assert all((teachers == teacher).all(-1).any() for teacher in unrolled.teacher)
        return unrolled.h_hat

    clean = rows(0)
    drafter.train()
    noisy, again, other = rows(0), rows(0), rows(1)
    assert torch.equal(rows(None), clean)
    assert torch.equal(noisy, again)
    assert not torch.equal(noisy, other)
    assert (noisy - clean).abs().max() > 0
