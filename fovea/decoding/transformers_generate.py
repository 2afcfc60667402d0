"""transformers' own ``generate``, timed like our loops: the baseline that users know."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from fovea.decoding.logits_processors import PROCESSORS
from fovea.decoding.meter import Meter
from fovea.decoding.selection import GREEDY, GumbelNoise, Selection
from fovea.decoding.stopping import cut, token_cap
from fovea.decoding.trace import GenerationTrace
from fovea.targets.base import Encoded
from fovea.targets.hf import HFTarget


@torch.inference_mode()
def generate_transformers(
    target: HFTarget,
    encoded: Encoded,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    selection: Selection = GREEDY,
    method: str = "transformers",
    source: str = "",
) -> GenerationTrace:
    """The target's answer by transformers, with our cap, end tokens and selection.

    It gets the settings and makes its processors of them itself. A sampled answer is the one that our loops draw: the
    warpers and the noise are handed to it as further processors, in front of its argmax.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    cap = token_cap(target.spec, encoded, max_new_tokens)
    eos_ids = target.spec.eos_ids if eos_ids is None else eos_ids
    trace = GenerationTrace.of(encoded, method, source)
    # Without end tokens an id that no row of the head has: transformers takes None for the model's own.
    ends = list(eos_ids) or [target.spec.vocab_size]
    settings = GenerationConfig(
        max_new_tokens=cap,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=target.spec.eos_ids[0],
        **{name: value for name, value in selection.settings.items() if name in PROCESSORS},
    )
    further = LogitsProcessorList(selection.warpers(target, encoded, eos_ids, cap))
    if (noise := selection.noise(encoded.key, target.device)) is not None:
        further.append(_Noise(noise))
    model: Any = target.model
    meter = Meter(target.device)

    inputs = {"input_ids": encoded.ids[None], "attention_mask": torch.ones_like(encoded.ids[None])}
    inputs |= target.generation_inputs([encoded], encoded.is_visual[None])
    first_token = _FirstToken(meter)
    output = model.generate(
        **{name: value.to(target.device) for name, value in inputs.items()},
        generation_config=settings,
        logits_processor=further,
        streamer=first_token,
    )
    answer = output[0, encoded.ids.shape[0] :].tolist()
    meter.lap()

    trace.tokens, trace.finish = cut(answer, eos_ids, cap)
    trace.prefill_s, trace.total_s = first_token.seconds, meter.total_s
    trace.peak_memory_bytes = meter.peak_memory_bytes
    return trace


class _Noise(LogitsProcessor):
    """Adds noise to the scores, so that their argmax is a draw."""

    def __init__(self, noise: GumbelNoise) -> None:
        self._noise = noise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores.double() + self._noise.draw(scores.shape[-1])


class _FirstToken(BaseStreamer):
    """Takes the time until the first new token: the second thing that a streamer is shown, after the prompt."""

    def __init__(self, meter: Meter) -> None:
        self.seconds = 0.0
        self._meter = meter
        self._shown = 0

    def put(self, value: Tensor) -> None:
        self._shown += 1
        if self._shown == 2:
            self.seconds = self._meter.lap()

    def end(self) -> None:
        pass
