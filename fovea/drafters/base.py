"""What every neural drafter is: blocks over the committed text, then over draft nodes, behind one interface.

Legend: ``B`` batch, ``n`` rows, ``T`` committed tokens, ``L`` rows of the context, ``D`` hidden width, ``F`` width of
the target's states, ``A`` rotary axes, ``N`` visual tokens, ``V`` vocabulary,
``W`` draft vocabulary, ``C`` width of what is carried along.

One row reads the pair (embedding of token t + 1, state at t) at the rotary position of token t + 1, and predicts the
state at t + 1 and with it token t + 2. On the committed text the states are the target's; below the root of a draft
tree they are the drafter's own, handed from parent to child. A drafter may keep another context than one row per pair:
:meth:`Drafter.context` says which, for training and for decoding alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.drafters.blocks import Attend
from fovea.drafters.config import DrafterConfig
from fovea.drafters.norm import RMSNorm
from fovea.drafters.rotary import Rotary, Rotation
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.memory import VisualMemory
from fovea.visual.retrieval import Retrieved


@dataclass(frozen=True)
class Context:
    """The rows that stand for the committed text; row order is pair order.

    Attributes:
        embeds: [L, D] input embeddings.
        states: [L, D] states, as :meth:`Drafter.inject` makes them of the target's.
        positions: [A, L] rotary positions.
        is_visual: [L] bool, rows that stand for a picture.
        place: [T - 1] int64 on the host: for each pair its row, or where it has none the last row before it (-1: none).
        next_position: rotary position of the first token behind the committed text.
        carried: [L, C] what each row hands, beside its state, to the draft nodes behind it; None for most drafters.
        carried_next: [C] the same for the first pair behind the committed text.
        notes: name -> [P] float figures of the P pictures, on the host, for logs and traces; the same names whatever
            the pictures. Most drafters have none.
    """

    embeds: Tensor
    states: Tensor
    positions: Tensor
    is_visual: Tensor
    place: Tensor
    next_position: int
    carried: Tensor | None = None
    carried_next: Tensor | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)


class Scored(NamedTuple):
    """Draft nodes as the LM head reads them.

    Attributes:
        hat: [R, D] LM-head inputs, corrected where a correction is on.
        raw: [R, D] the same without correction.
        passed_on: [R, D] the states that children read.
        retrieved: the evidence, if a correction is on.
    """

    hat: Tensor
    raw: Tensor
    passed_on: Tensor
    retrieved: Retrieved | None = None


class Drafter(nn.Module):
    """The trainable part of a system; the embedding and the LM head are the target's and stay outside.

    A system implements :meth:`forward`, and where it differs :meth:`context`, :meth:`inject`, :meth:`score`.
    """

    #: As configs and checkpoints call it.
    name: ClassVar[str]
    #: Its settings.
    config_type: ClassVar[type[DrafterConfig]]
    #: Whether a visual token that is left out of the context takes its state along, see :mod:`fovea.visual.budget`.
    states_leave: ClassVar[bool] = False

    def __init__(self, spec: TargetSpec, config: DrafterConfig, head: TargetHead) -> None:
        super().__init__()
        self.spec = spec
        self.config: Any = config
        self.head = head
        #: [W] ids of the draft vocabulary, ascending; -1 until it is chosen. None: the whole vocabulary.
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", unchosen_vocabulary(config.draft_vocabulary, spec))
        self._head_rows: tuple[Tensor, Tensor] | None = None
        #: Layers of the target whose outputs are its true states, see :mod:`fovea.targets.feature_layers`; empty for f.
        self.feature_layers: tuple[int, ...] = config.layers_read(spec)
        self.rotary = Rotary(spec.rope if config.rope == "target" else RopeSpec(spec.rope.theta), spec.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def cache_layers(self) -> int:
        """Layers of a key-value cache for this drafter."""
        return self.config.num_blocks

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of each layer of that cache."""
        return self.spec.num_kv_heads

    @property
    def reproducible_config(self) -> Any:
        """The config without draws at random, so that two passes over the same rows agree."""
        return self.config

    def embed(self, ids: Tensor) -> Tensor:
        """The target's input embeddings [..., D], in the drafter's dtype."""
        return self.head.embed(ids).to(self.dtype)

    @property
    def head_rows(self) -> Tensor:
        """[W, D] rows of the target's LM head for the draft vocabulary; all V where there is none.

        Raises:
            ValueError: the draft vocabulary has not been chosen yet.
        """
        whole = self.head.lm_head_weight
        if self.token_ids is None:
            return whole
        if self._head_rows is None or self._head_rows[0] is not whole:
            if int(self.token_ids[0]) < 0:
                raise ValueError("the draft vocabulary has not been chosen: train the drafter, or load a checkpoint")
            self._head_rows = whole, whole[self.token_ids.to(whole.device)]
        return self._head_rows[1]

    @property
    def own_head(self) -> Tensor | None:
        """[W, D] trainable head in the place of the target's; most drafters have none."""
        return None

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., W] of LM-head inputs, over the draft vocabulary."""
        own = self.own_head
        weight = self.head_rows if own is None else own
        return F.linear(states.to(weight.dtype), weight)

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Makes the most frequent tokens the draft vocabulary; those that end an answer always belong to it.

        Args:
            counts: [V] how often each token is to be predicted; equal ones by lower id.
        """
        if self.token_ids is None:
            return
        counts = counts.double().cpu().clone()
        counts[list(self.spec.eos_ids)] = torch.inf
        best = counts.sort(descending=True, stable=True).indices[: len(self.token_ids)]
        self.token_ids.copy_(best.sort().values)
        self._head_rows = None

    def inject(self, states: Tensor) -> Tensor:
        """States [..., D] of true target states [..., F], in the drafter's dtype; most take them as they are."""
        return states.to(self.dtype)

    def context(self, committed: Prefill, generator: torch.Generator | None = None) -> Context:
        """The rows for ``committed`` text [T], differentiable in the drafter; by default one per pair.

        Args:
            committed: tokens, embeddings and true states; its capacity is not looked at.
            generator: of random choices, on the host; None where they must be reproducible (decoding).
        """
        positions = self._own_positions(committed.positions)
        states = self.inject(committed.read[:-1])
        if self.training and generator is not None and self.config.feature_noise:
            states = disturb(states, self.config.feature_noise, generator)
        return Context(
            embeds=committed.embeds[1:].to(self.dtype),
            states=states,
            positions=positions[:, 1:],
            is_visual=committed.is_visual[1:],
            place=torch.arange(len(committed.ids) - 1),
            next_position=int(positions.max()) + 1,
        )

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        is_visual: Tensor | None = None,
        carried: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Block outputs of pairs: h [B, n, D] before any final norm, and the mid states [B, n, D].

        Args:
            embeds: [B, n, D] embeddings of the tokens t + 1.
            states: [B, n, D] states at t, injected or handed on by the parent.
            rotation: rotations [n, 1, E] or [B, n, 1, E] of the tokens t + 1.
            attend: what rows see, see :data:`fovea.drafters.blocks.Attend`.
            is_visual: [B, n] bool, rows of a context that stand for a picture; None for draft nodes.
            carried: [B, n, C] what the context hands on, if the drafter has such a thing.
        """
        raise NotImplementedError

    def remember(self, visual: Tensor, generator: torch.Generator | None = None) -> VisualMemory | None:
        """Memory of the visual tokens [N, D] of a request; None where nothing is ever retrieved."""
        del visual, generator
        return None

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """Scores block outputs ``h`` [R, D] at ``depth``; ``root`` is the selection of each row's root."""
        raise NotImplementedError

    def trainable_parameters(self) -> dict[str, int]:
        """Trainable parameters of each part, and ``total``."""
        counts = {
            name: count
            for name, part in self.named_children()
            if (count := sum(p.numel() for p in part.parameters() if p.requires_grad))
        }
        return {**counts, "total": sum(counts.values())}

    def _own_positions(self, positions: Tensor) -> Tensor:
        """Rotary positions [A, T] that the drafter gives tokens at the target's ``positions`` [A, T]."""
        if self.config.rope == "target":
            return positions
        return torch.arange(positions.shape[-1], device=positions.device).expand_as(positions[:1])


def disturb(states: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """``states`` [L, D] with noise, uniform in +-``amount`` 256 / L: EAGLE's, against errors of its own recursion.

    ``generator`` is on the host; the numbers are drawn where the states are.
    """
    draw = torch.Generator(states.device)
    draw.manual_seed(int(torch.randint(2**62, (), generator=generator)))
    noise = torch.rand(states.shape, generator=draw, device=states.device, dtype=states.dtype) - 0.5
    return states + noise * (amount * 512 / max(1, len(states)))


def unchosen_vocabulary(size: int | None, spec: TargetSpec) -> Tensor | None:
    """[W] int64 room for the ids of a draft vocabulary of ``size`` tokens."""
    if size is None:
        return None
    least = len(spec.eos_ids) + 1
    if not least <= size <= spec.vocab_size:
        raise ValueError(
            f"drafter.draft_vocabulary is {size}; choose {least} (what ends an answer, and one token more) to "
            f"{spec.vocab_size} (all of the target's), or null"
        )
    return torch.full((size,), -1)


def initialise(drafter: Drafter, *, skip: tuple[str, ...] = ()) -> None:
    """Linear layers by fan-in, outputs into the residual stream smaller the more of them; biases at zero.

    Args:
        drafter: all of its linear layers.
        skip: ends of names of layers that keep what they have.
    """
    residual = (2 * drafter.config.num_blocks) ** -0.5
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(skip or ("\0",)):
            scale = residual if name.endswith(("o_proj", "down_proj")) else 1.0
            nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def final_norm(spec: TargetSpec, head: TargetHead) -> RMSNorm:
    """A trainable norm that starts as the target's final one."""
    norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(head.norm_weight)
    return norm
