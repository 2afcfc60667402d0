"""Checkpoint folders: finding one, reading single tensors out of it, and telling one from another by its weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from fovea.targets.head import TargetHead
from fovea.targets.remote_code import remote_code_refused

# Names under which checkpoints keep the three tensors; save formats and transformers versions nest them differently.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.", "model.text_model.")
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
_NORMS = tuple(f"{prefix}norm.weight" for prefix in _PREFIXES)
_LM_HEADS = tuple(f"{prefix}lm_head.weight" for prefix in _PREFIXES)
# Tensors of the language model under any of these names; what is left is what the target sees with.
_LANGUAGE = re.compile(r"(.*\.)?(language_model|text_model|lm_head)\.|(model\.)?(layers|embed_tokens|norm)\.")

# How a Git-LFS pointer begins, which a clone without LFS leaves in the place of a large file.
_POINTER = b"version https://git-lfs"

# What torch's restricted unpickler says of a function or class that is no part of a tensor.
_CODE = re.compile(r"GLOBAL ([\w.]+)")

# Files up to this size are hashed whole; of a larger one, its first megabyte and one of every 32.
_WHOLE_FILE = 256 << 20
_BLOCK, _STRIDE = 1 << 20, 32 << 20


class CheckpointError(FileNotFoundError):
    """A checkpoint, or a part of it, that is not there or damaged; the message names it and the remedy."""

    def __str__(self) -> str:
        return str(self.args[0])


def resolve_checkpoint(
    path: str | Path | None, hub_id: str | None = None, revision: str | None = None, *, download: bool = False
) -> Path:
    """The local folder of a checkpoint: ``path``, else the copy of ``hub_id`` in the hub's cache.

    Raises:
        CheckpointError: one sentence that names what is missing and ``model.path=``; many gigabytes are fetched only
            with ``download``.
    """
    if path is not None:
        return _complete(Path(path).expanduser())
    if hub_id is None:
        raise CheckpointError("no checkpoint is named; point to a local copy with model.path=<folder>")
    at = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        return _complete(Path(snapshot_download(hub_id, revision=revision, local_files_only=not download)))
    except Exception as error:  # the hub's errors for a missing entry, no network and no access differ by version
        failed = f"could not be downloaded ({type(error).__name__})" if download else "are not in the local hub cache"
        otherwise = "" if download else ", or fetch them with model.download=true"
        raise CheckpointError(
            f"the weights of {at} {failed}; point to a local copy with model.path=<folder>{otherwise}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in order of name: safetensors if there are any, else .bin.

    Raises:
        CheckpointError: none, or one that the index names is not there.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            named = read_settings(folder / index).get("weight_map")
            if not isinstance(named, dict) or not named:
                raise damaged(folder / index, "names no weight files (weight_map)")
            names = sorted(set(named.values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"'{folder}' lacks {len(missing)} of its {len(names)} weight files, {missing[0]} among them; "
                    "complete the download or point to another copy with model.path=<folder>"
                )
            return [folder / name for name in names]
        if (folder / single).is_file():
            return [folder / single]
    raise CheckpointError(
        f"'{folder}' holds no weights (model.safetensors or pytorch_model.bin, whole or in shards); "
        "point to a complete copy with model.path=<folder>"
    )


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is cut off, something else, or no text.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(file, f"is no whole JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged(file, "holds no JSON object")
    return content


def require_whole(files: Iterable[Path]) -> None:
    """Refuses weight files that cannot be read, without reading their tensors.

    Raises:
        CheckpointError: a file is empty, cut off, holds something else than tensors, or is a Git-LFS pointer that
            stands for it.
    """
    for file in files:
        tensor_readers(file)


def tensor_readers(file: Path) -> dict[str, Callable[[], Tensor]]:
    """The names of the tensors in a weight file, and what reads each of them; none is read yet, and no code is run.

    Raises:
        CheckpointError: the file is empty, cut off, of another kind, holds something else than tensors, or is a Git-LFS
            pointer that stands for it.
    """
    with file.open("rb") as beginning:
        start = beginning.read(len(_POINTER))
    if start == _POINTER:
        raise CheckpointError(
            f"'{file}' is a Git-LFS pointer and not the weights; fetch them with git lfs pull in "
            f"'{file.parent}', or point to another copy with model.path=<folder>"
        )
    if not start:
        raise damaged(file, "is cut off: it is empty")
    if file.suffix == ".safetensors":
        try:
            stream = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise damaged(file, f"is cut off or no safetensors file ({error})") from error
        return {name: partial(stream.get_tensor, name) for name in stream.keys()}  # noqa: SIM118 - no dictionary
    try:
        # Only an archive can be mapped; before torch 1.6 there were others.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # an unpickler fails in as many ways as a file can be damaged
        if code := _CODE.search(str(error)):
            raise damaged(file, f"would run code when it is read ({code[1]}), which is never done") from error
        raise damaged(file, "is cut off or no weight file of torch") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise damaged(file, "holds something else than tensors by name")
    return {name: tensor.clone for name, tensor in state.items()}


def damaged(file: Path, what: str) -> CheckpointError:
    """The error for a ``file`` of a checkpoint that is not as it was saved."""
    return CheckpointError(f"'{file}' {what}; fetch this file again, or point to another copy with model.path=<folder>")


def load_head(path: str | Path, *, dtype: torch.dtype) -> TargetHead:
    """Embedding, LM head and final norm weight of the checkpoint in folder ``path``; reads nothing else of it.

    Raises:
        CheckpointError: the folder or one of the tensors is missing.
        UnsupportedTargetError: only code of the folder's own could read its configuration.
    """
    folder = _complete(Path(path))
    found = _read_tensors(weight_files(folder), frozenset((*_EMBEDDINGS, *_NORMS, *_LM_HEADS)).__contains__)
    embedding = _one(found, _EMBEDDINGS, "input embedding", folder).to(dtype)
    norm = _one(found, _NORMS, "final norm weight", folder).to(dtype)
    with remote_code_refused(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.tie_word_embeddings:
        return TargetHead(embedding, embedding, norm)
    return TargetHead(embedding, _one(found, _LM_HEADS, "LM head", folder).to(dtype), norm)


def load_sight(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint in folder ``path`` that are not its language model's, by name; reads no others.

    Raises:
        CheckpointError: the folder or a weight file is missing.
    """
    return _read_tensors(weight_files(_complete(Path(path))), lambda name: _LANGUAGE.match(name) is None)


def weights_fingerprint(path: str | Path) -> str:
    """A hash of the weights in folder ``path``: of sizes and contents, of large files a fixed sample of blocks.

    Two checkpoints of the same model that were trained differently differ in it; it is no protection against forgery.
    """
    digest = hashlib.sha256()
    for file in weight_files(Path(path)):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE:
                while block := stream.read(_BLOCK):
                    digest.update(block)
            else:
                for start in range(0, size, _STRIDE):
                    stream.seek(start)
                    digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


def _complete(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder '{folder}'; point model.path=<folder> to a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"'{folder}' has no config.json; point model.path=<folder> to a checkpoint folder")
    weight_files(folder)
    return folder


def _read_tensors(files: Iterable[Path], wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Those of the tensors in ``files`` whose names are ``wanted``; all files are looked at before one is read."""
    opened = [tensor_readers(file) for file in files]
    return {name: read() for readers in opened for name, read in readers.items() if wanted(name)}


def _one(found: dict[str, Tensor], names: tuple[str, ...], what: str, folder: Path) -> Tensor:
    for name in names:
        if name in found:
            return found[name]
    raise CheckpointError(f"'{folder}' holds no {what} (looked for {names[1]} and the like); is it a complete target?")
