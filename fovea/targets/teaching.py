"""What a target teaches a drafter: its last states, mid states and visual tokens over complete
conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fovea.targets.base import Encoded
from fovea.targets.feature_layers import tap
from fovea.targets.importance import ImportanceProbe
from fovea.targets.mid_states import MidSide, MidStateSelector, check_mid_layers
from fovea.targets.padding import pad
from fovea.targets.teacher_batch import TeacherSample

if TYPE_CHECKING:
    from fovea.targets.hf import HFTarget


@torch.no_grad()
def teach(
    target: HFTarget,
    batch: Sequence[Encoded],
    mid_layers: Sequence[int],
    mid_side: MidSide,
    feature_layers: Sequence[int] = (),
) -> list[TeacherSample]:
    """See :meth:`fovea.targets.base.Target.teach`.

    The batch is padded on the right: behind a causal mask no token sees the padding.
    """
    check_mid_layers(mid_layers, target.spec.num_layers)
    padded = pad(batch, "right", target.device)
    visual_ND = target.read_visual(batch)
    selector = MidStateSelector(padded.supervised, mid_layers, mid_side)
    probe = ImportanceProbe(padded.is_visual, padded.supervised, [len(encoded.ids) for encoded in batch])
    embeds_BTD = target.merge(padded.ids, padded.is_visual, visual_ND)
    features = tap(feature_layers, target.spec.num_layers)
    watched = {"selector": selector, "last_probe": probe, "features": features}
    last_BTD = target.run_layers(embeds_BTD, padded.positions, None, **watched)
    features_BTF = None if features is None else features.states()
    mids = selector.states().split(padded.supervised.sum(1).tolist())
    visuals = visual_ND.split(padded.is_visual.sum(1).tolist())
    return [
        TeacherSample(
            key=encoded.key,
            ids=encoded.ids,
            positions=encoded.positions,
            answer_mask=encoded.answer_mask,
            is_visual=encoded.is_visual,
            last=last_BTD[row, : encoded.ids.shape[0]].clone(),
            mid=mid.clone(),
            visual=visual.clone(),
            grids=encoded.grids,
            importance=probe.importance(row),
            features=None if features_BTF is None else features_BTF[row, : encoded.ids.shape[0]].clone(),
            feature_layers=tuple(feature_layers),
        )
        for row, (encoded, mid, visual) in enumerate(zip(batch, mids, visuals, strict=True))
    ]
