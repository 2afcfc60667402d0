"""All tables and figures of the FOVEA and SpecVLM papers on one target, unattended, and one page over them.

    python benchmarks/evidence.py                      # on the embedded default; make evidence
    python benchmarks/evidence.py --list               # the stages, and about how long each takes
    python benchmarks/evidence.py --train              # the drafters alone, which take the longest
    python benchmarks/evidence.py --only interfaces controls --prompts 24

A stage is a folder in --out, and every measurement in it an ordinary run of evaluate.py, whose command is printed and
kept in ``commands.sh``. Drafters are trained once: each is kept in --checkpoints under its name and a digest of its
settings, so a second call only decodes. What is finished is not done again, so the same command goes on where a killed
one stopped: a job counts as finished once its record, ``job.json``, is written. A measurement of other settings, of
another drafter or by other code is made again; a drafter of other settings is another drafter, and one that other code
has trained is kept and named (--retrain trains it anew). A job that fails lets the others run; the call then ends with
exit code 1, and the same command tries it again.

At the end ``page.html`` shows everything, and ``evidence.md`` and ``evidence.json`` say what was trained and measured,
in what time. Arguments that are not listed below go to train.py and evaluate.py alike, such as
model=tiny_llava_next. With logger=wandb every run is tracked, and the page with its tables and plots too.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.campaign.command import count, default_checkpoints, ended_by_signals, overrides_of, path
from fovea.campaign.runner import Campaign, Options
from fovea.campaign.stages import evidence
from fovea.campaign.summary import commands, listing, shown_folders, track, write_summary
from fovea.evaluation.table import markdown_table

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Does what is missing, and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [stage.name for stage in evidence()]
    add("--list", action="store_true", help="say what there is, and end")
    add("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=f"of {', '.join(names)}")
    add("--train", action="store_true", help="train the drafters that are missing, and measure nothing")
    add("--out", type=path, default=path("outputs/evidence"), help="folder of measurements and page")
    add("--checkpoints", type=path, help="folder of trained drafters (default: drafters in the cache)")
    add("--prompts", type=count, help="most prompts of a measurement (default: all, 48 in the stage of trees)")
    add("--epochs", type=count, help="epochs of each drafter (default: the target's recipe)")
    add("--retrain", action="store_true", help="train anew what other code has trained")
    args, rest = parser.parse_known_args()
    overrides = overrides_of(parser, rest)
    stages = [stage for stage in evidence() if stage.name in args.only]
    if args.list:
        print(markdown_table(listing(stages, args.prompts)))
        return 0
    checkpoints = args.checkpoints or default_checkpoints(overrides)
    options = Options(args.out, checkpoints, overrides, args.epochs, args.prompts, retrain=args.retrain)
    campaign = Campaign(stages, options)
    args.out.mkdir(parents=True, exist_ok=True)
    to, planned = ["--out", str(args.out / "page.html")], shown_folders(campaign)
    (args.out / "commands.sh").write_text(commands(campaign, [*planned, *to]), encoding="utf-8")
    print(f"drafters in {checkpoints}, measurements in {args.out}, every command in {args.out / 'commands.sh'}")
    with ended_by_signals():
        if args.train:
            campaign.train()
        else:
            campaign.run()
    if args.train:
        return 1 if campaign.report.failed else 0
    shown = shown_folders(campaign, measured=True)
    page = ["-m", "fovea.evaluation.report", *shown, *to]
    if not shown:
        print("Nothing was measured, so there is no page.")
    elif code := subprocess.run([sys.executable, *page], cwd=ROOT, check=False).returncode:
        campaign.report.failed["page"] = f"python {shlex.join(page)} ended with {code}"
    else:
        track(campaign, [Path(folder) for folder in shown])
    print(f"\n{write_summary(campaign)}")
    return 1 if campaign.report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
