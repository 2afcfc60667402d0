"""The autoregressive loop: the baseline that speculative decoding is measured against and must reproduce."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fovea.decoding.meter import Meter
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.stopping import cut, token_cap
from fovea.decoding.trace import GenerationTrace
from fovea.targets.base import Encoded, Target


@torch.inference_mode()
def generate_autoregressive(
    target: Target,
    encoded: Encoded,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    selection: Selection = GREEDY,
    method: str = "autoregressive",
    source: str = "",
) -> GenerationTrace:
    """The target's own answer, one token per forward pass, with the selector, cache and stop rules of all loops.

    ``eos_ids`` None takes the target's own; an empty collection never stops before the cap. The cap shrinks where the
    target's context ends.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    cap = token_cap(target.spec, encoded, max_new_tokens)
    eos_ids = target.spec.eos_ids if eos_ids is None else eos_ids
    trace = GenerationTrace.of(encoded, method, source)
    next_slot = torch.zeros(1, dtype=torch.int64, device=target.device)
    meter = Meter(target.device)

    selector = selection.begin(target, encoded, eos_ids, cap)
    state, prefill = target.prefill(encoded, cap)
    choice = selector.select(target.lm_head(prefill.hidden[-1:]))
    trace.tokens, trace.finish = cut(choice.tolist(), eos_ids, cap)
    trace.prefill_s = meter.lap()
    while not trace.finish:
        hidden = target.extend(state, choice, state.text_positions(next_slot))
        target.commit(state, [0])
        choice = selector.select(target.lm_head(hidden))
        committed, trace.finish = cut(choice.tolist(), eos_ids, cap - len(trace.tokens))
        trace.tokens += committed
    meter.lap()

    trace.total_s, trace.peak_memory_bytes = meter.total_s, meter.peak_memory_bytes
    return trace
