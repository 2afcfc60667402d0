"""Whether a model computes what our forward pass computes, for models that no test knows.

We call a model's decoder layers ourselves. A model that does more than that, such as scaling its embeddings or its
logits, would decode without an error, and wrongly: both loops would do it alike, so that no comparison of the two shows
it. Text is enough to tell, for a VLM's pictures only replace some of its embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    text = torch.tensor([token for token in range(spec.vocab_size) if token not in spec.placeholder_ids])
    ids = text[torch.randint(text.shape[0], (8 + len(_PARENTS),), generator=generator)]
    prompt, nodes = ids[:8], ids[8:]
    paths = [_path(row) for row in range(len(_PARENTS))]
    try:
        encoded = _encoded(target, prompt)
        state, _ = target.prefill(encoded, 1, draft_rows=len(nodes))
        depths = torch.tensor([len(path) - 1 for path in paths], device=target.device)
        mask = torch.tensor([[column in path for column in range(len(nodes))] for path in paths], device=target.device)
        hidden = target.extend(state, nodes.to(target.device), state.text_positions(depths), mask)
        ours = target.lm_head(hidden).float().cpu()
        target.teach([encoded], [1])
    except Exception as error:  # whatever a foreign model's layers raise when they are called in another way
        raise UnsupportedTargetError(
            f"{_named(target)} cannot be run layer by layer ({type(error).__name__}: {error}); "
            "docs/new_target.md adds an adapter"
        ) from error
    texts = [torch.cat([prompt, nodes[path]])[None].to(target.device) for path in paths]
    theirs = torch.cat([target.model(input_ids=text).logits[:, -1].float().cpu() for text in texts])
    worst = float((ours - theirs).abs().max() / theirs.std())
    if not worst <= _TOLERANCE.get(target.dtype, _HALF_TOLERANCE):
        raise UnsupportedTargetError(
            f"{_named(target)} computes more than its embeddings, layers, norm and head: the logits of its own "
            f"forward pass differ by {worst:.2g} standard deviations; docs/new_target.md adds an adapter"
        )


def _named(target: HFTarget) -> str:
    """The architecture, and the language model inside where that is another."""
    config: Any = target.model.config
    text = config.get_text_config()
    return target.spec.architecture + ("" if text is config else f" around a {text.model_type}")


def _path(row: int) -> list[int]:
    """Rows from the root to ``row``."""
    return [*_path(_PARENTS[row]), row] if row >= 0 else []


def _encoded(target: HFTarget, ids: torch.Tensor) -> Encoded:
    """``ids`` as a prompt whose last token counts as an answer."""
    none = torch.zeros(ids.shape[0], dtype=torch.bool)
    positions, following = target.rotary_positions(none, ())
    return Encoded("check", ids, positions, torch.arange(ids.shape[0]) == ids.shape[0] - 1, following, none)
