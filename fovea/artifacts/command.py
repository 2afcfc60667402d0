"""The command line of the export: ``python -m fovea.artifacts.export``."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fovea.artifacts.config import WRITERS, ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import export, require_some
from fovea.artifacts.fingerprint import fingerprint_checkpoint
from fovea.artifacts.ranks import rank_in
from fovea.artifacts.schema import STORED_DTYPES, STORED_VISUALS
from fovea.files import DiskFullError, is_full, no_room
from fovea.targets.spec import UnsupportedTargetError

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EXAMPLE = """example:
  python -m fovea.artifacts.export --target /models/Qwen2.5-VL-7B-Instruct --out artifacts/mix \\
      --data datamodules.conversations:JsonlConversations path=mix665k.json image_root=/data/images

Several processes, on any hosts that share the folder, share the work: under torchrun, under srun, or with --rank and
--world-size. The same command resumes a run that was stopped, also in another number of processes, and once all
conversations are done the last process writes the manifest."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses ``arguments`` and exports; a user's error ends it with one sentence and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options = _parser().parse_args(arguments)
    except ArtifactError as error:
        sys.exit(f"error: {error}")
    try:
        _run(options)
    except (ArtifactError, UnsupportedTargetError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {_told(error, options.out)}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the samples so far are in {options.out}, the same command resumes")


def _told(error: OSError, out: Path) -> str:
    """What is said of a file that cannot be read, written or locked."""
    if is_full(error) and not isinstance(error, DiskFullError):
        return no_room(str(error.filename or out), out, error)
    if isinstance(error, FileExistsError | NotADirectoryError) and not out.is_dir():
        return f"--out {out} is no folder, and a file is in its way; name another one"
    if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        return f"{out} lies where files cannot be locked ({error.strerror}), as two exports must be; name a local --out"
    return str(error)


def _run(options: argparse.Namespace) -> None:
    from fovea.targets.load import default_mid_layers, load_spec, load_target
    from fovea.targets.vision import require_sight

    _import_plugins(options.plugin)
    layers = options.mid_layers or default_mid_layers(load_spec(options.target).num_layers)
    try:
        config = ExportConfig(
            mid_layers=tuple(layers),
            feature_layers=tuple(options.feature_layers),
            dtype=options.dtype,
            visual=options.visual,
            answers=options.answers,
            max_new_tokens=options.max_new_tokens,
            max_tokens=options.max_tokens or None,
            batch_size=options.batch_size,
            shard_bytes=options.shard_bytes,
            strict=options.strict,
            writer=options.writer,
        )
    except ValueError as error:
        raise ArtifactError(str(error)) from error
    if config.visual == "recomputed":
        require_sight(options.target)
    conversations = load_source(options.data)
    require_some(conversations)
    fingerprint = fingerprint_checkpoint(options.target, config, conversations.digest())
    dtype = COMPUTE_DTYPES[options.compute_dtype or ("bf16" if options.device.startswith("cuda") else "fp32")]
    target = load_target(options.target, device=options.device, dtype=dtype)
    rank, world_size = options.rank, options.world_size
    manifest = export(target, conversations, options.out, config, fingerprint, rank=rank, world_size=world_size)
    print(
        manifest.summary() if manifest else f"rank {rank} is done; the last of {world_size} ranks writes the manifest"
    )


def _import_plugins(names: Sequence[str]) -> None:
    """Imports modules of the user's own; the working directory is searched too."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ArtifactError(f"--plugin {name}: {error}; start where it lies, or extend PYTHONPATH") from error


def load_source(words: Sequence[str]) -> Any:
    """Conversations from ``module:factory key=value ...``; values are JSON, or else text.

    Raises:
        ArtifactError: if there is no such module or factory, or it does not take these keys.
    """
    name, *settings = words
    module, _, factory = name.partition(":")
    pairs = (setting.partition("=") for setting in settings)
    values = {key: _value(text) for key, _, text in pairs}
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArtifactError(f"--data {name}: {error}; write module:factory key=value ...") from error
    try:
        return make(**values)
    except TypeError as error:
        raise ArtifactError(f"--data {name}: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fovea.artifacts.export",
        description="Stores what a frozen VLM teaches a drafter as webdataset shards.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rank, world_size, local = rank_in(os.environ)
    # srun may show each process only the GPU that is its own.
    device = f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--target", type=Path, required=True, help="checkpoint folder of the target")
    add("--plugin", action="append", default=[], metavar="MODULE", help="module to import first, as of an adapter")
    add("--data", nargs="+", required=True, metavar="SOURCE", help="module:factory, then key=value")
    add("--out", type=Path, required=True, help="folder of the artifacts")
    add("--mid-layers", type=int, nargs="+", help="layers of the mid state (default: the first two fifths, less two)")
    add("--feature-layers", type=int, nargs="+", default=(), help="layers whose outputs are stored too, as for EAGLE-3")
    add("--dtype", choices=STORED_DTYPES, default="bf16", help="stored dtype of the states")
    add("--visual", choices=STORED_VISUALS, default="stored", help="keep visual tokens, or pictures to make them of")
    add("--answers", choices=("target", "dataset"), default="target", help="whose answers the drafter learns")
    add("--max-new-tokens", type=int, default=500, help="cap of the target's answers, in tokens")
    add("--max-tokens", type=int, default=5120, help="leave out longer conversations; 0 takes all")
    add("--batch-size", type=int, default=4, help="conversations per forward pass")
    add("--shard-bytes", type=int, default=1_000_000_000, help="size at which a shard is closed")
    add("--strict", action="store_true", help="stop at a broken picture or unreadable conversation")
    add("--writer", choices=WRITERS, default="auto", help="what writes (auto: a process beside a GPU, else a thread)")
    add("--device", default=device, help="where the target runs")
    add(
        "--compute-dtype", choices=tuple(COMPUTE_DTYPES), help="dtype of the target (default: bf16 on a GPU, else fp32)"
    )
    add("--rank", type=int, default=rank, help="number of this process, from 0")
    add("--world-size", type=int, default=world_size, help="processes that share the work")
    return parser
