"""The speculative loop: draft a tree, verify it in one forward pass of the target, commit what the target chose too."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fovea.decoding.meter import Meter
from fovea.decoding.proposer import FeatureReader, Noting, Observer, Proposer
from fovea.decoding.selection import GREEDY, Selection, greedy
from fovea.decoding.stopping import cut, token_cap
from fovea.decoding.trace import GenerationTrace, Round
from fovea.decoding.tree import DraftTree
from fovea.decoding.verify import verify
from fovea.targets.base import Encoded, Target, TargetState


@torch.inference_mode()
def generate(
    target: Target,
    proposer: Proposer,
    encoded: Encoded,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    selection: Selection = GREEDY,
    method: str = "speculative",
    source: str = "",
) -> GenerationTrace:
    """The target's own answer, whatever ``proposer`` drafts; a good one makes it faster.

    The time of the prefill holds the vision tower, the prompt and ``proposer.start``; that of drafting all other calls
    of the proposer. ``eos_ids`` None takes the target's own; an empty collection never stops before the cap. The cap
    shrinks where the target's context ends.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    cap = token_cap(target.spec, encoded, max_new_tokens)
    eos_ids = target.spec.eos_ids if eos_ids is None else eos_ids
    trace = GenerationTrace.of(encoded, method, source)
    observer = proposer if isinstance(proposer, Observer) else None
    meter = Meter(target.device)

    selector = selection.begin(target, encoded, eos_ids, cap)
    layers = proposer.feature_layers if isinstance(proposer, FeatureReader) else ()
    asked = {"feature_layers": layers} if layers else {}
    state, prefill = target.prefill(encoded, cap, draft_rows=proposer.max_drafts, **asked)
    proposer.start(prefill)
    states = prefill.read[-1:]
    committed, trace.finish = cut(selector.select(target.lm_head(prefill.hidden[-1:])).tolist(), eos_ids, cap)
    trace.tokens += committed
    trace.prefill_s = meter.lap()
    while not trace.finish:
        proposer.commit(torch.tensor(committed, device=target.device), states)
        tree = proposer.propose()
        draft_s = meter.lap()

        hidden = extend_tree(target, state, tree)
        logits, drafts = target.lm_head(hidden), tree.drafts
        verdict = verify(drafts, selector.along(logits), eos_ids, remaining=cap - len(trace.tokens))
        verify_s = meter.lap()

        if observer:
            observer.observe(greedy(logits).tolist())
        target.commit(state, verdict.rows)
        committed, states = verdict.committed, state.read(hidden)[verdict.rows]
        trace.tokens += committed
        trace.finish = verdict.finish
        rest_s = meter.lap()
        trace.rounds.append(
            Round(
                draft_nodes=len(drafts) - 1,
                tree_depth=int(drafts.depths.max()),
                accepted=verdict.accepted,
                committed=len(committed),
                draft_s=draft_s,
                verify_s=verify_s,
                total_s=draft_s + verify_s + rest_s,
                retrieval=tree.retrieval,
            )
        )
    proposer.commit(torch.tensor(committed, device=target.device), states)
    meter.lap()
    if isinstance(proposer, Noting):
        trace.notes = dict(proposer.notes)

    trace.total_s, trace.peak_memory_bytes = meter.total_s, meter.peak_memory_bytes
    return trace


def extend_tree(target: Target, state: TargetState, tree: DraftTree) -> Tensor:
    """States f [n, D] of all tree nodes, which stay pending in the cache.

    A node's rotary position is the root's plus its depth, and the root's is the next free one; its cache slot is its
    row behind the committed ones. Each node sees the committed text and its own ancestors.
    """
    ids, depths = (torch.from_numpy(array).to(target.device) for array in (tree.tokens, tree.depths))
    # A root without drafts is the autoregressive step, at its cost.
    mask = torch.from_numpy(tree.ancestor_mask()).to(target.device) if len(tree) > 1 else None
    return target.extend(state, ids, state.text_positions(depths), mask)
