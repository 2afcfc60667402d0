"""The small target once more, loaded by transformers with eager attention: the independent reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from fovea.targets.base import Encoded


@pytest.fixture(scope="session")
def reference_model(small_target_path: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        small_target_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def reference_output(reference_model: Any) -> Callable[..., Any]:
    """``(encoded, more ids, **flags)``: the output of a plain forward over the whole text, positions left to it."""

    def forward(encoded: Encoded, more: Sequence[int] = (), **flags: Any) -> Any:
        ids = torch.cat([encoded.ids, torch.tensor(list(more), dtype=torch.int64)])[None]
        inputs: dict[str, Tensor] = dict(encoded.vision)
        if inputs:
            kinds = torch.zeros_like(ids, dtype=torch.int32)
            kinds[0, : encoded.ids.shape[0]] = encoded.is_visual
            inputs["mm_token_type_ids"] = kinds
        with torch.no_grad():
            return reference_model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **flags)

    return forward
