"""DREAM's drafter against its description in plain torch, and what makes it DREAM's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.drafters.blocks import CrossAttentionBlock
from fovea.drafters.dream import DreamConfig, DreamDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import build_drafter
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from tests.drafters.reference import (
    SPEC,
    TREE,
    Plain,
    Row,
    attended,
    check_parity,
    check_tree,
    check_unroll,
    enlarged,
    make_head,
    make_sample,
    prefill_of,
    rms,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "all visual tokens": {"visual_keep": 1.0},
    "one of each picture": {"visual_keep": 0.01},
    "the target's positions": {"rope": "target"},
    "three blocks": {"num_blocks": 3},
    "one block": {"num_blocks": 1},
}
SAMPLES = [
    make_sample(1, "tptt" + "a" * 6 + "ttt" + "a" * 3 + "tt"),
    make_sample(2, "ttt" + "aaaa" + "t" + "aa"),
    make_sample(3, "tpqtt" + "a" * 5),
    make_sample(4, "tqtaaatptaaaa"),
    make_sample(5, "ptaaat"),
]


def make_drafter(**changes: Any) -> DreamDrafter:
    torch.manual_seed(0)
    drafter = enlarged(DreamDrafter(SPEC, DreamConfig(**{"depth": 4, **changes}), make_head()))
    assert isinstance(drafter, DreamDrafter)
    return drafter


class PlainDream(Plain):
    def committed(self, prefill: Prefill) -> tuple[list[Row], int, Any]:
        """Of each picture floor(share n) tokens, those of highest importance; a state is that of the token before."""
        kept, seen = [], 0
        assert prefill.importance is not None
        importance = prefill.importance().tolist()
        visual = prefill.is_visual.tolist()
        token = 0
        while token < len(visual):
            end = token + 1
            if visual[token]:
                while end < len(visual) and visual[end]:
                    end += 1
                count = max(1, int((end - token) * self.drafter.config.visual_keep))
                own = importance[seen : seen + end - token]
                best = sorted(range(end - token), key=lambda i, own=own: (-own[i], i))[:count]
                kept += sorted(token + i for i in best)
                seen += end - token
            else:
                kept.append(token)
            token = end
        if self.drafter.config.rope == "1d":
            positions, following = [[place] for place in range(len(kept))], len(kept)
        else:
            positions = [prefill.positions[:, token].tolist() for token in kept]
            following = int(prefill.positions.max()) + 1
        rows = [
            Row(prefill.embeds[token], prefill.hidden[before], position)
            for before, token, position in zip(kept, kept[1:], positions[1:], strict=False)
        ]
        return rows, following, None

    def run(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        x = torch.stack([row.embed for row in rows])
        x = self.block("blocks.0", x, rows, input_norm=False)
        x = mid = self.cross(x, torch.stack([row.state for row in rows]))
        for layer in range(1, self.drafter.config.num_blocks):
            x = self.block(f"blocks.{layer}", x, rows, input_norm=True)
        return rms(x, self.weights["norm.weight"], self.spec)[-1], mid[-1]

    def cross(self, x: Tensor, states: Tensor) -> Tensor:
        w, spec = self.weights, self.spec
        read = rms(x, w["cross.input_norm.weight"], spec)
        q = self.linear("cross.q_proj", read).unflatten(-1, (spec.num_heads, -1))
        k, v = self.linear("cross.kv_proj", states).unflatten(-1, (2, spec.num_kv_heads, -1)).unbind(1)
        q, k = rms(q, w["cross.q_norm.weight"], spec), rms(k, w["cross.k_norm.weight"], spec)
        x = x + w["cross.attention_gate"].tanh() * self.linear("cross.o_proj", attended(q, k, v))
        return x + w["cross.mlp_gate"].tanh() * self.mlp("cross.mlp", rms(x, w["cross.mlp_norm.weight"], spec))


@pytest.mark.parametrize("parts", ["tttptqtttt", "tpqt", "ttttt", "tptaaatqtt", "pt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_scores_as_a_plain_run_over_its_path(variant: str, parts: str) -> None:
    """Among others: siblings are isolated in the cross-attention too."""
    drafter = make_drafter(**VARIANTS[variant])
    check_tree(drafter, PlainDream(drafter), make_sample(7, parts))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_taught_row_is_a_plain_run_over_its_chain(variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    check_unroll(drafter, PlainDream(drafter), SAMPLES, steps=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_decoding_agree(variant: str) -> None:
    check_parity(make_drafter(**VARIANTS[variant]), SAMPLES)


@pytest.mark.parametrize("leaks", [False, True])
def test_siblings_are_isolated_in_the_cross_attention_too(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sibling changes nothing for a node and its children; with the leak of the published code it would."""
    drafter = make_drafter()
    attend = NeuralProposer._attend_to_cache

    def without_mask(self: NeuralProposer, layer: int, *heads: Tensor) -> Tensor:
        if leaks and layer == drafter.cross.layer:
            self._mask = None
        return attend(self, layer, *heads)

    monkeypatch.setattr(NeuralProposer, "_attend_to_cache", without_mask)
    prefill = prefill_of(make_sample(3, "ttptqt"), drafter.head)
    # The root has two children, and the first of them two.
    passes = [
        (np.array([3]), np.array([-1])),
        (np.array([5, 9]), np.array([0, 0])),
        (np.array([7, 8]), np.array([0, 0])),
    ]
    found = []
    for sibling in (9, 33):
        passes[1][0][1] = sibling
        proposer = NeuralProposer(drafter, TREE)
        proposer.start(prefill)
        proposer.commit(torch.tensor([3]), prefill.hidden[-1:])
        found.append([proposer.node_logits(*nodes, depth) for depth, nodes in enumerate(passes)])
    (_, first, children), (_, other, others) = found
    assert torch.equal(first[1], other[1]) is False
    assert torch.allclose(first[0], other[0]) is not leaks
    assert torch.allclose(children, others) is not leaks


@torch.no_grad()
def test_mid_supervision_is_on_the_cross_attention_and_spares_what_is_behind_it() -> None:
    drafter, rows = make_drafter(), 6
    embeds, states = torch.randn(2, 1, rows, SPEC.hidden_size, dtype=torch.float64)
    rotation = drafter.rotary(torch.arange(rows)[None], torch.float64)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    mid = drafter(embeds, states, rotation, attend)[1]
    assert torch.equal(mid, drafter.cross(drafter.blocks[0](embeds, rotation, attend), states, attend))
    with torch.enable_grad():
        reached = torch.autograd.grad(
            drafter(embeds, states, rotation, attend)[1].sum(), list(drafter.parameters()), allow_unused=True
        )
    names = [name for name, _ in drafter.named_parameters()]
    used = {name for name, gradient in zip(names, reached, strict=True) if gradient is not None}
    assert used == {name for name in names if name.startswith(("blocks.0", "cross"))}


def test_unknown_importance_is_refused_by_name_unless_it_is_not_needed() -> None:
    sample, head = make_sample(1, "tptt"), make_head()
    unknown = replace(prefill_of(sample, head), importance=None)
    with pytest.raises(ValueError, match=r"drafter\.visual_keep is 0\.75.*visual_keep=1"):
        make_drafter().context(unknown)
    assert len(make_drafter(visual_keep=1.0).context(unknown).embeds) == len(sample.ids) - 1
    text = replace(prefill_of(make_sample(2, "tttt"), head), importance=None)
    assert len(make_drafter().context(text).embeds) == 3
    with pytest.raises(ValueError, match=r"drafter\.visual_keep is 0"):
        DreamConfig(visual_keep=0)


@pytest.mark.parametrize(
    ("spec", "millions"),
    [
        # LLaVA-NeXT on Vicuna-7B: the figure of the published weights.
        (("llava", 4096, 11008, 32, 32, 32, False), 607.2),
        (("qwen2_5_vl", 3584, 18944, 28, 28, 4, True), 699.2),
    ],
)
def test_parameters_at_the_papers_sizes(spec: tuple, millions: float) -> None:
    architecture, width, mlp, layers, heads, kv_heads, biased = spec
    numbers = TargetSpec(
        architecture=architecture,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=8,
        rms_norm_eps=1e-6,
        qkv_bias=biased,
        rope=RopeSpec(10_000.0),
        max_positions=4096,
        eos_ids=(2,),
    )
    with torch.device("meta"):
        head = TargetHead(torch.empty(8, width), torch.empty(8, width), torch.empty(width))
        drafter = build_drafter("dream", numbers, DreamConfig(), head)
    counts = drafter.trainable_parameters()
    assert counts["total"] / 1e6 == pytest.approx(millions, abs=0.05)
    assert set(counts) == {"blocks", "cross", "norm", "total"}
    assert isinstance(drafter.get_submodule("cross"), CrossAttentionBlock)
