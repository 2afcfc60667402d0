"""The command ``python -m datamodules.mixture``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import datamodules.mixture
from datamodules.benchmarks.tables import HUB
from datamodules.conversations import JsonlConversations
from datamodules.mixture.files import write
from datamodules.mixture.prints import DISTANCE
from datamodules.mixture.recipe import ONLY_EVALUATED, TRAINED, Mixture, Sizes, build, check_names


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, builds, writes, and tells what was read, kept and refused."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.mixture",
        description=datamodules.mixture.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--llava", type=Path, required=True, help="llava_v1_5_mix665k.json")
    parser.add_argument("--llava-images", type=Path, help="folder of coco/, gqa/, ...; the file's own if left out")
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=f"once for each of {', '.join(TRAINED)}, and of those that are only evaluated on and kept out of the "
        f"training: {', '.join(ONLY_EVALUATED)}",
    )
    parser.add_argument("--partial", action="store_true", help="build although benchmarks to train on are missing")
    parser.add_argument("--out", type=Path, required=True, help="folder that is written")
    for name, count, meaning in (
        ("llava", Sizes.llava, "conversations drawn of LLaVA"),
        ("train", Sizes.train, "samples of a benchmark to train"),
        ("evaluation", Sizes.evaluation, "and at most to evaluate"),
    ):
        parser.add_argument(f"--{name}-count", type=_positive, default=count, metavar="COUNT", help=meaning)
    given = parser.parse_args(arguments)
    benchmarks: dict[str, str] = {}
    for pair in given.benchmark:
        name, _, folder = pair.partition("=")
        if not folder:
            parser.error(f"--benchmark {pair}: write <name>=<folder>")
        if name in benchmarks:
            parser.error(f"--benchmark {name} is given twice; name one folder")
        benchmarks[name] = folder if folder.startswith(HUB) else str(Path(folder).absolute())
    try:
        check_names(benchmarks)
        if (missing := [name for name in TRAINED if name not in benchmarks]) and not given.partial:
            parser.error(
                f"the mixture lacks {', '.join(missing)}; give --benchmark <name>=<folder> for each, or --partial to "
                "build without"
            )
        llava = JsonlConversations(given.llava.absolute(), given.llava_images and given.llava_images.absolute())
        mixture = build(llava, benchmarks, Sizes(given.llava_count, given.train_count, given.evaluation_count))
        write(mixture, given.out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    for line in _told(mixture, given.out, [name for name in (*TRAINED, *ONLY_EVALUATED) if name not in benchmarks]):
        print(line)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _told(mixture: Mixture, out: Path, missing: Sequence[str]) -> list[str]:
    """What was read, kept and refused, and what nobody looked for."""
    alike = len({(record["key"], record["image"]) for record in mixture.look_alikes})
    lines = [str(part) for part in (*mixture.train, *mixture.evaluation)]
    trained = sum(len(part.kept) for part in mixture.train)
    lines.append(f"{trained} to train; each refusal is in dropped.jsonl")
    lines.append(
        f"{alike} pictures to train look like one to evaluate (at most {DISTANCE} of 64 bits apart); they stay, see "
        "perceptual.jsonl"
    )
    if "ocrbench_v2" not in missing:
        lines.append("of OCRBench v2, as in DREAM's code: OCRBench's 1,000 items cannot give 1,000 and others besides")
    if missing:
        lines.append(f"nothing was kept apart from {', '.join(missing)}, which are not given")
    lines.append(
        f"measure on {out}/evaluation-<name>.jsonl (benchmark=jsonl benchmark.path=...), or without what is trained on "
        f"(benchmark=<name> benchmark.exclude={out})"
    )
    return lines


if __name__ == "__main__":
    main()
