"""What a device can do by itself."""

from __future__ import annotations

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` has a unit for products in bfloat16; torch emulates it elsewhere.

    On a CPU without one a product takes up to a hundred times as long as in float32. A GPU without one still saves
    memory and counts as having it.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type != "cpu" or any(value is True and "bf16" in name for name, value in _cpu_features().items())


def _cpu_features() -> dict[str, object]:
    """Names of the CPU's features; torch before 2.11 tells of x86 alone."""
    if (told := getattr(torch.cpu, "get_capabilities", None)) is not None:
        return dict(told())
    return {
        name: getattr(torch.cpu, f"_is_{tests}_supported", bool)()
        for name, tests in {"avx512_bf16": "avx512_bf16", "amx_bf16": "amx_tile"}.items()
    }
