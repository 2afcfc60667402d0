"""Where the pictures of a text stand, and which tokens ask about each.

Legend: ``T`` tokens, ``q`` tokens of a question.

A target marks its visual tokens and nothing else, so a run of them counts as one picture: two pictures without a token
between them are one, and tiles with text between them are several.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pictures(is_visual: Tensor) -> list[tuple[int, int]]:
    """First place and end of each run of visual tokens in ``is_visual`` [T] bool."""
    steps = F.pad(is_visual.cpu().to(torch.int8), (1, 1)).diff()
    starts, ends = ((steps == step).nonzero()[:, 0].tolist() for step in (1, -1))
    return list(zip(starts, ends, strict=True))


def questions(is_visual: Tensor, answer_mask: Tensor | None) -> list[Tensor]:
    """For each picture the places [q] of the tokens that ask about it, on the host; q >= 1.

    They are the text behind the picture and before the first answer that follows, so a prompt and the conversation that
    grows out of it have the same. Where there is no such text, all tokens before that answer are taken.

    Args:
        is_visual: [T] bool.
        answer_mask: [T] bool over tokens of answers; None if there are none.
    """
    is_visual = is_visual.cpu()
    answered = torch.zeros_like(is_visual) if answer_mask is None else answer_mask.cpu()
    asking = ~is_visual & ~answered
    places = torch.arange(len(is_visual))
    answers = answered.nonzero()[:, 0]
    out = []
    for _, end in pictures(is_visual):
        later = answers[answers >= end]
        before = int(later[0]) if len(later) else len(is_visual)
        asked = places[end:before][asking[end:before]]
        out.append(asked if len(asked) else places[:before])
    return out
