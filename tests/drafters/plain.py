"""Drafters of EAGLE's line as their papers write them: plain torch over the whole text, no cache, explicit masks.

A *path* is the tokens of a branch below the root of a draft tree. Everything is computed anew for each one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.drafters.base import Drafter
from fovea.targets.base import TargetSpec
from fovea.targets.teacher_batch import TeacherSample, supervised_positions


def rms(x: Tensor, weight: Tensor, spec: TargetSpec) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight


def rotated(heads: Tensor, positions: Tensor, spec: TargetSpec) -> Tensor:
    """``heads`` [Q, n, E] at ``positions`` [A, n]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves of the width.

    Angles are float32, as in transformers.
    """
    half = spec.head_dim // 2
    frequencies = 1.0 / spec.rope.theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    axis = [a for a, width in enumerate(spec.rope.mrope_section or ()) for _ in range(width)]
    axis = axis if len(positions) > 1 else [0] * half
    angles = torch.stack([positions[a].float() * frequencies[i] for i, a in enumerate(axis)], dim=-1)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(weights: dict[str, Tensor], read: Tensor, positions: Tensor, spec: TargetSpec) -> Tensor:
    """[n, D] of a causal attention that reads ``read`` [n, any width]."""
    rows, width = len(read), spec.head_dim
    queries, kv = spec.num_heads * width, spec.num_kv_heads * width
    projected = read @ weights["qkv_proj.weight"].T + weights.get("qkv_proj.bias", torch.zeros(()))
    heads = [part.view(rows, -1, width).transpose(0, 1) for part in projected.split((queries, kv, kv), dim=-1)]
    q, k = (rotated(part, positions, spec) for part in heads[:2])
    out = []
    for number in range(spec.num_heads):
        shared = number * spec.num_kv_heads // spec.num_heads
        scores = q[number] @ k[shared].T / width**0.5
        ahead = torch.arange(rows)[None] > torch.arange(rows)[:, None]
        out.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ heads[2][shared])
    return torch.cat(out, dim=-1) @ weights["o_proj.weight"].T


def mlp(weights: dict[str, Tensor], x: Tensor, spec: TargetSpec) -> Tensor:
    gate, up = (rms(x, weights["mlp_norm.weight"], spec) @ weights["mlp.gate_up_proj.weight"].T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ weights["mlp.down_proj.weight"].T


def inside(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Rows:
    """Pairs: embeddings and states [n, D], which stand for pictures [n], rotary positions [A, n]."""

    embeds: Tensor
    states: Tensor
    is_visual: Tensor
    positions: Tensor


def eagle(weights: dict[str, Tensor], rows: Rows, spec: TargetSpec, *, bypass: bool = False) -> Tensor:
    """h [n, D] of EAGLE-2, EagleVLM (where there is an input norm) and MSD (``bypass``)."""
    x = torch.cat((rows.embeds, rows.states), dim=-1) @ weights["fc.weight"].T + weights["fc.bias"]
    if bypass:
        x = torch.stack([e if seen else f for e, f, seen in zip(rows.embeds, x, rows.is_visual, strict=True)])
    own = inside(weights, "blocks.0.")
    read = rms(x, own["input_norm.weight"], spec) if "input_norm.weight" in own else x
    x = x + attention(own, read, rows.positions, spec)
    return x + mlp(own, x, spec)


def eagle3(weights: dict[str, Tensor], rows: Rows, spec: TargetSpec) -> Tensor:
    """h [n, D] of EAGLE-3 before its final norm."""
    own, x = inside(weights, "blocks.0."), rows.states
    embeds = rms(rows.embeds, weights["embed_norm.weight"], spec)
    read = torch.cat((embeds, rms(x, own["input_norm.weight"], spec)), dim=-1)
    x = x + attention(own, read, rows.positions, spec)
    return x + mlp(own, x, spec)


@dataclass(frozen=True)
class Plain:
    """A drafter's formulas.

    Attributes:
        h: block outputs [n, D] of rows; their last state is what children read.
        inject: rows' states [n, D] of what was read of the target.
        logits: [V] of one row of h.
    """

    h: Callable[[dict[str, Tensor], Rows, TargetSpec], Tensor]
    inject: Callable[[dict[str, Tensor], Tensor], Tensor] = lambda weights, states: states
    logits: Callable[[dict[str, Tensor], Tensor, Drafter], Tensor] = lambda weights, h, drafter: (
        drafter.head.lm_head_weight @ h
    )

    def logits_along(self, drafter: Drafter, taught: TeacherSample, anchor: int, path: list[int]) -> Tensor:
        """Draft logits [V] at the end of ``path`` below the root token ``anchor`` + 1."""
        weights, spec, embedding = drafter.state_dict(), drafter.spec, drafter.head.embedding
        plain = drafter.config.rope == "1d"
        positions = torch.arange(len(taught.ids))[None] if plain else taught.positions
        embeds = embedding[taught.ids].clone()
        embeds[taught.is_visual] = taught.visual
        rows = Rows(
            embeds[1 : anchor + 2],
            self.inject(weights, _read(taught, drafter.feature_layers)[: anchor + 1]),
            taught.is_visual[1 : anchor + 2],
            positions[:, 1 : anchor + 2],
        )
        h = self.h(weights, rows, spec)
        for token in path:
            rows = Rows(
                torch.cat((rows.embeds, embedding[token][None])),
                torch.cat((rows.states, h[-1:])),
                torch.cat((rows.is_visual, torch.tensor([False]))),
                torch.cat((rows.positions, rows.positions[:, -1:] + 1), dim=1),
            )
            h = self.h(weights, rows, spec)
        return self.logits(weights, h[-1], drafter)


def _read(taught: TeacherSample, layers: tuple[int, ...]) -> Tensor:
    """What a drafter of these feature layers reads."""
    if not layers or taught.features is None:
        return taught.last
    width, places = taught.last.shape[1], [taught.feature_layers.index(layer) for layer in layers]
    return torch.cat([taught.features[:, width * place : width * (place + 1)] for place in places], dim=-1)


PLAIN: dict[str, Plain] = {
    "eaglevlm": Plain(eagle),
    "msd": Plain(lambda weights, rows, spec: eagle(weights, rows, spec, bypass=True)),
    "eagle3": Plain(
        eagle3,
        inject=lambda weights, states: states @ weights["fc.weight"].T,
        logits=lambda weights, h, drafter: weights["lm_head.weight"] @ rms(h, weights["norm.weight"], drafter.spec),
    ),
}

#: Feature layers of samples.
LAYERS = (4, 1, 2)


def sample(spec: TargetSpec, seed: int, parts: str) -> TeacherSample:
    """A float64 sample; ``parts``: t text, a answer tokens, p a picture of 2 x 3 visual tokens."""
    draw = torch.Generator().manual_seed(seed)
    columns: list[list[int]] = []
    for part in parts:
        start = max((max(c) for c in columns), default=-1) + 1
        picture = [[start, start + y, start + x] for y in range(2) for x in range(3)]
        columns += picture if part == "p" else [[start] * 3]
    kinds = [kind for part in parts for kind in (part * 6 if part == "p" else part)]
    answer_mask, is_visual = (torch.tensor([kind == k for kind in kinds]) for k in "ap")

    def states(rows: int) -> Tensor:
        return torch.randn(rows, spec.hidden_size, generator=draw, dtype=torch.float64)

    return TeacherSample(
        key=f"{seed}",
        ids=torch.randint(3, spec.vocab_size - 1, (len(kinds),), generator=draw).masked_fill(is_visual, 60),
        positions=torch.tensor(columns).T,
        answer_mask=answer_mask,
        is_visual=is_visual,
        last=states(len(kinds)),
        mid=states(int(supervised_positions(answer_mask).sum())),
        visual=states(int(is_visual.sum())),
        features=torch.cat([states(len(kinds)) for _ in LAYERS], dim=-1),
        feature_layers=LAYERS,
    )
