"""Which token follows a row of logits: the one rule that the baseline, the verifier and the teacher share.

Logits processors see the text that was selected so far, and a draft tree is verified by selecting along it, so every
node's logits are processed on the node's own path and those of nodes that nobody reaches are not processed at all.

Sampling takes the argmax of processed logits plus Gumbel noise, which is a draw from their softmax (Gumbel, 1954). The
noise depends on the seed, the request and the place in the answer alone. A drafted child is accepted if it is the token
that was drawn: with the target's probability, and where it was not drawn the others keep their proportions. That is
the law of testing deterministic candidates in turn, removing the mass of each rejected one and renormalising the rest
(SpecInfer, section 4.3, for one-hot proposals), without a residual that could be empty. And beyond the law, both loops
draw the *same* answer, whatever is drafted, so that sampled answers can be compared token for token too.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from fovea.decoding.logits_processors import (
    PROCESSORS,
    WARPERS,
    Rule,
    SelectionError,
    asked_for,
    make,
    require_per_path,
    require_valid,
)
from fovea.targets.base import Encoded, Target, TargetSpec

log = logging.getLogger(__name__)

#: A lower temperature leaves nothing but the argmax, and overflows; some checkpoints ask for 1e-6 to say greedy.
LOWEST_TEMPERATURE = 1e-5

#: What transformers takes for ``top_k`` where a checkpoint that samples names none.
_DEFAULT_TOP_K = 50


def greedy(logits: Tensor) -> Tensor:
    """Ids [...] of the largest of ``logits`` [..., V]; the lowest id among equals.

    ``torch.topk`` and sorts break ties in another order, so they must not take its place anywhere.
    """
    return logits.argmax(dim=-1)


@dataclass(frozen=True)
class SelectionConfig:
    """What is asked of the selection.

    Attributes:
        generation_config: ``none`` selects by the model's own logits, ``target`` as the checkpoint's
            generation_config.json says; the fields below win over it.
        temperature: divides the logits before a draw; 0 takes the argmax. None leaves it to ``generation_config``.
        top_p: draws from the fewest tokens whose probabilities add up to it; 1 from all. None as above.
        top_k: draws from so many most probable tokens; 0 from all. None as above.
        seed: of the draws.
        processors: further settings by the names that transformers' ``GenerationConfig`` has for them.
    """

    generation_config: Literal["none", "target"] = "none"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    processors: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must not be negative, and 0 takes the argmax")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], and 1 leaves all tokens")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must not be negative, and 0 leaves all tokens")
        for name in ("temperature", "top_p", "top_k"):
            if name in self.processors:
                raise SelectionError(f"processors.{name} has a field of its own: set {name} instead")
        require_per_path(self.processors, "processors")


class Selector(Protocol):
    """Selects the tokens of one answer in order; whatever it has selected is part of the text that comes next."""

    def select(self, logits: Tensor) -> Tensor:
        """[1] the id that follows, by its logits [1, V]."""
        ...

    def along(self, logits: Tensor) -> Callable[[int], int]:
        """Selects behind row after row of ``logits`` [n, V]: each call stands for one more token of the text."""
        ...

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes ``tokens`` for selected."""
        ...

    def scores(self, logits: Tensor) -> Tensor:
        """[1, V] what is largest at the id that follows, by its logits [1, V]; selects nothing yet."""
        ...


@dataclass(frozen=True)
class Selection:
    """How a job selects tokens, for all of its requests.

    Attributes:
        settings: what is in force beside the argmax, by transformers' names.
        sampled: draw, rather than take the argmax.
        seed: of the draws.
        generation_config: where the settings come from that were not named explicitly.
        set_aside: settings of the checkpoint that would change its answers and are not in force.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    sampled: bool = False
    seed: int = 0
    generation_config: Literal["none", "target"] = "none"
    set_aside: tuple[str, ...] = ()

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 for the argmax."""
        return float(self.settings.get("temperature", 1.0)) if self.sampled else 0.0

    def processors(self, target: Target, encoded: Encoded, eos_ids: Collection[int], cap: int) -> list[LogitsProcessor]:
        """Those of a request of at most ``cap`` new tokens, in front of :meth:`warpers`."""
        return self._made(PROCESSORS, target, encoded, eos_ids, cap)

    def warpers(self, target: Target, encoded: Encoded, eos_ids: Collection[int], cap: int) -> list[LogitsProcessor]:
        """Those that shape the distribution of a request before a draw; empty for the argmax."""
        return self._made(WARPERS, target, encoded, eos_ids, cap) if self.sampled else []

    def begin(self, target: Target, encoded: Encoded, eos_ids: Collection[int], cap: int) -> Selector:
        """The selector of an answer of at most ``cap`` tokens."""
        if not self.settings and not self.sampled:
            return _Argmax()
        request = (target, encoded, eos_ids, cap)
        noise = self.noise(encoded.key, target.device)
        return _Processed(self.processors(*request) + self.warpers(*request), noise, encoded.ids.to(target.device))

    def noise(self, key: str, device: torch.device) -> GumbelNoise | None:
        """That of the request called ``key``; None for the argmax."""
        return GumbelNoise(self.seed, key, device) if self.sampled else None

    def _made(
        self, rules: Mapping[str, Rule], target: Target, encoded: Encoded, eos_ids: Collection[int], cap: int
    ) -> list[LogitsProcessor]:
        eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=target.device)
        return make(rules, self.settings, encoded.ids[None].to(target.device), eos, cap)

    def describe(self) -> dict[str, Any]:
        """What a report says about it; plain types."""
        rule = {"generation_config": self.generation_config, "temperature": self.temperature}
        rule |= {"seed": self.seed} if self.sampled else {}
        rule |= {name: value for name, value in self.settings.items() if name != "temperature"}
        return rule | ({"set_aside": list(self.set_aside)} if self.set_aside else {})


#: The argmax of the model's own logits.
GREEDY = Selection()


def resolve(config: SelectionConfig, own: GenerationConfig | None, spec: TargetSpec) -> Selection:
    """What ``config`` comes to for a target like ``spec`` whose checkpoint brings the generation settings ``own``.

    Raises:
        SelectionError: a setting that no node of a draft tree can honour on its own, or an unusable value of one.
    """
    theirs = own.to_diff_dict() if own is not None else {}
    asked, samples = asked_for(theirs), bool(theirs.get("do_sample"))
    applied, set_aside = {}, ()
    if config.generation_config == "target":
        where = "the target's generation_config (decode.generation_config=none sets it aside)"
        require_per_path(asked, where)
        applied = asked
        if samples and theirs.get("top_k") is None:
            applied["top_k"] = _DEFAULT_TOP_K
    else:
        set_aside = tuple(sorted(name for name in asked if samples or name not in WARPERS))
        samples = False
        if set_aside:
            log.info("generation settings of the checkpoint are set aside in all loops: %s", ", ".join(set_aside))
    applied |= dict(config.processors)
    explicit = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    applied |= {name: value for name, value in explicit.items() if value is not None}
    sampled = (samples or config.temperature is not None) and applied.get("temperature", 1.0) >= LOWEST_TEMPERATURE
    settings = {name: value for name, value in asked_for(applied).items() if sampled or name not in WARPERS}
    require_valid(settings, spec, "the selection of tokens")
    return Selection(settings, sampled, config.seed, config.generation_config, set_aside)


class GumbelNoise:
    """Gumbel noise of one place of an answer after the other, by the seed and the request's key alone."""

    def __init__(self, seed: int, key: str, device: torch.device) -> None:
        digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
        self._generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)

    def draw(self, size: int) -> Tensor:
        """[size] float64: in fp32 the tail would end at tokens of probability 1e-7."""
        generator = self._generator
        waiting = torch.empty(size, dtype=torch.float64, device=generator.device).exponential_(generator=generator)
        return waiting.clamp_min_(torch.finfo(waiting.dtype).tiny).log_().neg_()


class _Argmax:
    """The argmax of the model's own logits: all rows of a tree at once, and no text to remember."""

    def select(self, logits: Tensor) -> Tensor:
        return greedy(logits)

    def along(self, logits: Tensor) -> Callable[[int], int]:
        return greedy(logits).tolist().__getitem__

    def follow(self, tokens: Sequence[int]) -> None:
        pass

    def scores(self, logits: Tensor) -> Tensor:
        return logits


class _Processed:
    """Processors on the text so far, and noise if the answer is sampled."""

    def __init__(self, processors: Sequence[LogitsProcessor], noise: GumbelNoise | None, prompt: Tensor) -> None:
        self._processors = processors
        self._noise = noise
        self._text = prompt[None]
        #: Noise of the place behind the text, and for which length of the text it was drawn.
        self._drawn: Tensor | float = 0.0
        self._places = prompt.shape[0] - 1

    def select(self, logits: Tensor) -> Tensor:
        token = greedy(self.scores(logits))
        self._append(token)
        return token

    def along(self, logits: Tensor) -> Callable[[int], int]:
        return lambda row: int(self.select(logits[row : row + 1]))

    def follow(self, tokens: Sequence[int]) -> None:
        self._append(torch.tensor(tokens, dtype=torch.int64, device=self._text.device))

    def scores(self, logits: Tensor) -> Tensor:
        scores = logits.float()  # as transformers does, whatever the model computes in
        for processor in self._processors:
            scores = processor(self._text, scores)  # type: ignore[arg-type]
        if self._noise is None:
            return scores
        while self._places < self._text.shape[1]:
            self._drawn = self._noise.draw(scores.shape[-1])
            self._places += 1
        return scores.double() + self._drawn

    def _append(self, tokens: Tensor) -> None:
        self._text = torch.cat([self._text, tokens[None]], dim=1)
