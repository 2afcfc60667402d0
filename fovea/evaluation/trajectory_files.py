"""Trajectories as files: ``trajectories.jsonl``, an answer per line, and the pictures beside it in ``trajectories/``.

Token texts are written out, so that whoever shows them needs no tokenizer; weights of evidence are sparse.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fovea.evaluation.json_lines import RecordError, read_lines, required
from fovea.evaluation.trajectory import Trajectory, TrajectoryRound
from fovea.files import write_bytes, write_text
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.images import open_image

TRAJECTORIES, PICTURES = "trajectories.jsonl", "trajectories"

#: Most pixels of a kept picture's longer side.
_LONGEST = 512

#: What a record and each of its rounds must have to be shown.
_FIELDS: dict[str, type] = {"key": str, "question": str, "finish": str} | dict.fromkeys(
    ("pictures", "grids", "views", "texts", "rounds"), list
)
_ROUND = ("position", "committed", "accepted", "parents", "texts", "log_probs", "choice_texts", "evidence")

#: Text of token ids.
Decode = Callable[[Sequence[int]], str]


def save_trajectories(
    folder: Path, kept: Sequence[tuple[Conversation, Encoded, Trajectory]], decode: Decode
) -> list[dict[str, Any]]:
    """Writes the trajectories ``kept``, with their prompts as asked and as encoded; returns the records.

    A record holds ``key``, ``source``, ``method``, ``finish``, ``question``; ``pictures``, file names seen from
    ``folder``; ``grids`` and ``views`` of visual tokens as in :class:`fovea.targets.base.Encoded`; ``tokens`` and
    ``texts`` of the answer; and ``rounds``, of which :func:`_round` says what is in it.
    """
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    pieces = _Pieces(decode)
    records = []
    for number, (prompt, encoded, trajectory) in enumerate(kept):
        trace = trajectory.trace
        pictures = []
        for place, source in enumerate(prompt.images):
            content, suffix = _small_file(open_image(source))
            pictures.append(f"{PICTURES}/{number}-{place}.{suffix}")
            write_bytes(folder / pictures[-1], content)
        views = [{"image": v.image, "box": list(v.box), "line_ends": v.line_ends} for v in encoded.views]
        records.append(
            {
                "key": trace.key,
                "source": trace.source,
                "method": trace.method,
                "finish": trace.finish,
                "question": question_of(prompt),
                "pictures": pictures,
                "grids": [list(grid) for grid in encoded.grids],
                "views": views or [{"image": i, "box": [0, 0, 1, 1], "line_ends": 0} for i in range(len(pictures))],
                "tokens": trace.tokens,
                "texts": pieces.along(trace.tokens),
                "rounds": [_round(one, pieces) for one in trajectory.rounds],
            }
        )
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_text(folder / TRAJECTORIES, "".join(lines))
    return records


def has_trajectories(folder: Path) -> bool:
    """Whether :func:`save_trajectories` wrote into ``folder``."""
    return (folder / TRAJECTORIES).is_file()


def load_trajectories(folder: Path) -> list[dict[str, Any]]:
    """The records that :func:`save_trajectories` wrote into ``folder``; none where there is no such file.

    Raises:
        RecordError: a record, or a picture that it names, is damaged or missing.
    """
    if not has_trajectories(folder):
        return []
    records = []
    for where, record in read_lines(folder / TRAJECTORIES):
        for name, kind in _FIELDS.items():
            required(record, name, kind, where)
        for place, one in enumerate(record["rounds"]):
            for name in _ROUND:
                required(one, name, object, f"{where}, rounds[{place}]")
        for name in record["pictures"]:
            _require_picture(folder / str(name), where)
        records.append(record)
    return records


def _require_picture(path: Path, where: str) -> None:
    try:
        with Image.open(path) as image:
            image.verify()
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise RecordError(f"{where}: the picture {path} cannot be read, {error}") from None


def question_of(prompt: Conversation) -> str:
    """Text of the last message."""
    content = prompt.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


def _round(one: TrajectoryRound, pieces: _Pieces) -> dict[str, Any]:
    """A round in plain types.

    ``parents``, ``tokens`` and ``texts`` of the tree's rows, the root first; ``log_probs``, cumulative, null where the
    drafter knows none; ``choices`` and ``choice_texts``, the target's most probable token behind each row; ``accepted``
    rows; ``committed`` tokens; ``position`` in the answer; ``evidence``: row, selected cells and their weights.
    """
    tree = one.tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    above = [tokens[max(parent, 0)] for parent in parents]
    return {
        "position": one.position,
        "committed": one.committed,
        "accepted": one.accepted,
        "tokens": tokens,
        "parents": parents,
        "texts": [pieces.after(before, token) for before, token in zip(above, tokens, strict=True)],
        "log_probs": [_short(value) for value in tree.log_probs.tolist()] if one.has_probabilities else None,
        "choices": one.choices,
        "choice_texts": [pieces.after(before, token) for before, token in zip(tokens, one.choices, strict=True)],
        "evidence": [_sparse(row, weights) for row, weights in one.evidence.items()],
    }


def _sparse(row: int, weights: np.ndarray) -> dict[str, Any]:
    cells = np.flatnonzero(weights)
    return {
        "row": row,
        "entries": len(weights),
        "cells": cells.tolist(),
        "weights": [_short(value) for value in weights[cells].tolist()],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


class _Pieces:
    """Texts of single tokens, with the space that a tokenizer puts before a word only where one stands before it."""

    def __init__(self, decode: Decode) -> None:
        self._decode_all = decode
        self._decode = cache(lambda ids: decode(list(ids)))

    def after(self, before: int, token: int) -> str:
        """What ``token`` adds to the text behind the token ``before``."""
        text, both = self._decode((before,)), self._decode((before, token))
        return both[len(text) :] if both.startswith(text) and len(both) > len(text) else self._decode((token,))

    def along(self, tokens: Sequence[int]) -> list[str]:
        """What each of ``tokens`` adds to the text; a character that takes several stands at its last."""
        shown, pieces = "", []
        for count in range(1, len(tokens) + 1):
            text = self._decode_all(tokens[:count])
            unfinished = text.endswith("\ufffd") and count < len(tokens)
            pieces.append("" if unfinished else text[len(shown) :])
            shown += pieces[-1]
        return pieces


def _small_file(image: Image.Image) -> tuple[bytes, str]:
    """The picture, not larger than it must be: encoded, and the suffix of the shorter of two formats."""
    small = image.copy()
    small.thumbnail((_LONGEST, _LONGEST))
    found = []
    for suffix, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85})):
        stream = io.BytesIO()
        small.save(stream, format=suffix, **options)
        found.append((stream.getvalue(), suffix))
    return min(found, key=lambda entry: len(entry[0]))
