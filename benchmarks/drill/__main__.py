"""Kills export, training and evaluation at random moments, resumes them until they are done, and compares their ends.

    python -m benchmarks.drill                            # make drill: 210 kills, all three, on one rank and on two
    python -m benchmarks.drill --kills 30 --part training --ranks 2 --seed 7

Each job is killed a few times (SIGKILL), half of the times by the clock and half right behind a change of its files,
and resumed as a user would. All its processes are killed or, of two ranks, half of the times one alone: then the other
must end by itself within a minute, and a job that cannot be completed without the one that is gone must say so. After
every kill each file under its own name must be whole. At its end the job must have come to what one on as many ranks
came to that nobody disturbed: the same samples, bytes, losses, weights, answers and figures. The first difference ends
the drill with exit code 1, and its folder is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fovea.app.assemble
import fovea.artifacts.command  # noqa: F401 - imported before the first fork, as everything else that jobs use
from benchmarks.drill.children import Pace, run_killed, run_whole
from benchmarks.drill.parts import Evaluation, Export, Part, Training
from benchmarks.drill.processes import apart
from benchmarks.drill.sound import unsound
from benchmarks.drill.workplace import places, prepare
from fovea.evaluation.table import markdown_table

PARTS, RANKS = ("export", "training", "evaluation"), (1, 2)


class DrillError(Exception):
    """A job that did not survive; the message says which and what is different."""


@dataclass
class Survived:
    """What the jobs of a part went through: kills by phase, how many of them of one rank alone, and ends compared."""

    phases: Counter[str] = field(default_factory=Counter)
    alone: int = 0
    ends: int = 0

    @property
    def kills(self) -> int:
        """All of them."""
        return sum(self.phases.values())


def main() -> None:
    """Runs the drill and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=210, help="over all parts, evenly")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--ranks", type=int, choices=RANKS, action="append", help="only jobs of so many processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="drill-"))
    start, survived = time.monotonic(), dict[str, Survived]()
    try:
        for part, kills in _parts(options.part or PARTS, options.ranks or RANKS, options.kills, folder):
            place = folder / part.name.replace(", ", "-").replace(" ", "-")
            survived[part.name] = drill(part, kills, place, random.Random(options.seed))
    except (DrillError, RuntimeError, AssertionError, OSError, ValueError) as error:
        sys.exit(f"the drill failed: {error}; everything is in {folder}")
    shutil.rmtree(folder)
    table = [["job", "killed", "one rank alone", "ends compared", "phase", "kills in it"]]
    for name, found in survived.items():
        first = [name, str(found.kills), str(found.alone), str(found.ends)]
        for phase, count in found.phases.most_common():
            table.append([*first, phase, str(count)])
            first = [""] * len(first)
    print(markdown_table(table))
    killed, minutes = sum(found.kills for found in survived.values()), (time.monotonic() - start) / 60
    print(f"\n{killed} kills in {minutes:.1f} minutes: nothing lost, nothing twice, every end as undisturbed")


def _parts(names: Sequence[str], ranks: Sequence[int], kills: int, folder: Path) -> list[tuple[Part, int]]:
    """What is drilled and how often, ``kills`` in all, evenly; lookahead has a quarter of the evaluations' on one."""
    target, conversations = places(folder)
    apart(lambda: prepare(folder), folder / "prepare.log")
    kinds = [(name, count) for name in names for count in ranks]
    parts: list[tuple[Part, int]] = []
    for number, (name, count) in enumerate(kinds):
        share = kills // len(kinds) + (number < kills % len(kinds))
        if name == "export":
            parts.append((Export(target, conversations, count), share))
        elif name == "training":
            parts.append((Training(target, conversations, count), share))
        else:
            drafter, quarter = _trained(folder), share // 4 if count == 1 else 0
            parts.append((Evaluation(target, conversations, drafter, count), share - quarter))
            parts.append((Evaluation(target, conversations, None), quarter))
    return [(part, share) for part, share in parts if share]


def _trained(folder: Path) -> Path:
    """The drafter that evaluations measure, trained once."""
    trained = folder / "trained"
    if not trained.exists():
        trained.mkdir()
        run_whole(Training(*places(folder)).next_job(trained, random.Random(0)), folder / "trained.log")
    return trained / "run-00" / "drafter"


def drill(part: Part, kills: int, folder: Path, draw: random.Random) -> Survived:
    """Kills jobs of ``part`` until there were ``kills``.

    Raises:
        DrillError: a file is not whole, or an end is another.
    """
    whole = folder / "whole"
    whole.mkdir(parents=True)
    run_whole(part.next_job(whole, draw), folder / "first.log")  # what is cached is cached then
    shutil.rmtree(whole)
    whole.mkdir()
    pace = run_whole(part.next_job(whole, draw), folder / "whole.log")
    expected, survived = part.result(whole), Survived()
    print(f"{part.name}: {pace.seconds:.1f} s and {pace.changes} changes of files undisturbed", flush=True)
    while survived.kills < kills:
        chain = folder / f"chain-{survived.ends:03d}"
        _chain(part, chain, min(draw.randint(4, 9), kills - survived.kills), pace, draw, survived)
        if part.result(chain) != expected:
            raise DrillError(f"{part.name}: {chain} came to another end than {whole}")
        shutil.rmtree(chain)
        survived.ends += 1
        print(f"{part.name}: {survived.kills} of {kills} kills, {survived.ends} ends alike", flush=True)
    return survived


def _chain(part: Part, chain: Path, kills: int, pace: Pace, draw: random.Random, survived: Survived) -> None:
    """One job, killed up to ``kills`` times and then left alone."""
    chain.mkdir()
    log, noted, done, behind = chain / "jobs.log", [], False, False
    for _ in range(kills):
        job = part.next_job(chain, draw)
        if not (killed := run_killed(job, log, pace, draw)):
            done = True
            break
        survived.phases[part.phase(job)] += 1
        survived.alone += killed < job.ranks
        noted.append(part.noted(job))
        if problems := unsound(job.watched):
            raise DrillError(f"{part.name}: a killed job left what is not whole: {'; '.join(problems)}")
        if behind := part.over(job):
            break
    if not (done or behind):
        run_whole(part.next_job(chain, draw), log)
    if not behind and (left := part.left(chain)):
        raise DrillError(f"{part.name}: a finished job has left {', '.join(map(str, left))}")
    if not part.kept(chain, noted):
        raise DrillError(f"{part.name}: {chain} lost what a killed job had done")


if __name__ == "__main__":
    main()
