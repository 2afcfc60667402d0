"""Made-up evaluations whose figures are known, in the folders that the entry points make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from fovea.decoding.trace import GenerationTrace, Round
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.results import PromptResult, SpeedResult

SETTINGS = {
    "method": "fovea",
    "target": "a target",
    "device": "cpu",
    "dtype": "float32",
    "max_new_tokens": 64,
    "drafter_parameters": 1_500_000,
    "retrieval": {"mode": "mass", "k_min": 4, "k_max": 32},
    "resamples": 50,
}
#: As conf/drafter/fovea.yaml and conf/objective/fovea.yaml have them.
CONFIG: dict[str, Any] = {
    "drafter": {
        "max_correction_depth": 1,
        "use_gate": True,
        "use_depth_embedding": True,
        "interface": "fovea",
        "retrieval": {"mode": "mass"},
    },
    "objective": {"lambda_hid": 1.0, "lambda_kl": 0.2, "beta_cmp": 0.5},
}


def answer(key: str, source: str, accepted: Sequence[int], retrieval: Sequence[tuple[int, int]] = ()) -> PromptResult:
    """A round takes 10 ms (3 draft, 6 verify), an autoregressive token 8 ms, either prefill 20 ms."""
    rounds = [Round(7, 5, a, a + 1, 0.003, 0.006, 0.010, list(retrieval)) for a in accepted]
    tokens = list(range(1 + sum(a + 1 for a in accepted)))
    times = 0.02, 0.02 + 0.01 * len(rounds)
    speculative = GenerationTrace(key, source, "m", 30, 16, tokens, "cap", *times, rounds)
    total = 0.02 + 0.008 * (len(tokens) - 1)
    baseline = GenerationTrace(key, source, "autoregressive", 30, 16, tokens, "cap", 0.02, total)
    return PromptResult(speculative, baseline, Comparison(key, "exact"))


def answers(better: int = 0) -> list[PromptResult]:
    """Three answers of two families; ``better`` more drafts are accepted in each round."""
    retrieval = [(4, 2), (9, 9)]
    return [
        answer("a", "captions", [5 - 4 + better, 1 + better], retrieval),
        answer("b", "captions", [1 + better], retrieval),
        answer("c", "tables", [better, 1 + better], retrieval),
    ]


def _compared(one: PromptResult, outcome: str) -> Comparison:
    return Comparison(one.speculative.key, outcome, *(() if outcome == "exact" else (1, 4, 5)))  # type: ignore[arg-type]


def job(
    folder: Path,
    method: str = "fovea",
    *,
    better: int = 0,
    overrides: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    evaluation: str = "final",
    outcomes: Sequence[str] = ("exact",) * 3,
    ended: str = "completed",
    **settings: Any,
) -> Path:
    """The folder of a job that measured ``method``; ``outcomes`` of its answers, and how it ``ended``."""
    found = [replace(one, comparison=_compared(one, o)) for one, o in zip(answers(better), outcomes, strict=True)]
    result = SpeedResult(found, {}, {**SETTINGS, "method": method, **settings})
    result.save(folder / "evaluation" / evaluation)
    status, _, error = ended.partition(": ")
    outcome = {"overrides": list(overrides), "status": status, "metrics": {}, "error": error}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    (folder / "provenance.json").write_text(json.dumps({"commit": "0123456789abcdef"}))
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG if config is None else config)))
    return folder


def keep_trajectories(evaluation: Path) -> list[dict[str, Any]]:
    """Two kept answers in the folder of an evaluation: one about a picture of 2 x 3 cells, one about none."""
    (evaluation / "trajectories").mkdir()
    Image.new("RGB", (60, 40), "white").save(evaluation / "trajectories" / "0-0.png")
    first = {
        "position": 1,
        "committed": 2,
        "accepted": [1],
        "tokens": [5, 6, 7, 8],
        "parents": [-1, 0, 0, 1],
        "texts": ["<b>A</b>", " red", " blue", " cat"],
        "log_probs": [0.0, -0.5, -1.0, -2.0],
        "choices": [6, 9, 9, 9],
        "choice_texts": [" red", " box", " sky", " purrs"],
        "evidence": [
            {"row": 0, "entries": 6, "cells": [1, 5], "weights": [0.75, 0.25]},
            {"row": 1, "entries": 6, "cells": [2], "weights": [1.0]},
        ],
    }
    second = {
        "position": 3,
        "committed": 1,
        "accepted": [],
        "tokens": [9, 4],
        "parents": [-1, 0],
        "texts": [" box", " "],
        "log_probs": None,
        "choices": [2, 2],
        "choice_texts": ["</s>", "</s>"],
        "evidence": [],
    }
    records = [
        {
            "key": "a",
            "source": "captions",
            "method": "fovea",
            "finish": "eos",
            "question": "What </script> is it?",
            "pictures": ["trajectories/0-0.png"],
            "grids": [[2, 3]],
            "views": [{"image": 0, "box": [0, 0, 1, 1], "line_ends": 0}],
            "tokens": [5, 6, 9, 2],
            "texts": ["<b>A</b>", " red", " box", "</s>"],
            "rounds": [first, second],
        },
        {
            "key": "c",
            "source": "",
            "method": "fovea",
            "finish": "eos",
            "question": "And without a picture?",
            "pictures": [],
            "grids": [],
            "views": [],
            "tokens": [5, 2],
            "texts": ["<b>A</b>", "</s>"],
            "rounds": [{**second, "position": 1}],
        },
    ]
    (evaluation / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
