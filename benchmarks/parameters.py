"""Trainable parameters of the drafters, beside what papers and public code report.

    python benchmarks/parameters.py [--all]

Each drafter is built from its configuration by the code that trains it, without memory for its weights. What papers
report is in ``parameters.yaml``; nothing is tuned to meet it. For FOVEA no reading of the paper meets all three: its
blocks alone, of the target's kind and number as stated, have 404.8, 951.6 and 466.1 M, which at 13B leaves 10 M for
modules that have 91 M by the paper's own equations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.app.launch import CONFIG_DIR, composed
from fovea.app.plan import find_architecture
from fovea.app.settings import read_settings
from fovea.drafters.registry import DRAFTERS
from fovea.evaluation.table import markdown_table
from fovea.planning.plan import weightless_drafter

REPORTED = Path(__file__).with_suffix(".yaml")


def rows(everything: bool) -> Iterator[list[str]]:
    """Drafter, target, trainable parameters, those reported and the ratio; parts of the drafter at the end.

    Unless ``everything`` is asked for, only pairs for which something is reported.
    """
    reported = {
        drafter: {model: float(count) for model, count in counts.items()}
        for drafter, counts in yaml.safe_load(REPORTED.read_text(encoding="utf-8")).items()
    }
    for drafter, model in combinations():
        theirs = reported.get(drafter, {}).get(model)
        if theirs is None and not everything:
            continue
        cfg = composed("train", [f"model={model}", f"drafter={drafter}", "paths.output_dir=."])
        config = read_settings(cfg).drafter
        built = weightless_drafter(cfg.drafter.name, config, find_architecture(cfg.model, []))
        parts = built.trainable_parameters()
        total = parts.pop("total")
        compared = ["", ""] if theirs is None else [f"{theirs / 1e6:,.1f} M", f"{total / theirs:.2f}"]
        detail = ", ".join(f"{name} {count / 1e6:,.1f}" for name, count in parts.items())
        yield [drafter, model, f"{total / 1e6:,.1f} M", *compared, detail]


def combinations() -> list[tuple[str, str]]:
    """Every drafter with parameters, by every target from a hub."""
    drafters = [path.stem for path in sorted((CONFIG_DIR / "drafter").glob("*.yaml")) if _name(path) in DRAFTERS]
    models = [path.stem for path in sorted((CONFIG_DIR / "model").glob("*.yaml")) if _hub(path)]
    return [(drafter, model) for drafter in drafters for model in models]


def _name(path: Path) -> str:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["name"]


def _hub(path: Path) -> bool:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["hub_id"] is not None


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every drafter for every target")
    heading = ["drafter", "target", "trainable", "reported", "ratio", "parts, millions"]
    print(markdown_table([heading, *rows(parser.parse_args().all)]))


if __name__ == "__main__":
    main()
