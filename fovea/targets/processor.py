"""Reading the processor or tokenizer of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

from fovea.targets.checkpoint import CheckpointError
from fovea.targets.remote_code import remote_code_refused
from fovea.targets.spec import UnsupportedTargetError

_REMEDY = (
    "copy the published model's tokenizer and processor files into it, or point to another copy with "
    "model.path=<folder>"
)


def read_processor(folder: Path, processor_class: Any) -> Any:
    """What ``processor_class`` makes of ``folder``: a processor or a tokenizer.

    Raises:
        CheckpointError: there is none, or a package is missing that reads it. Some kinds transformers then makes up,
            with no word in their vocabulary.
        UnsupportedTargetError: only code of the folder's own could read it.
    """
    try:
        with remote_code_refused(folder):
            processor = processor_class.from_pretrained(folder, trust_remote_code=False)
    except UnsupportedTargetError:
        raise
    except Exception as error:  # it fails in as many ways as there are files of tokenizers
        if package := _missing_package(folder):
            raise CheckpointError(
                f"'{folder}' holds tokenizer.model and no tokenizer.json, and {package}, which reads it, is not "
                f"installed; run pip install {package}"
            ) from error
        what = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"'{folder}' holds no processor or tokenizer that can be read ({what}); {_REMEDY}"
        ) from error
    tokenizer = getattr(processor, "tokenizer", processor)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise CheckpointError(f"'{folder}' holds no tokenizer (tokenizer.json and the like); {_REMEDY}")
    return processor


def _missing_package(folder: Path) -> str | None:
    """The package without which transformers cannot read the one tokenizer file in ``folder``; it speaks of others."""
    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return None
    if not is_sentencepiece_available():
        return "sentencepiece"
    return None if is_protobuf_available() else "protobuf"
