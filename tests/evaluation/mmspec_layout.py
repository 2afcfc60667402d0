"""Small answer files in the layout in which MMSpec publishes them, and where the published ones may lie."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The benchmark's folder; its traces are not part of the project.
MMSPEC = Path(os.environ.get("FOVEA_MMSPEC", Path(__file__).parents[3] / "shared" / "data" / "mmspec"))


def record(sample: str, texts: Sequence[str], tokens: Sequence[int], wall: Sequence[float], **more: Any) -> dict:
    """A record; ``more`` adds or replaces lists of its choice, and ``topic``."""
    topic = more.pop("topic", "general vqa")
    choice = {"index": 0, "turns": list(texts), "new_tokens": list(tokens), "wall_time": list(wall)}
    choice |= {"idxs": [n - 1 for n in tokens], "draft_time": [0.0] * len(tokens)}
    choice |= {"target_time": [0.75 * s for s in wall]} | more
    return {"question_id": sample, "topic": topic, "category": "default", "choices": [choice]}


def write(path: Path, *records: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def write_folder(folder: Path) -> Path:
    """Two methods, one of each layout, and a baseline on three samples, one of them with two turns."""
    write(
        folder / "baseline-temperature-0.jsonl",
        record("a", ["red"], [10], [2.0]),
        record("b", ["one", "two three"], [20, 6], [4.0, 1.5], topic="talk"),
        record("c", ["left"], [4], [1.0]),
    )
    drafts = {"draft_time": [0.25], "target_time": [0.5]}
    write(
        folder / "by_round-temperature-0.jsonl",
        record("a", ["red"], [10], [1.0], idxs=[2], acceptance_length=[[4, 3, 0]], **drafts),
        record(
            "b", ["one", "two"], [22, 2], [2.0, 1.0], topic="talk", idxs=[4, 0],
            acceptance_length=[[4, 4, 4, 4, 1], [1]], draft_time=[0.5, 0.25], target_time=[1.0, 0.25],
        ),
        record("c", ["lost"], [5], [1.25], idxs=[1], acceptance_length=[[0, 3]], **drafts),
    )  # fmt: skip
    write(
        folder / "by_turn-temperature-0.jsonl",
        record("a", ["red"], [10], [1.0], idxs=[3], acceptance_length=[2.5], **drafts),
        record(
            "b", ["one", "two three"], [20, 6], [2.0, 1.0], topic="talk", idxs=[5, 1],
            acceptance_length=[2.75, 2.5], draft_time=[0.5, 0.25], target_time=[1.0, 0.25],
        ),
        record("c", ["left"], [4], [0.5], idxs=[1], acceptance_length=[2.0], **drafts),
    )  # fmt: skip
    with (folder / "summary.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["method", "group", "n_samples", "n_turns", "total_new_tokens", "MAT", "draft_accept_mean"])
        table.writerow(["baseline", "ALL", 3, 4, 40, 1.0, "nan"])
        table.writerow(["by_round", "ALL", 3, 4, 39, 39 / 11, 28 / 11])
        table.writerow(["by_round", "talk", 1, 2, 24, 24 / 6, 3.5])
        table.writerow(["by_turn", "ALL", 3, 4, 40, 4.0, 2.575])
        table.writerow(["without_a_file", "ALL", 3, 4, 40, 9.0, 8.0])
    return folder
