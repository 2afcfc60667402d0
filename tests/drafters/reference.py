"""Drafters over again: plain torch in float64, one text at a time, no cache and no tree, every mask written out.

A text is a list of :class:`Row`; a plain drafter says how the rows of committed text come about and what they compute.
``check_tree`` and ``check_unroll`` hold the real drafter against it, node by node and row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.decoding.growth import TreeConfig
from fovea.drafters.base import Drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample, supervised_positions
from fovea.training.gates import PARITY_TOLERANCE, parity_gate
from fovea.training.unroll import unroll

TREE = TreeConfig(width=3, depth=3, nodes=16)
PICTURES = {"p": (2, 3), "q": (2, 2)}
SPEC = TargetSpec(
    architecture="qwen2_5_vl",
    hidden_size=24,
    intermediate_size=40,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    rope=RopeSpec(10_000.0, (1, 1, 2)),
    max_positions=512,
    eos_ids=(2,),
    placeholder_ids=(60,),
)


@dataclass(frozen=True)
class Row:
    """What one row reads: an embedding [D] and a state [D] at a position [A], and whatever else a drafter has."""

    embed: Tensor
    state: Tensor
    position: list[int]
    extra: Any = None


class Plain:
    """A drafter over again; subclasses write :meth:`committed` and :meth:`run` down from the method's description."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.spec = drafter, drafter.spec
        self.weights = {name: weight.detach().double() for name, weight in drafter.state_dict().items()}
        self.embedding = drafter.head.embedding.double()
        self.lm_head = drafter.head.lm_head_weight.double()

    def committed(self, prefill: Prefill) -> tuple[list[Row], int, Any]:
        """Rows of the committed text, the position of the next token, and the ``extra`` of all rows behind."""
        raise NotImplementedError

    def run(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """LM-head input and mid state [D] of the last row."""
        raise NotImplementedError

    def plain_positions(self, prefill: Prefill) -> Tensor:
        length = len(prefill.ids)
        return torch.arange(length)[None] if self.drafter.config.rope == "1d" else prefill.positions

    def along(self, rows: list[Row], position: int, extra: Any, path: list[int]) -> list[tuple[Tensor, Tensor]]:
        """LM-head inputs and mid states at depths 0, 1, ... when ``path`` is drafted below the last of ``rows``."""
        axes = len(rows[0].position)
        out = [self.run(rows)]
        for depth, token in enumerate(path):
            rows = [*rows, Row(self.embedding[token], out[-1][0], [position + depth] * axes, extra)]
            out.append(self.run(rows))
        return out

    # -- pieces ---------------------------------------------------------------------------------------------------

    def block(self, name: str, x: Tensor, rows: list[Row], *, input_norm: bool, kv_heads: int | None = None) -> Tensor:
        """A Llama or Qwen block over all rows [n, D]."""
        w, spec = self.weights, self.spec
        kv_heads = kv_heads or spec.num_kv_heads
        read = rms(x, w[f"{name}.input_norm.weight"], spec) if input_norm else x
        qkv = read @ w[f"{name}.qkv_proj.weight"].T + w[f"{name}.qkv_proj.bias"]
        widths = (spec.num_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.head_dim)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in qkv.split(widths, dim=-1))
        rope = spec.rope if len(rows[0].position) > 1 else RopeSpec(spec.rope.theta)
        q, k = (rotated(heads, [row.position for row in rows], rope) for heads in (q, k))
        x = x + attended(q, k, v) @ w[f"{name}.o_proj.weight"].T
        return x + self.mlp(f"{name}.mlp", rms(x, w[f"{name}.mlp_norm.weight"], spec))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = (x @ self.weights[f"{name}.gate_up_proj.weight"].T).chunk(2, -1)
        return (gate * gate.sigmoid() * up) @ self.weights[f"{name}.down_proj.weight"].T

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)


def rms(x: Tensor, weight: Tensor, spec: TargetSpec) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight


def rotated(heads: Tensor, positions: list[list[int]], rope: RopeSpec) -> Tensor:
    """``heads`` [n, H, E], each pair (i, i + E / 2) turned by the angle of its axis."""
    half = heads.shape[-1] // 2
    axes = [axis for axis, count in enumerate(rope.mrope_section or (half,)) for _ in range(count)]
    angles = torch.tensor(
        [[at[axes[i]] * rope.theta ** (-i / half) for i in range(half)] for at in positions], dtype=torch.float64
    )[:, None]
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """[n, Q E] attention of ``q`` [n, Q, E] to ``k``, ``v`` [m, H, E]; row i sees rows up to i, or ``seen`` [n, m]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("nqe,mqe->qnm", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril() if seen is None else seen
    return torch.einsum("qnm,mqe->nqe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


def make_head() -> TargetHead:
    draw = torch.Generator().manual_seed(1)
    embedding, lm_head = torch.randn(2, SPEC.vocab_size, SPEC.hidden_size, generator=draw, dtype=torch.float64)
    return TargetHead(embedding, lm_head, 1 + 0.3 * torch.randn(SPEC.hidden_size, generator=draw, dtype=torch.float64))


def enlarged(drafter: Drafter) -> Drafter:
    """``drafter`` in float64, with weights that let a wrong row, mask or position show."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in drafter.double().named_parameters():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            if weight.ndim > 1:
                weight.copy_(noise * (2.0 if "qkv" in name else 1.0) / weight[0].numel() ** 0.5)
            else:
                weight.copy_((1.0 if "norm" in name else 0.0) + 0.5 * noise)
    return drafter.eval()


def make_sample(seed: int, parts: str) -> TeacherSample:
    """``parts``: t a text token, a an answer token, p and q pictures; with the target's M-RoPE positions."""
    draw = torch.Generator().manual_seed(seed)
    columns: list[list[int]] = []
    kinds = ""
    for part in parts:
        start = max((max(column) for column in columns), default=-1) + 1
        rows, width = PICTURES.get(part, (1, 1))
        columns += [[start, start + y, start + x] for y in range(rows) for x in range(width)]
        kinds += part * (rows * width)
    is_visual = torch.tensor([kind in PICTURES for kind in kinds])
    answer_mask = torch.tensor([kind == "a" for kind in kinds])
    ids = torch.randint(3, 60, (len(kinds),), generator=draw).masked_fill(is_visual, 60)

    def states(rows: int) -> Tensor:
        return torch.randn(rows, SPEC.hidden_size, generator=draw, dtype=torch.float64)

    return TeacherSample(
        key=f"{parts} {seed}",
        ids=ids,
        positions=torch.tensor(columns).T,
        answer_mask=answer_mask,
        is_visual=is_visual,
        last=states(len(kinds)),
        mid=states(int(supervised_positions(answer_mask).sum())),
        visual=states(int(is_visual.sum())),
        importance=torch.rand(int(is_visual.sum()), generator=draw),
    )


def prefill_of(sample: TeacherSample, head: TargetHead, end: int | None = None) -> Prefill:
    """The first ``end`` tokens of ``sample`` as a prompt."""
    end = len(sample.ids) if end is None else end
    seen = int(sample.is_visual[:end].sum())
    embeds = head.embedding[sample.ids[:end]].clone()
    embeds[sample.is_visual[:end]] = sample.visual[:seen]
    assert sample.importance is not None
    importance = sample.importance[:seen]
    return Prefill(
        ids=sample.ids[:end],
        positions=sample.positions[:, :end],
        embeds=embeds,
        hidden=sample.last[:end],
        visual=sample.visual[:seen],
        is_visual=sample.is_visual[:end],
        capacity=128,
        importance=lambda: importance,
    )


@torch.no_grad()
def check_tree(drafter: Drafter, plain: Plain, sample: TeacherSample) -> None:
    """Every node of the trees of several rounds scores as a plain run over the committed text and its path alone."""
    prefill = prefill_of(sample, drafter.head)
    rows, position, extra = plain.committed(prefill)
    axes = len(plain.plain_positions(prefill))
    proposer, draw = NeuralProposer(drafter, TREE), torch.Generator().manual_seed(9)
    proposer.start(prefill)
    states = prefill.hidden[-1:]
    for count in (1, 3, 1, 2):
        tokens = torch.randint(3, 60, (count,), generator=draw)
        if states is None:
            states = torch.randn(count, SPEC.hidden_size, generator=draw, dtype=torch.float64)
        proposer.commit(tokens, states)
        for token, state in zip(tokens, states, strict=True):
            rows.append(Row(plain.embedding[token], state, [position] * axes, extra))
            position += 1
        states = None
        tree = proposer.propose()
        paths: list[list[int]] = [[]]
        for row in range(1, len(tree)):
            path = paths[tree.parents[row]]
            log_probs = (plain.along(rows, position, extra, path)[-1][0] @ plain.lm_head.T).log_softmax(-1)
            step = tree.log_probs[row] - tree.log_probs[tree.parents[row]]
            assert step == pytest.approx(log_probs[tree.tokens[row]].item(), abs=1e-4)
            paths.append([*path, int(tree.tokens[row])])
        assert max(map(len, paths)) == TREE.depth + 1
        # A node's siblings must not be the same token everywhere, or a leak between them would not show.
        assert len({tuple(path) for path in paths}) == len(paths)


def check_unroll(drafter: Drafter, plain: Plain, samples: list[TeacherSample], steps: int) -> None:
    """Every supervised row of a padded batch is a plain run over the text before its anchor and its own chain."""
    batch = TeacherBatch.collate(samples)
    unrolled = unroll(drafter, batch, steps=steps)
    flat, length = batch.last.flatten(0, 1), batch.ids.shape[1]
    found = 0
    for row in range(len(unrolled.step)):
        teacher = unrolled.teacher[unrolled.teacher_index[row]]
        (place,) = (flat == teacher).all(-1).nonzero()[:, 0].tolist()
        step = int(unrolled.step[row])
        sample, anchor = samples[place // length], place % length - step
        rows, position, extra = plain.committed(prefill_of(sample, drafter.head, anchor + 1))
        axes = sample.positions.shape[0] if drafter.config.rope == "target" else 1
        root = Row(plain.embedding[sample.ids[anchor + 1]], sample.last[anchor], [position] * axes, extra)
        path = sample.ids[anchor + 2 : anchor + 1 + step].tolist()
        hat, mid = plain.along([*rows, root], position + 1, extra, path)[-1]
        torch.testing.assert_close(unrolled.h_hat[row], hat, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(unrolled.h_mid[row], mid, rtol=1e-5, atol=1e-5)
        found += 1
    assert found == sum(_rows_of(sample, steps) for sample in samples) > 0


def _rows_of(sample: TeacherSample, steps: int) -> int:
    """Supervised rows: an answer of n tokens has n - s of step s."""
    answers = "".join("a" if answered else " " for answered in sample.answer_mask.tolist()).split()
    return sum(max(0, len(answer) - step) for answer in answers for step in range(1, steps + 1))


def check_parity(drafter: Drafter, samples: list[TeacherSample]) -> None:
    """The gate that runs before training."""
    half = TeacherBatch.collate(samples).to("cpu", torch.float32)
    single = drafter.float()
    single.head = drafter.head.to("cpu", torch.float32)
    assert 0 < parity_gate(single, half) < PARITY_TOLERANCE
