"""From a conversation to what the target reads: ids with one placeholder per visual token, positions, vision inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fovea.targets.base import Encoded, View
from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.images import open_image
from fovea.targets.prompting import PromptTokens

if TYPE_CHECKING:
    from fovea.targets.hf import HFTarget

#: Rows and columns.
Grid = tuple[int, int]


@dataclass(frozen=True)
class ReadImages:
    """The pictures of a conversation as a target takes them.

    Attributes:
        vision: inputs of the vision tower, such that those of several conversations may be joined along axis 0.
        grids: see :class:`fovea.targets.base.Encoded`.
        views: likewise, one per grid.
        prompt_ids: per picture, the ids that stand for it in the prompt, a placeholder for each visual token and
            whatever the target reads between them; empty where there are placeholders only.
    """

    vision: dict[str, Tensor] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    views: tuple[View, ...] = ()
    prompt_ids: tuple[Sequence[int], ...] = ()

    def ids_of(self, image: int, placeholder: int) -> Sequence[int]:
        """What stands in the prompt for picture number ``image``."""
        if self.prompt_ids:
            return self.prompt_ids[image]
        shown = zip(self.grids, self.views, strict=True)
        return [placeholder] * sum(rows * columns for (rows, columns), view in shown if view.image == image)


def encode(target: HFTarget, conversation: Conversation, answers: Sequence[Sequence[int]] | None) -> Encoded:
    """See :meth:`fovea.targets.base.Target.encode`.

    Raises:
        PromptError: the chat template cannot render it faithfully, or the target's context does not hold it.
        BrokenImageError: a picture cannot be read.
    """
    tokens = target.prompt.tokens(conversation, answers)
    images = [
        open_image(source, f"image {number} of conversation '{conversation.key}'")
        for number, source in enumerate(conversation.images, 1)
    ]
    try:
        read = target.read_images(images) if images else ReadImages()
    except ValueError as error:
        raise PromptError(f"conversation '{conversation.key}': the image processor says: {error}") from error
    ids, answer_mask, is_visual = _with_visual_tokens(target, tokens, read)
    if len(ids) > target.spec.max_positions:
        raise PromptError(
            f"conversation '{conversation.key}' has {len(ids)} tokens, {int(is_visual.sum())} of them visual, and the "
            f"target's context holds {target.spec.max_positions}; shorten the text or use fewer or smaller pictures"
        )
    positions, next_position = target.rotary_positions(is_visual, read.grids)
    return Encoded(
        key=conversation.key,
        ids=ids,
        positions=positions,
        answer_mask=answer_mask,
        next_position=next_position,
        is_visual=is_visual,
        vision=read.vision,
        grids=read.grids,
        views=read.views,
        image_sizes=tuple(image.size for image in images),
    )


def _with_visual_tokens(target: HFTarget, tokens: PromptTokens, read: ReadImages) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, answer mask and image positions [T]; what stands for each image takes the place of its one placeholder.

    A placeholder that an answer holds is a token like any other.
    """
    ids: list[int] = []
    mask: list[bool] = []
    visual: list[bool] = []
    image = 0
    for token, answered in zip(tokens.ids, tokens.answer_mask, strict=True):
        if token == target.image_token_id and not answered:
            block = read.ids_of(image, token)
            image += 1
        else:
            block = [token]
        ids += block
        mask += [answered] * len(block)
        visual += [one == target.image_token_id and not answered for one in block]
    return torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), torch.tensor(visual, dtype=torch.bool)
