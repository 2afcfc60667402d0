"""Visual tokens that the target's vision tower makes again of stored pictures, when training reads a batch.

Loader workers decode the pictures and make of them what the tower takes; the tower runs in the training process, on the
device that trains, without a gradient. What comes out is the batch that stored visual tokens would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.artifacts.errors import ArtifactError
from fovea.targets.hf import HFTarget
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.targets.vision import PictureReader


class Unseen(NamedTuple):
    """A batch, and what is needed to complete it.

    Attributes:
        batch: without numbers where visual tokens are to be made.
        rows: [B] bool, the samples whose visual tokens are.
        vision: inputs of the vision tower for all their pictures, in order; empty without pictures.
    """

    batch: TeacherBatch
    rows: Tensor
    vision: dict[str, Tensor]

    def pin_memory(self) -> Unseen:
        """The same in pinned memory, which a GPU copies from while the host goes on."""
        vision = {name: part.pin_memory() for name, part in self.vision.items()}
        return Unseen(self.batch.pin_memory(), self.rows, vision)


class PictureCollate:
    """Makes an :class:`Unseen` batch of samples, of which some may hold pictures in the place of visual tokens.

    Args:
        checkpoint: folder of the target.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = PictureReader(checkpoint)

    def __call__(self, samples: Sequence[TeacherSample]) -> Unseen:
        """The batch; pictures are decoded here."""
        read = [self._reader.read(sample.key, sample.pictures) for sample in samples if sample.pictures]
        vision = {name: torch.cat([part[name] for part in read]) for name in read[0]} if read else {}
        rows = torch.tensor([sample.pictures is not None for sample in samples])
        return Unseen(TeacherBatch.collate(samples), rows, vision)


class Sight:
    """Completes batches.

    Args:
        load: loads the target as far as it sees, called for the first batch with pictures.
    """

    def __init__(self, load: Callable[[], HFTarget]) -> None:
        self._load, self._target = load, None

    @torch.no_grad()
    def __call__(self, unseen: Unseen) -> TeacherBatch:
        """The batch with its visual tokens, which are on the tower's device if it had to make any.

        Raises:
            ArtifactError: the tower makes more or fewer of them than the samples have places.
        """
        batch, rows, vision = unseen
        if not vision:
            return batch
        if self._target is None:
            # The first batch may be one of validation, and weights made in inference mode could not train anything.
            with torch.inference_mode(False):
                self._target = self._load()
        target = self._target
        tokens = target.visual_tokens(
            {name: part.to(target.device, non_blocking=True) for name, part in vision.items()}
        )
        # Places are counted on the host, so that the device is not waited for.
        places = (batch.visual_valid & rows[:, None]).nonzero(as_tuple=True)
        if len(tokens) != len(places[0]):
            raise ArtifactError(
                f"the pictures of the samples {', '.join(batch.keys)} make {len(tokens)} visual tokens now and made "
                f"{len(places[0])} when they were exported; are the processor's files those of the export?"
            )
        visual = batch.visual.to(target.device, non_blocking=True)
        visual[places] = tokens.to(visual.dtype)
        return replace(batch, visual=visual)
