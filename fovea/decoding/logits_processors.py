"""transformers' logits processors out of generation settings, for one request.

A tree node's logits may be processed like those of any text if the outcome depends on nothing but the text before it.
Settings for which that is not so (beams, a second forward pass, watermarks with a memory) are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from fovea.targets.base import TargetSpec


class SelectionError(ValueError):
    """Generation settings that a draft tree cannot be decoded with; the message names the setting and the remedy."""


@dataclass(frozen=True)
class Request:
    """What processors need to know of a request.

    Attributes:
        prompt: [1, T] ids.
        eos: [e] end tokens; none for an answer that only the cap ends.
        cap: most new tokens.
        min_new_tokens: as set, because it takes the place of ``min_length``.
        forced_bos: whether a first token is forced.
    """

    prompt: Any
    eos: Tensor
    cap: int
    min_new_tokens: int | None = None
    forced_bos: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.shape[1]

    @property
    def begin(self) -> int:
        """Length of the text before the first token that was not forced."""
        return self.length + (self.forced_bos and self.length == 1)


@dataclass(frozen=True)
class Rule:
    """How a setting becomes a processor; None and ``off`` ask for none."""

    make: Callable[[Any, Request], LogitsProcessor]
    off: Any = None


#: Settings that apply to every answer, in the order in which transformers applies them.
PROCESSORS: dict[str, Rule] = {
    "sequence_bias": Rule(lambda value, _: hf.SequenceBiasLogitsProcessor(value)),
    "encoder_repetition_penalty": Rule(
        lambda value, request: hf.EncoderRepetitionPenaltyLogitsProcessor(float(value), request.prompt), 1.0
    ),
    "repetition_penalty": Rule(lambda value, _: hf.RepetitionPenaltyLogitsProcessor(float(value)), 1.0),
    "no_repeat_ngram_size": Rule(lambda value, _: hf.NoRepeatNGramLogitsProcessor(value), 0),
    "encoder_no_repeat_ngram_size": Rule(
        lambda value, request: hf.EncoderNoRepeatNGramLogitsProcessor(value, request.prompt), 0
    ),
    "bad_words_ids": Rule(lambda value, request: hf.NoBadWordsLogitsProcessor(value, request.eos)),
    "min_length": Rule(
        lambda value, request: hf.MinLengthLogitsProcessor(
            value if request.min_new_tokens is None else 0, request.eos, device=str(request.eos.device)
        ),
        0,
    ),
    "min_new_tokens": Rule(
        lambda value, request: hf.MinNewTokensLengthLogitsProcessor(
            request.length, value, request.eos, device=str(request.eos.device)
        ),
        0,
    ),
    "forced_bos_token_id": Rule(lambda value, _: hf.ForcedBOSTokenLogitsProcessor(value)),
    "forced_eos_token_id": Rule(
        lambda value, request: hf.ForcedEOSTokenLogitsProcessor(
            request.length + request.cap, value, device=str(request.eos.device)
        )
    ),
    "remove_invalid_values": Rule(lambda _, __: hf.InfNanRemoveLogitsProcessor(), False),
    "exponential_decay_length_penalty": Rule(
        lambda value, request: hf.ExponentialDecayLengthPenalty(tuple(value), request.eos, request.length)
    ),
    "suppress_tokens": Rule(
        lambda value, request: hf.SuppressTokensLogitsProcessor(value, device=str(request.eos.device))
    ),
    "begin_suppress_tokens": Rule(
        lambda value, request: hf.SuppressTokensAtBeginLogitsProcessor(
            value, request.begin, device=str(request.eos.device)
        )
    ),
    # Last of all in transformers, behind the warpers, to whom it makes no difference.
    "renormalize_logits": Rule(lambda _, __: hf.LogitNormalization(), False),
}

#: Settings that apply to sampled answers only, in transformers' order; they come behind the others.
WARPERS: dict[str, Rule] = {
    "temperature": Rule(lambda value, _: hf.TemperatureLogitsWarper(float(value)), 1.0),
    "top_h": Rule(lambda value, _: hf.TopHLogitsWarper(float(value))),
    "top_k": Rule(lambda value, _: hf.TopKLogitsWarper(value), 0),
    "top_p": Rule(lambda value, _: hf.TopPLogitsWarper(float(value)), 1.0),
    "min_p": Rule(lambda value, _: hf.MinPLogitsWarper(float(value))),
    "typical_p": Rule(lambda value, _: hf.TypicalLogitsWarper(float(value)), 1.0),
    "epsilon_cutoff": Rule(lambda value, _: hf.EpsilonLogitsWarper(float(value)), 0.0),
    "eta_cutoff": Rule(lambda value, request: hf.EtaLogitsWarper(float(value), device=str(request.eos.device)), 0.0),
}

#: Settings that choose no token: caps and end tokens, which the loops have from elsewhere, the cache, what is returned,
#: how beams are ranked, and speculative decoding by transformers itself.
_WITHOUT_INFLUENCE = {
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
    "use_mtp",
}

#: Values of settings that we do not honour at which they ask for nothing.
_OFF = {
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "token_healing": False,
}


def asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of transformers' generation ``settings`` that change which tokens are generated."""
    off = {name: rule.off for name, rule in (PROCESSORS | WARPERS).items()} | _OFF
    return {
        name: value
        for name, value in settings.items()
        if name not in _WITHOUT_INFLUENCE and value is not None and value != off.get(name)
    }


def require_per_path(settings: Mapping[str, Any], where: str) -> None:
    """Refuses what cannot be honoured node by node.

    Raises:
        SelectionError: for the first of ``settings`` that is neither in :data:`PROCESSORS` nor in :data:`WARPERS`.
    """
    known = sorted({*PROCESSORS, *WARPERS})
    for name, value in settings.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f" (did you mean '{close[0]}'?)" if close else ""
            raise SelectionError(
                f"{where} asks for {name}={value!r}, which cannot be applied to a draft tree node by node{meant}; "
                f"these can: {', '.join(known)}"
            )


def make(
    rules: Mapping[str, Rule], settings: Mapping[str, Any], prompt: Tensor, eos: Tensor, cap: int
) -> list[LogitsProcessor]:
    """The processors of one request that ``settings`` ask for, in the order of ``rules``.

    Args:
        rules: :data:`PROCESSORS` or :data:`WARPERS`.
        settings: by transformers' names.
        prompt: [1, T] ids.
        eos: [e] end tokens.
        cap: most new tokens.
    """
    forced_bos = settings.get("forced_bos_token_id") is not None
    request = Request(prompt, eos, cap, settings.get("min_new_tokens"), forced_bos)
    wanted = asked_for(settings)
    return [rule.make(wanted[name], request) for name, rule in rules.items() if name in wanted]


def require_valid(settings: Mapping[str, Any], spec: TargetSpec, where: str) -> None:
    """Makes and runs every processor once for a target like ``spec``: what transformers refuses is refused before any
    work.

    Raises:
        SelectionError: for the first of ``settings`` that is refused.
    """
    prompt: Any = torch.zeros(1, 2, dtype=torch.int64)
    eos = torch.tensor(spec.eos_ids, dtype=torch.int64)
    for name, value in settings.items():
        try:
            for rules in (PROCESSORS, WARPERS):
                for processor in make(rules, {name: value}, prompt, eos, cap=1):
                    processor(prompt, torch.zeros(1, spec.vocab_size))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise SelectionError(f"{where} asks for {name}={value!r}, which is refused: {error}") from error
