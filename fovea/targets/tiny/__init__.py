"""The embedded default target: a small Qwen2.5-VL that the project trains itself on pictures it draws itself."""

from fovea.targets.tiny.builder import build
from fovea.targets.tiny.config import TinyConfig

__all__ = ["TinyConfig", "build"]
