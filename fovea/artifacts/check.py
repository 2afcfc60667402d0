"""Whether artifacts are those that were written: ``python -m fovea.artifacts.check <folder>``.

Every byte of every shard is read and compared with its hash, and every sample with what the manifest, or the shard's
index, says of it. ``--drop`` removes what is damaged, and the record that the export was finished, so that the export,
run again, does the lost samples and no others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest, ShardEntry
from fovea.artifacts.reading import shard_problem


def damaged_shards(folder: Path, *, progress: bool = False) -> dict[str, str]:
    """Name of each shard in ``folder`` that is not what was written -> why. Shards of an unfinished export count too.

    Raises:
        ArtifactError: there is neither a manifest nor a shard.
    """
    shards, problems = _shards(folder)
    if not shards and not problems:
        raise ArtifactError(f"there are no artifacts in {folder}: it holds no {MANIFEST} and no shard")
    holder: dict[str, str] = {}
    shown = track(shards, "checking shards", console=Console(stderr=True), disable=not progress, transient=True)
    for shard in shown:
        problem = shard_problem(folder, shard)
        if problem is None and (key := next((s.key for s in shard.samples if s.key in holder), None)) is not None:
            problem = f"sample '{key}' is in {folder / shard.name} and in {holder[key]}"
        if problem is not None:
            problems[shard.name] = problem
        else:
            holder |= {sample.key: shard.name for sample in shard.samples}
    return problems


def drop(folder: Path, names: Sequence[str]) -> None:
    """Removes the shards ``names``, their indices, and all that says that the export was finished."""
    for path in (folder / MANIFEST, *folder.glob("rank-*.json")):
        path.unlink(missing_ok=True)
    for name in names:
        for path in (folder / name, (folder / name).with_suffix(".json")):
            path.unlink(missing_ok=True)


def _shards(folder: Path) -> tuple[list[ShardEntry], dict[str, str]]:
    """The shards that were finished, and problems with what says so. An index lies beside each shard; the manifest
    repeats them all."""
    shards, problems = {}, {}
    for path in sorted(folder.glob("shard-*.tar")):
        index = path.with_suffix(".json")
        try:
            shards[path.name] = ShardEntry.read(index)[1]
        except ArtifactError as error:
            problems[path.name] = str(error)
    if (folder / MANIFEST).is_file():
        try:
            listed = {shard.name: shard for shard in Manifest.read(folder).shards}
        except ArtifactError as error:
            return list(shards.values()), problems | {MANIFEST: str(error)}
        problems |= {name: f"{folder / name} is not in {MANIFEST}" for name in shards.keys() - listed.keys()}
        problems = {name: why for name, why in problems.items() if name not in listed}  # the manifest has them too
        shards |= listed
    return list(shards.values()), problems


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what is damaged; exit code 1 if anything is and was not dropped."""
    parser = argparse.ArgumentParser(prog="python -m fovea.artifacts.check", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the artifacts")
    parser.add_argument("--drop", action="store_true", help="remove what is damaged, to be exported again")
    options = parser.parse_args(arguments)
    try:
        problems = damaged_shards(options.folder, progress=True)
    except ArtifactError as error:
        sys.exit(f"error: {error}")
    for problem in problems.values():
        print(problem)
    if not problems:
        print(f"every shard in {options.folder} is what was written")
    elif options.drop:
        drop(options.folder, [name for name in problems if name != MANIFEST])
        print(f"dropped {len(problems)}; the command of the export does their samples again")
    else:
        sys.exit(f"{len(problems)} damaged; --drop removes them, and the export then does their samples again")


if __name__ == "__main__":
    main()
