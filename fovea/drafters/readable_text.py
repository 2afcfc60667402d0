"""The text of a request as drafters that look tokens up may use it: whatever stands for a picture is left out.

A picture is hundreds of equal ids in a row. They would match one another endlessly, and no answer contains them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fovea.targets.base import Prefill

#: Takes the place of every token that may neither be looked for, nor found, nor drafted; no id is negative.
BARRIER = -1


def readable_prompt(prefill: Prefill, placeholder_ids: Collection[int]) -> list[int]:
    """The ids of the prompt, :data:`BARRIER` at image positions and at ``placeholder_ids``."""
    ids, is_visual = prefill.ids.tolist(), prefill.is_visual.tolist()
    return [BARRIER if seen else token for token, seen in zip(readable(ids, placeholder_ids), is_visual, strict=True)]


def readable(ids: Iterable[int], placeholder_ids: Collection[int]) -> list[int]:
    """``ids`` with :data:`BARRIER` at ``placeholder_ids``."""
    return [BARRIER if token in placeholder_ids else token for token in ids]
