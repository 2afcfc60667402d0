"""SpecVLM's elastic compressor (section 3.4): fewer rows in the place of a picture's visual tokens.

Legend: ``P`` pictures, ``N`` visual tokens of one of them, ``n`` rows that stand for it, ``D`` hidden width,
``B`` branches, ``Q`` queries.

Five branches: *prune* keeps tokens drawn at random, *pool* takes means of windows, *conv* one convolution with
kernel = stride = ratio, *resampler* a cross-attention of a few queries, *text_only* nothing at all. Three modes combine
them: *weight* blends prune, pool and conv at one ratio, *concat* puts four of them side by side, *select* takes one. In
*weight* and *select* a gate that has read the question decides, picture by picture. Every branch makes a row of a
visual token and of the target's state beside it alike; the two that learn, conv and resampler, read tokens only, and
their rows get the mean state of the tokens they stand for.

What is learned in *select*: the rows of the branch that was drawn are multiplied by its weight in a straight-through
Gumbel-softmax, which is 1, with the gradient of the soft weight. Branches have different lengths, so there is no blend
of all five whose gradient could be taken; the gate learns from the branch that was tried, as a mixture of experts with
top-1 routing does. A picture that drew *text_only* has no row and teaches the gate nothing in that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.targets.base import TargetSpec

Branch = Literal["prune", "pool", "conv", "resampler", "text_only"]
Mode = Literal["weight", "concat", "select", "prune", "pool", "conv", "resampler", "text_only"]

BRANCHES: tuple[Branch, ...] = get_args(Branch)
_BLENDED: tuple[Branch, ...] = ("prune", "pool", "conv")
_CONCATENATED: tuple[Branch, ...] = ("prune", "pool", "conv", "resampler")


@dataclass(frozen=True)
class CompressionConfig:
    """How pictures are compressed; the defaults are the paper's.

    Attributes:
        mode: ``weight``, ``concat`` or ``select``; the name of a branch takes that one alone, without a gate.
        prune_ratio, pool_ratio, conv_ratio: visual tokens per row of these branches, rounded up at the end.
        queries: rows of the resampler.
        weight_ratio: visual tokens per row of the three branches that ``weight`` blends.
        temperature: of the Gumbel-softmax of ``select`` in training.
        seed: of the tokens that pruning keeps outside training; every request draws from it anew.
    """

    mode: Mode = "select"
    prune_ratio: int = 20
    pool_ratio: int = 20
    conv_ratio: int = 3
    queries: int = 2
    weight_ratio: int = 3
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"compression.mode is {self.mode!r}; choose from {get_args(Mode)}")
        for name in ("prune_ratio", "pool_ratio", "conv_ratio", "weight_ratio", "queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"compression.{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"compression.temperature is {self.temperature}; it must be above 0")

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of the mode, in the order of the gate's outputs and of the rows of ``concat``."""
        several = {"weight": _BLENDED, "concat": _CONCATENATED, "select": BRANCHES}
        return several.get(self.mode, (self.mode,))  # pyright: ignore[reportReturnType]

    @property
    def gated(self) -> bool:
        """Whether the question decides."""
        return self.mode in ("weight", "select")

    def ratio(self, branch: Branch) -> int:
        """Visual tokens per row of ``prune``, ``pool`` or ``conv``."""
        return self.weight_ratio if self.mode == "weight" else getattr(self, f"{branch}_ratio")

    def rows(self, branch: Branch, tokens: int) -> int:
        """Rows that ``branch`` makes of a picture of ``tokens`` visual tokens."""
        if tokens == 0 or branch == "text_only":
            return 0
        return self.queries if branch == "resampler" else math.ceil(tokens / self.ratio(branch))

    def length(self, tokens: int, branches: Sequence[Branch]) -> int:
        """Rows that ``branches`` make of it side by side; never more than there were tokens."""
        return min(tokens, sum(self.rows(branch, tokens) for branch in branches))


class Compressed(NamedTuple):
    """What stands for a picture: embeddings [n, D] and states [n, D]."""

    embeds: Tensor
    states: Tensor


class VisualCompressor(nn.Module):
    """The branches of a mode and its gate; pictures in, rows out."""

    def __init__(self, spec: TargetSpec, config: CompressionConfig) -> None:
        super().__init__()
        self.config = config
        width, branches = spec.hidden_size, config.branches
        self.gate = nn.Linear(width, len(branches)) if config.gated else None
        self.conv = WindowConvolution(width, config.ratio("conv")) if "conv" in branches else None
        self.resampler = Resampler(spec, config.queries) if "resampler" in branches else None
        if self.gate is not None:
            # All branches are equally probable until one proves better.
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    def weigh(self, questions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Weights [P, B] of the branches for ``questions`` [P, D]; one-hot in ``select``, all 1 without a gate.

        Args:
            questions: mean target state of each question.
            generator: of the Gumbel noise of ``select``, on the host; None takes the most probable branch.
        """
        if self.gate is None:
            return questions.new_ones(len(questions), len(self.config.branches))
        logits = self.gate(questions)
        if self.config.mode == "weight":
            return logits.softmax(-1)
        if generator is None:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        noise = -torch.empty(logits.shape).exponential_(generator=generator).log()
        return straight_through(logits, noise.to(logits), self.config.temperature)

    def forward(
        self, pictures: Sequence[tuple[Tensor, Tensor]], weights: Tensor, generator: torch.Generator | None = None
    ) -> list[Compressed]:
        """Rows of each picture; a picture that would become longer stays as it is.

        Args:
            pictures: visual tokens [N, D] and states [N, D] of each, N >= 1.
            weights: [P, B] of its branches.
            generator: of the tokens that pruning keeps, on the host; None draws them from the seed.
        """
        if generator is None:
            generator = torch.Generator().manual_seed(self.config.seed)
        chosen = weights.argmax(-1).tolist() if self.config.mode == "select" else [0] * len(weights)
        return [
            self._compress(embeds, states, own, branch, generator)
            for (embeds, states), own, branch in zip(pictures, weights, chosen, strict=True)
        ]

    def _compress(
        self, embeds: Tensor, states: Tensor, weights: Tensor, chosen: int, generator: torch.Generator
    ) -> Compressed:
        mode, branches = self.config.mode, self.config.branches
        if mode == "select":
            weight = weights[chosen]
            made = self._shorter(embeds, states, branches[chosen : chosen + 1], generator)
            return Compressed(made.embeds * weight, made.states * weight)
        if mode == "weight":
            parts = [self._branch(branch, embeds, states, generator) for branch in branches]
            return _both(parts, lambda side: torch.einsum("b,bnd->nd", weights, torch.stack(side)))
        return self._shorter(embeds, states, branches, generator)

    def _shorter(
        self, embeds: Tensor, states: Tensor, branches: Sequence[Branch], generator: torch.Generator
    ) -> Compressed:
        """``branches`` side by side, or the picture as it is where that has fewer rows."""
        if sum(self.config.rows(branch, len(embeds)) for branch in branches) > len(embeds):
            return Compressed(embeds, states)
        return _both([self._branch(branch, embeds, states, generator) for branch in branches], torch.cat)

    def _branch(self, branch: Branch, embeds: Tensor, states: Tensor, generator: torch.Generator) -> Compressed:
        if branch == "prune":
            kept = draw(len(embeds), self.config.rows(branch, len(embeds)), generator).to(embeds.device)
            return Compressed(embeds[kept], states[kept])
        if branch == "pool":
            ratio = self.config.ratio(branch)
            return Compressed(pool(embeds, ratio), pool(states, ratio))
        if branch == "conv" and self.conv is not None:
            return Compressed(self.conv(embeds), pool(states, self.conv.ratio))
        if branch == "resampler" and self.resampler is not None:
            return Compressed(self.resampler(embeds), states.mean(0).expand(self.config.queries, -1))
        return Compressed(embeds[:0], states[:0])


class WindowConvolution(nn.Module):
    """A convolution over the sequence, kernel = stride = ``ratio``, zeros on the right; it starts as a mean."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = nn.Conv1d(width, width, kernel_size=ratio, stride=ratio)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(width, device=self.conv.weight.device)[..., None] / ratio)
            self.conv.bias.zero_()  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, x: Tensor) -> Tensor:
        """[ceil(N / ratio), D] of ``x`` [N, D]."""
        return self.conv(F.pad(x.T, (0, -len(x) % self.ratio))[None])[0].T


class Resampler(nn.Module):
    """A Q-Former of one cross-attention: learned queries read a picture, with heads as the target has them."""

    def __init__(self, spec: TargetSpec, queries: int) -> None:
        super().__init__()
        width, inner = spec.hidden_size, spec.num_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.kv_proj = nn.Linear(width, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)
        for linear in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[Q, D] of ``x`` [N, D]."""
        queries = self.q_proj(self.queries).view(len(self.queries), -1, self.head_dim)
        keys, values = self.kv_proj(self.norm(x)).view(len(x), -1, self.head_dim).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (queries, keys, values)))
        return self.out_proj(mixed[0].transpose(0, 1).flatten(1))


def _both(parts: Sequence[Compressed], join: Callable[[list[Tensor]], Tensor]) -> Compressed:
    return Compressed(join([part.embeds for part in parts]), join([part.states for part in parts]))


def draw(tokens: int, kept: int, generator: torch.Generator) -> Tensor:
    """[kept] ascending indices out of ``tokens``, at random and without replacement, on the host."""
    return torch.randperm(tokens, generator=generator)[:kept].sort().values


def pool(x: Tensor, ratio: int) -> Tensor:
    """[ceil(N / ratio), D] means over windows of ``x`` [N, D]; the last one is over its real members."""
    return F.avg_pool1d(x.T[None], ratio, ceil_mode=True)[0].T


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """One-hot [..., B] of the largest of ``logits + noise`` with the gradient of their softmax (Jang et al., 2016)."""
    soft = ((logits + noise) / temperature).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
    # In this order the sum is exact: the difference is 0.
    return hard + (soft - soft.detach())
