"""Whether a model computes what our forward pass computes, for architectures that nobody has tested.

We call a model's decoder layers ourselves. A model that does more than that, such as scaling its embeddings or its
logits, would decode without an error, and wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fovea.targets.base import Encoded
from fovea.targets.spec import UnsupportedTargetError

if TYPE_CHECKING:
    from fovea.targets.hf import HFTarget

#: Parents of a small draft tree: a root, two children, and a child of the first.
_PARENTS = (-1, 0, 0, 1)

#: Largest difference of logits, as a share of their standard deviation.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.1


@torch.no_grad()
def check_forward(target: HFTarget) -> None:
    """Compares prefill, a draft tree and teaching with the model's own forward pass over a few tokens.

    Raises:
        UnsupportedTargetError: the logits differ, or the model cannot be run layer by layer.
    """
    spec = target.spec
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(spec.vocab_size, (8 + len(_PARENTS),), generator=generator)
    prompt, nodes = ids[:8], ids[8:]
    paths = [_path(row) for row in range(len(_PARENTS))]
    try:
        encoded = _encoded(prompt)
        state, _ = target.prefill(encoded, 1, draft_rows=len(nodes))
        depths = torch.tensor([len(path) - 1 for path in paths], device=target.device)
        mask = torch.tensor([[column in path for column in range(len(nodes))] for path in paths], device=target.device)
        hidden = target.extend(state, nodes.to(target.device), state.text_positions(depths), mask)
        ours = target.lm_head(hidden).float().cpu()
        target.teach([encoded], [1])
    except Exception as error:  # whatever a foreign model's layers raise when they are called in another way
        raise UnsupportedTargetError(
            f"{spec.architecture} cannot be run layer by layer ({type(error).__name__}: {error}); write an adapter"
        ) from error
    texts = [torch.cat([prompt, nodes[path]])[None].to(target.device) for path in paths]
    theirs = torch.cat([target.model(input_ids=text).logits[:, -1].float().cpu() for text in texts])
    worst = float((ours - theirs).abs().max() / theirs.std())
    if not worst <= _TOLERANCE.get(target.dtype, _HALF_TOLERANCE):
        raise UnsupportedTargetError(
            f"{spec.architecture} computes more than its embeddings, layers, norm and head: the logits of its own "
            f"forward pass differ by {worst:.2g} standard deviations; write an adapter for it"
        )


def _path(row: int) -> list[int]:
    """Rows from the root to ``row``."""
    return [*_path(_PARENTS[row]), row] if row >= 0 else []


def _encoded(ids: torch.Tensor) -> Encoded:
    """``ids`` as a prompt whose last token counts as an answer."""
    tokens = ids.shape[0]
    none = torch.zeros(tokens, dtype=torch.bool)
    return Encoded("check", ids, torch.arange(tokens)[None], torch.arange(tokens) == tokens - 1, tokens, none)
