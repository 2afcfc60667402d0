"""When an answer ends: the stop rules that every decoding loop shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fovea.targets.base import Encoded, TargetSpec


def token_cap(spec: TargetSpec, encoded: Encoded, max_new_tokens: int) -> int:
    """``max_new_tokens``, or fewer so that prompt and answer fit the target's context.

    Raises:
        ValueError: no token was asked for, or the prompt alone fills the context.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but an answer has at least 1 token")
    prompt = encoded.ids.shape[0]
    if prompt >= spec.max_positions:
        raise ValueError(
            f"the prompt of '{encoded.key}' has {prompt} tokens and leaves no room for an answer in the target's "
            f"context of {spec.max_positions}: shorten the text or use smaller pictures"
        )
    return min(max_new_tokens, spec.max_positions - prompt)


def cut(tokens: Sequence[int], eos_ids: Collection[int], remaining: int) -> tuple[list[int], str]:
    """What is committed of ``tokens`` when ``remaining`` >= 1 more are allowed, and why the answer ends there.

    The first end token is kept and ends the answer (``eos``, also if the cap falls on it); else the cap ends it
    (``cap``); else it goes on (an empty string).
    """
    for count, token in enumerate(tokens[:remaining], start=1):
        if token in eos_ids:
            return list(tokens[:count]), "eos"
    return list(tokens[:remaining]), "cap" if len(tokens) >= remaining else ""
