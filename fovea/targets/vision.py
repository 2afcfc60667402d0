"""What a target sees with, without the rest of it: pictures to inputs of its vision tower, and these to visual tokens.

Both are the target's own adapter over a model whose decoder has no layers, so nothing is computed in another way than
the whole target computes it. Of the checkpoint only vision tower and projector are read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from fovea.targets.checkpoint import CheckpointError, load_sight
from fovea.targets.conversation import StoredImage
from fovea.targets.hf import HFTarget
from fovea.targets.images import open_image
from fovea.targets.load import read_config
from fovea.targets.processor import read_processor
from fovea.targets.quantised import require_quantizer
from fovea.targets.spec import UnsupportedTargetError


class PictureReader:
    """Makes what the vision tower of a checkpoint takes out of encoded pictures, on the CPU and without weights.

    It is made in the process that first reads a picture, so that loader workers may be sent one.

    Args:
        checkpoint: folder of the target.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._adapter = checkpoint, None

    def read(self, key: str, pictures: Sequence[Tensor]) -> dict[str, Tensor]:
        """Inputs of the vision tower for all ``pictures`` of the sample ``key``; those of samples join along axis 0.

        A picture is [bytes] uint8, encoded.

        Raises:
            BrokenImageError: one of them cannot be decoded.
        """
        if not pictures:
            return {}
        if self._adapter is None:
            self._adapter = _blind(self._checkpoint)
        named = [
            StoredImage(f"{number} of sample {key}", content.numpy().tobytes)
            for number, content in enumerate(pictures, 1)
        ]
        return self._adapter.read_images([open_image(picture) for picture in named]).vision

    def __getstate__(self) -> dict[str, Any]:
        """The checkpoint's folder alone."""
        return self.__dict__ | {"_adapter": None}


def load_vision(checkpoint: Path, *, device: torch.device | str, dtype: torch.dtype) -> HFTarget:
    """The target in folder ``checkpoint`` as far as it sees: its :meth:`~HFTarget.visual_tokens` are the whole one's.

    Raises:
        UnsupportedTargetError: it reads text only.
        CheckpointError: there are no weights, or no vision tower and projector among them.
    """
    require_sight(checkpoint)
    require_quantizer(checkpoint)
    config, adapter = read_config(checkpoint)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would report the language model as missing
    try:
        model, loading = adapter.model_class.from_pretrained(
            None,
            config=_without_language(config),
            state_dict=load_sight(checkpoint),
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            trust_remote_code=False,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    spoken = (model.get_decoder(), model.get_output_embeddings())
    language = {id(weight) for part in spoken for weight in part.parameters()}
    parts = {name for name, weight in model.named_parameters() if id(weight) not in language}
    if absent := sorted(parts & set(loading["missing_keys"])):
        raise CheckpointError(
            f"'{checkpoint}' lacks {len(absent)} tensors of its vision tower and projector, {absent[0]} among them; "
            "point to a complete copy with model.path=<folder>"
        )
    return _adapted(checkpoint, config, adapter, model.to(device))


def require_sight(checkpoint: Path) -> None:
    """Refuses a target that reads text only, from its configuration alone.

    Raises:
        UnsupportedTargetError: it has no vision tower.
    """
    config, _ = read_config(checkpoint)
    if config.get_text_config() is config:
        raise UnsupportedTargetError(
            f"visual=recomputed runs the target's vision tower again, and '{checkpoint}' reads text only; "
            "export with visual=stored"
        )


def _blind(checkpoint: Path) -> HFTarget:
    """The adapter of a model without any weights; it reads pictures and sees none."""
    config, adapter = read_config(checkpoint)
    with torch.device("meta"):
        model = adapter.model_class._from_config(_without_language(config))
    return _adapted(checkpoint, config, adapter, model)


def _adapted(checkpoint: Path, config: Any, adapter: type[HFTarget], model: Any) -> HFTarget:
    processor = read_processor(checkpoint, adapter.processor_class)
    return adapter(model, processor, adapter.read_spec(config, (0,)))


def _without_language(config: Any) -> Any:
    """``config`` with a decoder of no layers and hardly any vocabulary, of the same width."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return config
