"""Every method side by side: trains each drafter with the same budget, measures all of them, writes one table.

    python benchmarks/methods.py                      # all methods on the embedded default; make table
    python benchmarks/methods.py --methods fovea eaglevlm pld --epochs 3 --prompts 24

The budget is a number of epochs over the same artifacts (a method with two stages shares it between them), with each
method's own objective and the target's recipe. Then one sweep of evaluate.py measures all methods on the same prompts,
which none of them trained on. What is finished is not done again, so the same command resumes; what was done with other
settings is, and --anew forgets all. ``make evidence`` measures much more, and keeps its drafters in the cache.

Left behind in --out: a run per drafter under ``runs``, the sweep under ``evaluation``, and the comparison as
``methods.md``, ``methods.csv`` and ``methods.json``. Arguments that are not listed below go to train.py and evaluate.py
alike, for example model=tiny_llava_next.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.app.outcome import FILE, Outcome
from fovea.app.provenance import provenance
from fovea.campaign.command import count, ended_by_signals, overrides_of, path
from fovea.campaign.runner import TRAINING_FILE, Campaign, Options
from fovea.campaign.stages import method_stage, methods
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.results import ALL, SpeedResult
from fovea.evaluation.table import markdown_table

#: Folder of the measurements in --out.
EVALUATION = "evaluation"
#: Depths whose acceptance is shown.
DEPTHS = 4


def main() -> None:
    """Trains what is missing, measures all, writes the comparison."""
    args, overrides = arguments()
    if args.anew:
        shutil.rmtree(args.out, ignore_errors=True)
    runs = args.out / "runs"
    options = Options(args.out, runs, overrides, args.epochs, args.prompts, keyed=False, shown=True)
    stage = replace(method_stage(args.methods), name=EVALUATION)
    with ended_by_signals():
        report = Campaign([stage], options).run()
    for name, why in report.failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    folders = sorted((args.out / EVALUATION).glob("*/"))
    write([record for folder in folders if (record := read(folder, runs)) is not None], args)
    if report.failed:
        sys.exit("the same command resumes behind what is finished")


def arguments() -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Our own arguments, and the rest for the entry points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    known = methods()
    add("--methods", nargs="+", choices=known, default=known, metavar="NAME", help=f"of {', '.join(known)}")
    add("--epochs", type=count, default=None, help="epochs of each drafter (default: the target's recipe)")
    add("--prompts", type=count, default=None, help="prompts to measure on (default: all)")
    add("--out", type=path, default=path("outputs/methods"), help="folder of runs and comparison")
    add("--anew", action="store_true", help="forget what an earlier call finished")
    args, rest = parser.parse_known_args()
    return args, overrides_of(parser, rest)


def read(folder: Path, runs: Path) -> dict[str, Any] | None:
    """What is known of the method measured in ``folder``; None if it was not."""
    if not (folder / FILE).is_file():
        return None
    method, outcome = folder.name, Outcome.read(folder)
    record: dict[str, Any] = {"method": method, "status": outcome.status, "error": outcome.error}
    training = runs / method / TRAINING_FILE
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
