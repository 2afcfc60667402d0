"""Unrolled training: every supervised anchor drafts a chain of its own, as it will when it decodes.

Legend: ``B`` samples, ``T`` tokens, ``S`` steps, ``A`` anchors, ``R`` supervised rows (anchor, step), ``P`` distinct
positions that teach them, ``D`` hidden width.

Pair t reads (embedding of token t + 1, state at t). Step 1 runs all pairs of a sample with the target's states; its
keys and values are the context, as in decoding. An *anchor* is a pair whose token t + 1 belongs to an answer: the root
of a draft tree. Step s > 1 continues each anchor's chain with token t + s and the drafter's own state of step s - 1,
and sees the context up to pair t and its own chain. A row (t, s) is taught by position t + s: the target's state there,
and the token t + s + 1 that follows from it. It is supervised if that token belongs to the anchor's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.drafters.base import Drafter
from fovea.targets.base import Prefill
from fovea.targets.teacher_batch import TeacherBatch, supervised_positions
from fovea.training.anchors import Anchors, find_anchors
from fovea.training.chain_attention import ChainRows, chain_attention
from fovea.visual.memory import VisualMemory


@dataclass(frozen=True)
class Unrolled:
    """Supervised rows, sorted by the position that teaches them.

    Attributes:
        h_hat: [R, D] LM-head inputs, corrected where the correction is on.
        h_raw: [R, D] the same without correction.
        h_mid: [R, D] mid states.
        step: [R] int64 1-based draft step, depth + 1.
        answer_position: [R] int64 1-based place of the predicted token in its answer.
        token: [R] int64 the predicted token.
        teacher_index: [R] int64 row of ``teacher``, ascending.
        teacher: [P, D] target states f at the positions in use.
        teacher_mid: [P, D] target mid states there.
        retrieval: [M, 2] int64 (K, min(K_raw, K_max)) of the rows that retrieved.
        anchors: anchors unrolled.
        anchors_found: anchors in the batch; more than ``anchors`` if ``max_anchors`` cut them.
        notes: name -> [P] figures of the pictures in the contexts, see :class:`fovea.drafters.base.Context`.
    """

    h_hat: Tensor
    h_raw: Tensor
    h_mid: Tensor
    step: Tensor
    answer_position: Tensor
    token: Tensor
    teacher_index: Tensor
    teacher: Tensor
    teacher_mid: Tensor
    retrieval: Tensor
    anchors: int
    anchors_found: int
    notes: Mapping[str, Tensor]


def unroll(
    drafter: Drafter,
    batch: TeacherBatch,
    *,
    steps: int,
    max_anchors: int | None = None,
    generator: torch.Generator | None = None,
) -> Unrolled:
    """Draft states of all supervised (anchor, step) pairs of ``batch``, differentiable in the drafter.

    Memory grows with anchors times steps; ``max_anchors`` bounds it by a draw without replacement. A batch gives each
    sample what it would give alone, and a batch without supervised rows gives empty tensors.

    Args:
        drafter: on the device of the batch.
        batch: what the target taught.
        steps: S, at most drafter.config.depth + 1, so that every depth of the tree is trained.
        max_anchors: most anchors of the batch; None for all.
        generator: of the draws (anchors, ``random`` retrieval), on the host.
    """
    if not 1 <= steps <= drafter.config.depth + 1:
        raise ValueError(f"unroll steps {steps}: choose 1 to drafter.depth + 1 = {drafter.config.depth + 1}")
    anchors = find_anchors(batch, steps, max_anchors, generator)
    chains = _Chains(drafter, batch, anchors, generator)
    found = [chains.step(step) for step in range(1, anchors.last_step + 1)]
    return _gather(batch, anchors, found, chains)


@dataclass(frozen=True)
class _Step:
    """Rows of one step, one for each chain that is still alive."""

    number: int
    anchor: Tensor
    h_hat: Tensor
    h_raw: Tensor
    h_mid: Tensor


class _Chains:
    """The chains of a batch while they are unrolled."""

    def __init__(
        self, drafter: Drafter, batch: TeacherBatch, anchors: Anchors, generator: torch.Generator | None
    ) -> None:
        self.drafter, self.anchors, self.device = drafter, anchors, batch.ids.device
        self.retrieval: list[Tensor] = []
        self.notes: dict[str, Tensor] = {}
        if not anchors.count:
            return
        self.ids = batch.ids
        visual = [tokens[valid] for tokens, valid in zip(batch.visual, batch.visual_valid, strict=True)]
        self._read_contexts(batch, visual, generator)
        self.memories: dict[int, VisualMemory | None] = {
            sample: drafter.remember(visual[sample], generator) for sample in anchors.sample.unique().tolist()
        }
        self.later: dict[int, Tensor] = {
            sample: places
            for sample in self.memories
            if len(places := batch.is_visual[sample].nonzero()[:, 0])
            and int(places[-1]) > int(anchors.pair[anchors.sample == sample][0])
        }
        self.roots: dict[int, Tensor] = {}
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self.chain: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.rows = torch.arange(anchors.count)

    def _read_contexts(self, batch: TeacherBatch, visual: list[Tensor], generator: torch.Generator | None) -> None:
        """The samples' contexts side by side, and each anchor's row among those of its sample.

        Padding is on the right, and so behind every anchor.
        """
        drafter, anchors = self.drafter, self.anchors
        self.samples = anchors.sample.unique()
        contexts = [
            drafter.context(committed_text(drafter, batch, sample, visual[sample]), generator)
            for sample in self.samples.tolist()
        ]
        self.which = torch.searchsorted(self.samples, anchors.sample)
        place = torch.nn.utils.rnn.pad_sequence([context.place for context in contexts], batch_first=True)
        self.slots = place[self.which, anchors.pair]
        length = int(self.slots.max()) + 1

        def side_by_side(parts: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([part[:length] for part in parts], batch_first=True)

        self.embeds = side_by_side([context.embeds for context in contexts])
        self.states = side_by_side([context.states for context in contexts])
        self.is_visual = side_by_side([context.is_visual for context in contexts])
        self.positions = side_by_side([context.positions.T for context in contexts]).permute(2, 0, 1)
        carried = [context.carried for context in contexts if context.carried is not None]
        self.carried = side_by_side(carried) if carried else None
        noted = [context.notes for context in contexts if context.notes]
        self.notes = {name: torch.cat([notes[name] for notes in noted]) for name in noted[0]} if noted else {}

    def step(self, number: int) -> _Step:
        """Runs step ``number``; steps come in order."""
        previous, self.rows = self.rows, self.anchors.alive(number)
        spans = self._spans()
        h, mid = self._first() if number == 1 else self._next(number, previous)
        hats, raws, passed = [], [], []
        for sample, start, end in spans:
            root = self.roots.get(sample)
            if root is not None:
                local = self.rows[start:end] - int((self.anchors.sample < sample).sum())
                root = root[local.to(self.device)]
            memory = self._memory(sample, self.rows[start:end])
            scored = self.drafter.score(h[start:end], number - 1, memory, root)
            hats.append(scored.hat)
            raws.append(scored.raw)
            passed.append(scored.passed_on)
            if scored.retrieved is not None:
                cardinalities = torch.stack((scored.retrieved.k, scored.retrieved.k_raw), dim=1)
                self.retrieval.append(cardinalities[cardinalities[:, 0] > 0] if sample in self.later else cardinalities)
                self.roots.setdefault(sample, scored.retrieved.selected)
        self.passed_on = torch.cat(passed)
        return _Step(number, self.rows, torch.cat(hats), torch.cat(raws), mid)

    def _memory(self, sample: int, rows: Tensor) -> VisualMemory | None:
        """What the chains of the anchors ``rows`` retrieve from: pictures of later turns have not been shown yet."""
        memory = self.memories[sample]
        if memory is None or sample not in self.later:
            return memory
        return replace(memory, valid=self.later[sample] <= self.anchors.pair[rows, None].to(self.device))

    def _first(self) -> tuple[Tensor, Tensor]:
        """Step 1: all rows of the contexts at once; h and mid [a, D] of the anchors."""
        h, mid = self.drafter(
            self.embeds,
            self.states,
            self.drafter.rotary(self.positions, self.drafter.dtype),
            self._attend_causally,
            is_visual=self.is_visual,
            carried=self.carried,
        )
        anchor = self.which.to(self.device), self.slots.to(self.device)
        return h[anchor], mid[anchor]

    def _next(self, number: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Step s > 1: one row per living chain; h and mid [a, D]."""
        if len(self.rows) < len(previous):
            living = torch.isin(previous, self.rows).nonzero()[:, 0].to(self.device)
            self.passed_on = self.passed_on[living]
            for layer, past in self.chain.items():
                self.chain[layer] = [(keys[:, living], values[:, living]) for keys, values in past]
        which, slots = self.which[self.rows], self.slots[self.rows]
        seen = ChainRows(which.bincount(minlength=len(self.samples)), slots, self.device)
        anchor = which.to(self.device), slots.to(self.device)
        # An answer has no picture inside, so on every axis its tokens follow one another.
        position = self.positions[:, *anchor] + (number - 1)
        token = self.anchors.pair[self.rows] + number
        ids = self.ids[self.anchors.sample[self.rows].to(self.device), token.to(self.device)]

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            past = self.chain.setdefault(layer, [])
            past.append((keys[0], values[0]))
            chain_keys, chain_values = (torch.stack(part, dim=2) for part in zip(*past, strict=True))
            return chain_attention(queries[0], self.prefix[layer], (chain_keys, chain_values), seen)[None]

        h, mid = self.drafter(
            self.drafter.embed(ids)[None],
            self.passed_on[None],
            self.drafter.rotary(position, self.drafter.dtype),
            attend,
            carried=None if self.carried is None else self.carried[anchor][None],
        )
        return h[0], mid[0]

    def _attend_causally(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.prefix[layer] = keys, values
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    def _spans(self) -> list[tuple[int, int, int]]:
        """(sample, first row, end row) of the living chains of each sample."""
        samples, counts = self.anchors.sample[self.rows].unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        return list(zip(samples.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True))


def committed_text(
    drafter: Drafter, batch: TeacherBatch, sample: int, visual: Tensor, end: int | None = None
) -> Prefill:
    """``sample`` of ``batch`` up to token ``end`` (None: all of it) as a prompt that the target has read.

    Args:
        drafter: whose embeddings are taken.
        batch: on the drafter's device.
        sample: row of the batch.
        visual: [N, D] all of the sample's visual tokens.
        end: tokens to take.
    """
    tokens = int(batch.valid[sample].sum()) if end is None else end
    is_visual = batch.is_visual[sample, :tokens]
    visual = visual[: int(is_visual.sum())]
    embeds = drafter.embed(batch.ids[sample, :tokens])
    embeds[is_visual] = visual.to(embeds.dtype)
    importance = None if batch.importance is None else batch.importance[sample, : len(visual)]
    return Prefill(
        ids=batch.ids[sample, :tokens],
        positions=batch.positions[sample, :, :tokens],
        embeds=embeds,
        hidden=batch.last[sample, :tokens],
        visual=visual,
        is_visual=is_visual,
        capacity=tokens,
        answer_mask=batch.answer_mask[sample, :tokens],
        importance=None if importance is None else lambda: importance,
        features=batch.read(drafter.feature_layers)[sample, :tokens] if drafter.feature_layers else None,
    )


def _gather(batch: TeacherBatch, anchors: Anchors, found: list[_Step], chains: _Chains) -> Unrolled:
    """The rows of all steps in the order of their teachers."""
    device, width = batch.ids.device, batch.last.shape[-1]
    length = batch.ids.shape[1]
    anchor = torch.cat([part.anchor for part in found]) if found else torch.zeros(0, dtype=torch.int64)
    step = torch.cat([torch.full_like(part.anchor, part.number) for part in found]) if found else anchor
    position = anchors.sample[anchor] * length + anchors.pair[anchor] + step
    order = position.argsort(stable=True)
    used, teacher_index = position[order].unique_consecutive(return_inverse=True)

    answer_mask = batch.answer_mask.cpu()
    stored = supervised_positions(answer_mask).flatten().cumsum(0) - 1
    place = torch.arange(length).expand_as(answer_mask)
    answer_position = place - place.masked_fill(answer_mask, -1).cummax(1).values

    def rows(parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros(0, width, dtype=chains.drafter.dtype, device=device)
        return torch.cat(parts)[order.to(device)]

    return Unrolled(
        h_hat=rows([part.h_hat for part in found]),
        h_raw=rows([part.h_raw for part in found]),
        h_mid=rows([part.h_mid for part in found]),
        step=step[order].to(device),
        answer_position=answer_position.flatten()[position[order] + 1].to(device),
        token=batch.ids.flatten()[(position[order] + 1).to(device)],
        teacher_index=teacher_index.to(device),
        teacher=batch.last.flatten(0, 1)[used.to(device)],
        teacher_mid=batch.mid[stored[used].to(device)],
        retrieval=torch.cat(chains.retrieval)
        if chains.retrieval
        else torch.zeros(0, 2, dtype=torch.int64, device=device),
        anchors=anchors.count,
        anchors_found=anchors.found,
        notes=chains.notes,
    )
