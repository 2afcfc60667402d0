"""Two checks before training, in seconds: are the artifacts what this target says, and do both paths agree?

A drafter can be trained for days on states of another layer, another token or another target, and on a path that
decoding does not take; the loss falls all the same, and only the acceptance rate would tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fovea.decoding.growth import TreeConfig
from fovea.decoding.selection import greedy
from fovea.drafters.base import Drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, supervised_positions
from fovea.targets.ties import tie_tolerance
from fovea.training.anchors import taught_steps
from fovea.training.unroll import committed_text, unroll

#: Share of answer tokens that the stored states reproduce at least, near-ties aside.
LEAST_AGREEMENT = 0.995
#: Share of answer tokens that may be near-ties that fell the other way: states are stored rounded, and a pass over a
#: whole batch rounds otherwise than the passes that wrote the answer.
MOST_TIES = 0.05
#: How improbable what was counted must be, if those two shares hold, for the artifacts to be refused.
SIGNIFICANCE = 1e-3
#: Answer tokens behind which one wrong token in thirty is no longer chance.
ENOUGH_TOKENS = 200
#: Largest difference of float32 logits between the paths, relative to the largest logit if that is above 1.
PARITY_TOLERANCE = 1e-4

_ROWS_AT_ONCE = 128


class GateError(RuntimeError):
    """Training would not mean anything; the message says why and what to do."""


@dataclass(frozen=True)
class Agreement:
    """How many answer tokens the LM head reads off stored states; agreements add up.

    Attributes:
        tokens: that were compared.
        ties: of them, those that differ at a near-tie of the logits, which rounding explains.
        wrong: those that differ otherwise.
    """

    tokens: int = 0
    ties: int = 0
    wrong: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.tokens + other.tokens, self.ties + other.ties, self.wrong + other.wrong)

    def __str__(self) -> str:
        same = self.tokens - self.ties - self.wrong
        ties = f", {self.ties} more at a near-tie" if self.ties else ""
        return f"{same / max(1, self.tokens):.2%} of {self.tokens} answer tokens{ties}"


@torch.inference_mode()
def teacher_agreement(head: TargetHead, batch: TeacherBatch) -> Agreement:
    """Compares the answers in ``batch``, which the target generated greedily, with what ``head`` reads off the states.

    Args:
        head: of the target, on the device of ``batch``.
        batch: a few artifacts.
    """
    states, tokens = _taught_tokens(batch)
    precision = max(head.lm_head_weight.dtype, states.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    ties = wrong = 0
    for some_states, some_tokens in zip(states.split(_ROWS_AT_ONCE), tokens.split(_ROWS_AT_ONCE), strict=True):
        logits = head.logits(some_states.to(head.lm_head_weight.dtype)).float()
        missed = greedy(logits) != some_tokens
        gap = logits.amax(-1) - logits.gather(-1, some_tokens[:, None])[:, 0]
        # A NaN is no tie.
        tied = missed & (gap <= tie_tolerance(logits, precision))
        ties, wrong = ties + int(tied.sum()), wrong + int((missed & ~tied).sum())
    return Agreement(len(tokens), ties, wrong)


def teacher_gate(found: Agreement) -> None:
    """Refuses artifacts whose states are not those behind their answers.

    A right capture misses a token in a few hundred, so a miss among few tokens proves nothing, and a share of two in
    three hundred does not either: what was counted is judged by how probable it is under :data:`LEAST_AGREEMENT` and
    :data:`MOST_TIES`. The states of other tokens, layers or targets miss most of what they are asked.

    Args:
        found: over a few artifacts, best with :data:`ENOUGH_TOKENS` answer tokens.

    Raises:
        GateError: more misses than chance explains, or no answer token.
    """
    if not found.tokens:
        raise GateError(
            "teacher gate: the artifacts that were looked at have no answer token, so there is nothing to learn; look "
            "at the conversations that were exported"
        )
    far_off = _probability_of_as_many(found.wrong, found.tokens, 1 - LEAST_AGREEMENT)
    near = _probability_of_as_many(found.ties, found.tokens, MOST_TIES)
    if min(far_off, near) < SIGNIFICANCE:
        raise GateError(
            f"teacher gate: the stored states give {found}, and {LEAST_AGREEMENT:.1%} are needed, near-ties aside. The "
            "states are not those behind the answers: export the artifacts again from the target at model.path, and "
            "set data.export.answers=dataset if the answers are not its own"
        )


def _probability_of_as_many(hits: int, trials: int, share: float) -> float:
    """That at least ``hits`` of ``trials`` succeed, if each does with probability ``share``."""
    fewer = torch.arange(hits, dtype=torch.float64)
    law = torch.distributions.Binomial(trials, torch.tensor(share, dtype=torch.float64))
    return 1 - law.log_prob(fewer).exp().sum().item()


@torch.no_grad()
def parity_gate(drafter: Drafter, batch: TeacherBatch, *, anchors: int = 3) -> float:
    """Largest difference between the draft logits of the training path and of the decoding path, both in float32.

    A copy of the drafter is compared, with noise on its weights, so that parts which start at zero take part. The
    training path unrolls the whole batch; the decoding path drafts the true tokens below each of a few roots.

    Args:
        drafter: on the device of ``batch``.
        batch: a few artifacts.
        anchors: roots per sample, spread over its answers.

    Raises:
        GateError: above :data:`PARITY_TOLERANCE`.
    """
    worst = 0.0
    with _exact_products(), torch.autocast(batch.ids.device.type, enabled=False):
        probe = _probe(drafter)
        batch = batch.to(batch.ids.device, torch.float32)
        trained = _training_logits(probe, batch, anchors)
        for (sample, anchor), training in trained.items():
            decoding = _decoding_logits(probe, batch, sample, anchor, max(training))
            for step, logits in training.items():
                scale = max(1.0, logits.abs().max().item())
                difference = (logits - decoding[step - 1]).abs().max().item() / scale
                worst = max(worst, difference)
                # A NaN is no agreement.
                if not difference <= PARITY_TOLERANCE:
                    raise GateError(
                        f"parity gate: at draft step {step} behind token {anchor} of {batch.keys[sample]} the logits "
                        f"of training and of decoding differ by {difference:.1e} of their size (limit "
                        f"{PARITY_TOLERANCE:.0e}), so training would teach what decoding never asks. This is a fault "
                        "of the drafter's code, not of the settings; gates=off trains regardless"
                    )
    return worst


def _taught_tokens(batch: TeacherBatch) -> tuple[Tensor, Tensor]:
    """States [P, D] at the supervised positions, and the tokens [P] that follow."""
    sample, position = supervised_positions(batch.answer_mask).nonzero(as_tuple=True)
    return batch.last[sample, position], batch.ids[sample, position + 1]


def _probe(drafter: Drafter) -> Drafter:
    """A float32 copy with noise of a tenth of each weight's size on it; draws at random are replaced by the rule."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        probe = type(drafter)(drafter.spec, drafter.reproducible_config, drafter.head.to(drafter.device, torch.float32))
        probe.load_state_dict(drafter.state_dict())
        for parameter in probe.parameters():
            noise = torch.randn(parameter.shape) * (0.1 * parameter.std(correction=0) + 0.02)
            parameter.add_(noise.to(parameter.dtype))
    return probe.to(drafter.device, torch.float32).eval()


def _training_logits(
    drafter: Drafter, batch: TeacherBatch, per_sample: int
) -> dict[tuple[int, int], dict[int, Tensor]]:
    """Logits [V] by (sample, anchor) and step, for a few anchors of each sample behind its last picture."""
    steps = drafter.config.depth + 1
    unrolled = unroll(drafter, batch, steps=steps)
    taught = taught_steps(batch.answer_mask.cpu(), steps).nonzero().tolist()
    # In the order of Unrolled: by teacher position, then by anchor.
    rows = sorted(
        ((sample, pair, index + 1) for sample, pair, index in taught), key=lambda r: (r[0], r[1] + r[2], r[2])
    )
    visual = batch.is_visual.cpu()
    chosen: dict[int, set[int]] = {}
    for sample in range(len(batch.keys)):
        seen = visual[sample].nonzero()[:, 0]
        first = int(seen.max()) + 1 if len(seen) else 0
        roots = sorted({anchor for number, anchor, _ in rows if number == sample and anchor >= first})
        chosen[sample] = {roots[int(i)] for i in torch.linspace(0, len(roots) - 1, per_sample)} if roots else set()
    out: dict[tuple[int, int], dict[int, Tensor]] = {}
    for (sample, anchor, step), state in zip(rows, unrolled.h_hat, strict=True):
        if anchor in chosen[sample]:
            out.setdefault((sample, anchor), {})[step] = drafter.logits(state)
    return out


def _decoding_logits(drafter: Drafter, batch: TeacherBatch, sample: int, anchor: int, steps: int) -> list[Tensor]:
    """Logits [V] of steps 1 to ``steps`` when the true tokens are drafted below root token ``anchor`` + 1."""
    deepest = drafter.config.depth
    proposer = NeuralProposer(drafter, TreeConfig(width=1, depth=deepest, nodes=deepest + 1))
    visual = batch.visual[sample][batch.visual_valid[sample]]
    prompt = committed_text(drafter, batch, sample, visual, anchor + 1)
    proposer.start(replace(prompt, capacity=anchor + 2 + steps))
    tokens = batch.ids[sample, anchor + 1 : anchor + 1 + steps]
    proposer.commit(tokens[:1], batch.read(drafter.feature_layers)[sample, anchor : anchor + 1])
    logits = []
    for depth, token in enumerate(tokens.cpu().numpy()[:, None]):
        parent = np.array([0 if depth else -1])
        logits.append(proposer.node_logits(token, parent, depth)[0])
    return logits


@contextmanager
def _exact_products() -> Iterator[None]:
    """Full float32 matrix products, whatever the run has chosen."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
