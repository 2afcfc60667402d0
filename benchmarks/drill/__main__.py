"""Kills export, training and evaluation at random moments, resumes them until they are done, and compares their ends.

    python -m benchmarks.drill                            # make drill: 210 kills, all three
    python -m benchmarks.drill --kills 30 --part training --seed 7

Each job is killed a few times (SIGKILL, with all its processes), half of the times by the clock and half right behind a
change of its files, and resumed as a user would. After every kill each file under its own name must be whole. At its
end the job must have come to what one came to that nobody disturbed: the same samples, bytes, losses, weights, answers
and figures. The first difference ends the drill with exit code 1, and its folder is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import fovea.app.assemble
import fovea.artifacts.command  # noqa: F401 - imported before the first fork, as everything else that jobs use
from benchmarks.drill.children import Pace, apart, run_killed, run_whole
from benchmarks.drill.parts import Evaluation, Export, Part, Training
from benchmarks.drill.sound import unsound
from benchmarks.drill.workplace import places, prepare
from fovea.evaluation.table import markdown_table

PARTS = ("export", "training", "evaluation")


class DrillError(Exception):
    """A job that did not survive; the message says which and what is different."""


def main() -> None:
    """Runs the drill and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=210, help="over all parts, evenly")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="drill-"))
    start, rows = time.monotonic(), []
    try:
        for part, kills in _parts(options.part or PARTS, options.kills, folder):
            rows.append(drill(part, kills, folder / part.name.replace(", ", "-"), random.Random(options.seed)))
    except (DrillError, RuntimeError, AssertionError, OSError, ValueError) as error:
        sys.exit(f"the drill failed: {error}; everything is in {folder}")
    shutil.rmtree(folder)
    killed = sum(sum(phases.values()) for _, phases, _ in rows)
    table = [["job", "killed", "ends compared", "phase", "kills in it"]]
    for name, phases, ends in rows:
        for number, (phase, count) in enumerate(sorted(phases.items(), key=lambda item: -item[1])):
            first = (name, str(sum(phases.values())), str(ends)) if number == 0 else ("", "", "")
            table.append([*first, phase, str(count)])
    print(markdown_table(table))
    minutes = (time.monotonic() - start) / 60
    print(f"\n{killed} kills in {minutes:.1f} minutes: nothing lost, nothing twice, every end as undisturbed")


def _parts(names: tuple[str, ...] | list[str], kills: int, folder: Path) -> list[tuple[Part, int]]:
    target, conversations = places(folder)
    apart(lambda: prepare(folder), folder / "prepare.log")
    share = [kills // len(names) + (number < kills % len(names)) for number in range(len(names))]
    parts: list[tuple[Part, int]] = []
    for name, count in zip(names, share, strict=True):
        if name == "export":
            parts.append((Export(target, conversations), count))
        elif name == "training":
            parts.append((Training(target, conversations), count))
        else:
            trained = folder / "trained"
            trained.mkdir()
            run_whole(Training(target, conversations).next_job(trained, random.Random(0)), folder / "trained.log")
            parts.append((Evaluation(target, conversations, trained / "run-00" / "drafter"), count - count // 4))
            parts.append((Evaluation(target, conversations, None), count // 4))
    return parts


def drill(part: Part, kills: int, folder: Path, draw: random.Random) -> tuple[str, Counter[str], int]:
    """Kills jobs of ``part`` until there were ``kills``; their number by phase, and the ends that were compared.

    Raises:
        DrillError: a file is not whole, or an end is another.
    """
    whole = folder / "whole"
    whole.mkdir(parents=True)
    run_whole(part.next_job(whole, draw), folder / "first.log")  # what is cached is cached then
    shutil.rmtree(whole)
    whole.mkdir()
    pace = run_whole(part.next_job(whole, draw), folder / "whole.log")
    expected, phases, ends = part.result(whole), Counter[str](), 0
    print(f"{part.name}: {pace.seconds:.1f} s and {pace.changes} changes of files undisturbed", flush=True)
    while sum(phases.values()) < kills:
        chain = folder / f"chain-{ends:03d}"
        _chain(part, chain, min(draw.randint(4, 9), kills - sum(phases.values())), pace, draw, phases)
        if part.result(chain) != expected:
            raise DrillError(f"{part.name}: {chain} came to another end than {whole}")
        shutil.rmtree(chain)
        ends += 1
        print(f"{part.name}: {sum(phases.values())} of {kills} kills, {ends} ends alike", flush=True)
    return part.name, phases, ends


def _chain(part: Part, chain: Path, kills: int, pace: Pace, draw: random.Random, phases: Counter[str]) -> None:
    """One job, killed up to ``kills`` times and then left alone."""
    chain.mkdir()
    log, noted, done = chain / "jobs.log", [], False
    for _ in range(kills):
        job = part.next_job(chain, draw)
        if not run_killed(job, log, pace, draw):
            done = True
            break
        phases[part.phase(job)] += 1
        noted.append(part.noted(job))
        if problems := unsound(job.watched):
            raise DrillError(f"{part.name}: a killed job left what is not whole: {'; '.join(problems)}")
        if done := part.over(job):
            break
    if not done:
        run_whole(part.next_job(chain, draw), log)
    if not part.kept(chain, noted):
        raise DrillError(f"{part.name}: {chain} lost what a killed job had done")


if __name__ == "__main__":
    main()
