"""Checkpoints whose weights are quantised, and the packages that read them."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers.quantizers.auto import AutoHfQuantizer

from fovea.targets.checkpoint import read_settings
from fovea.targets.spec import UnsupportedTargetError


def require_quantizer(folder: Path) -> None:
    """Refuses a checkpoint whose quantised weights need a package that is not installed; reads no weights.

    Raises:
        UnsupportedTargetError: naming the method and what transformers says of the package.
    """
    config = read_settings(folder / "config.json")
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    settings = next((found for part in parts if (found := part.get("quantization_config"))), None)
    if not isinstance(settings, dict) or not AutoHfQuantizer.supports_quant_method(settings):
        return
    try:
        AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True).validate_environment(
            device_map=None, weights_only=True
        )
    except ImportError as error:
        method = settings.get("quant_method", "bitsandbytes")
        said = " ".join(str(error).split()).rstrip(".")
        raise UnsupportedTargetError(
            f"the weights in '{folder}' are quantised ({method}) and cannot be read here: {said}; or name a copy that "
            "is not quantised with model.path=<folder>"
        ) from error
    except (RuntimeError, ValueError):
        return  # what else it says depends on the device and is said when the weights are loaded
