"""Every method side by side: trains each drafter with the same budget, measures all of them, writes one table.

    python benchmarks/methods.py                      # all methods on the embedded default; make table
    python benchmarks/methods.py --methods fovea eaglevlm pld --epochs 3 --prompts 24

The budget is a number of epochs over the same artifacts (a method with two stages shares it between them), with each
method's own objective and the target's recipe. Then one sweep of evaluate.py measures all methods on the same prompts,
which none of them trained on. What is finished is not done again, so the same command resumes; --anew forgets it.

Left behind in --out: a run per drafter under ``runs``, the sweep under ``evaluation``, and the comparison as
``methods.md``, ``methods.csv`` and ``methods.json``. Arguments that are not listed below go to train.py and evaluate.py
alike, for example model=tiny_llava_next.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.app.outcome import FILE, Outcome
from fovea.app.provenance import provenance
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.results import ALL, SpeedResult
from fovea.evaluation.table import markdown_table

ROOT = Path(__file__).resolve().parents[1]
#: Second stage of a method's training, as an experiment; it starts from the weights of the first.
SECOND_STAGE = {"vispec": "vispec_stage2"}
#: Depths whose acceptance is shown.
DEPTHS = 4


def main() -> None:
    """Trains what is missing, measures all, writes the comparison."""
    args, overrides = arguments()
    runs, evaluation = args.out / "runs", args.out / "evaluation"
    if args.anew:
        shutil.rmtree(args.out, ignore_errors=True)
    for method in args.methods:
        if method in trained_methods():
            train(method, runs / method, args, overrides)
    sweep(args, runs, evaluation, overrides)
    records = [record for folder in sorted(evaluation.glob("*/")) if (record := read(folder, runs)) is not None]
    write(records, args)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the rest for the entry points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    known = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
    add("--methods", nargs="+", choices=known, default=known, metavar="NAME", help=f"of {', '.join(known)}")
    add("--epochs", type=int, default=None, help="epochs of each drafter (default: the target's recipe)")
    add("--prompts", type=int, default=None, help="prompts to measure on (default: all)")
    add("--out", type=Path, default=Path("outputs/methods"), help="folder of runs and comparison")
    add("--anew", action="store_true", help="forget what an earlier call finished")
    args, overrides = parser.parse_known_args()
    if strangers := [word for word in overrides if word.startswith("-") or "=" not in word]:
        parser.error(f"unknown arguments: {' '.join(strangers)}")
    args.out = args.out.resolve()
    return args, overrides


def trained_methods() -> list[str]:
    """Methods with weights: those that an experiment of the same name trains."""
    names = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")}
    return sorted(names & {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")})


def train(method: str, folder: Path, args: argparse.Namespace, overrides: list[str]) -> None:
    """The run of ``method`` in ``folder``, and how long it trained in ``training.json``."""
    if completed(folder):
        return
    stages = [method, *([SECOND_STAGE[method]] if method in SECOND_STAGE else [])]
    seconds, previous = 0.0, None
    for number, experiment in enumerate(stages):
        last = number == len(stages) - 1
        here = folder if last else folder.with_name(f".{method}-stage{number + 1}")
        shutil.rmtree(here, ignore_errors=True)
        own = [f"experiment={experiment}", f"name={method}", "speed_eval=off", "logger=csv", f"hydra.run.dir={here}"]
        if args.epochs is not None:
            share = args.epochs // len(stages) + (args.epochs % len(stages) if last else 0)
            own.append(f"model.recipe.epochs={max(1, share)}")
        if previous is not None:
            own.append(f"init_from={previous}")
        start = time.perf_counter()
        call("train.py", own + overrides)
        seconds, previous = seconds + time.perf_counter() - start, here
    (folder / "training.json").write_text(json.dumps({"seconds": seconds, "stages": stages}))


def sweep(args: argparse.Namespace, runs: Path, evaluation: Path, overrides: list[str]) -> None:
    """Measures the methods, one job each, that have not been measured."""
    for method in args.methods:
        folder = evaluation / method
        if completed(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        own = [f"method={method}", f"checkpoints={runs}", f"hydra.run.dir={folder}", "logger=csv", f"name={method}"]
        if args.prompts is not None:
            own.append(f"speed.prompts={args.prompts}")
        call("evaluate.py", own + overrides, allow_failure=True)


def completed(folder: Path) -> bool:
    """Whether the job in ``folder`` ended well."""
    return (folder / FILE).is_file() and Outcome.read(folder).status == "completed"


def call(script: str, overrides: list[str], *, allow_failure: bool = False) -> None:
    """Runs an entry point as a user would."""
    print(f"== {script} {' '.join(overrides)}", flush=True)
    code = subprocess.run([sys.executable, str(ROOT / script), *overrides], check=False).returncode
    if code and not allow_failure:
        sys.exit(f"{script} ended with {code}; the same command resumes behind what is finished")


def read(folder: Path, runs: Path) -> dict[str, Any] | None:
    """What is known of the method measured in ``folder``; None if it was not."""
    if not (folder / FILE).is_file():
        return None
    method, outcome = folder.name, Outcome.read(folder)
    record: dict[str, Any] = {"method": method, "status": outcome.status, "error": outcome.error}
    training = runs / method / "training.json"
    if training.is_file():
        record["training_s"] = json.loads(training.read_text())["seconds"]
    if outcome.status == "completed":
        result = SpeedResult.load(folder / EVALUATIONS / FINAL)
        record["parameters"] = result.settings.get("drafter_parameters", 0)
        record["figures"] = result.figures()[ALL]
    return record


def row(record: dict[str, Any]) -> list[str]:
    """A line of the table."""
    if record["status"] != "completed":
        return [record["method"], record["status"], *[""] * 9]
    own, share = record["figures"], record["figures"]["time_share"]
    round_share = share["draft"] / (share["draft"] + share["verify"] + share["rest"])
    reach = " ".join(f"{rate:.2f}" for rate in own["reach_rate"][:DEPTHS])
    memory = own["peak_memory_ratio"]
    seconds = record.get("training_s")
    return [
        record["method"],
        f"{record['parameters'] / 1e6:.2f}M" if record["parameters"] else "-",
        "-" if seconds is None else f"{seconds:.0f} s",
        f"{own['tau']:.2f}",
        f"{own['accepted_drafts_per_round']:.2f}",
        reach,
        f"{own['speedup']:.2f}x",
        f"{own['decode_speedup']:.2f}x",
        f"{round_share:.0%}",
        "-" if memory is None else f"{memory:.2f}x",
        f"{own['exact_matches']:.1%}",
    ]


HEADING = [
    *("method", "parameters", "training", "tau", "accepted", f"reach 1..{DEPTHS}", "speedup", "decode speedup"),
    *("draft share", "memory", "exact"),
]


def write(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The comparison in three formats, and on the console."""
    records.sort(key=lambda record: -(record.get("figures") or {"tau": 0})["tau"])
    rows = [HEADING, *(row(record) for record in records)]
    text = markdown_table(rows)
    note = (
        "tau: tokens per round, bonus included; reach: share of rounds with so many accepted drafts or more; draft "
        "share: of a round's time; memory: most device memory against autoregressive decoding (a GPU alone tells)."
    )
    (args.out / "methods.md").write_text(f"{text}\n\n{note}\n", encoding="utf-8")
    with (args.out / "methods.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    content = {"arguments": sys.argv[1:], "provenance": provenance(), "methods": records}
    (args.out / "methods.json").write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{note}\nin {args.out}")


if __name__ == "__main__":
    main()
