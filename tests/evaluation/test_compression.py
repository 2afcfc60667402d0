"""What reports and the command say about compressed pictures, from made-up traces whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.decoding.trace import GenerationTrace, load_traces, save_traces
from fovea.evaluation.compression import branch_table, compression_figures, usage_table
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.report import write_report
from fovea.evaluation.results import PromptResult, SpeedResult
from fovea.visual.compression import BRANCHES


def trace(key: str, source: str, tokens: int, rows: int, method: str = "specvlm", **gate: float) -> GenerationTrace:
    shares = {f"gate_{branch}": gate.get(branch, 0.0) for branch in BRANCHES} if gate else {}
    notes = {"visual_tokens": float(tokens), "visual_rows": float(rows), **shares} if rows >= 0 else {}
    return GenerationTrace(key, source, method, 30, tokens, [1], "cap", 0.1, 0.2, notes=notes)


@pytest.fixture
def traces() -> list[GenerationTrace]:
    """Two pictures in "a", none in "c"."""
    return [
        trace("a", "captions", 60, 22, conv=1, resampler=1),
        trace("b", "captions", 30, 10, conv=1),
        trace("c", "chat", 0, -1),
        trace("d", "tables", 40, 0, text_only=1),
    ]


def test_figures_are_pooled_over_pictures(traces: list[GenerationTrace]) -> None:
    figures = compression_figures(traces)
    assert list(figures) == ["captions", "tables", "all"]
    assert figures["captions"]["ratio"] == 90 / 32
    assert figures["captions"]["gate"] == pytest.approx(
        {**dict.fromkeys(BRANCHES, 0), "conv": 2 / 3, "resampler": 1 / 3}
    )
    assert (figures["tables"]["visual_rows"], figures["tables"]["ratio"]) == (0, None)
    assert figures["all"]["ratio"] == 130 / 32
    assert figures["all"]["gate"] == {"prune": 0, "pool": 0, "conv": 0.5, "resampler": 0.25, "text_only": 0.25}
    table = usage_table(figures)
    assert table[0] == ["question family", "visual tokens", "rows", "ratio", *BRANCHES]
    assert table[2] == ["tables", "40", "0", "all dropped", "0.0%", "0.0%", "0.0%", "0.0%", "100.0%"]
    assert table[3][:5] == ["all", "130", "32", "4.1x", "0.0%"]


def test_modes_without_a_gate_have_ratios_alone() -> None:
    figures = compression_figures([trace("a", "", 60, 27)])
    assert usage_table(figures) == [
        ["question family", "visual tokens", "rows", "ratio"],
        ["(no source)", "60", "27", "2.2x"],
        ["all", "60", "27", "2.2x"],
    ]


def test_other_drafters_have_none(tmp_path: Path, traces: list[GenerationTrace]) -> None:
    assert compression_figures([traces[2]]) == {}
    save_traces(tmp_path / "traces.jsonl", traces)
    assert load_traces(tmp_path / "traces.jsonl") == traces
    old = traces[2].to_json()
    del old["notes"]
    assert GenerationTrace.from_json(old) == traces[2], "traces of earlier versions are read"


@pytest.mark.parametrize("compressed", [True, False])
def test_report_has_a_section_where_pictures_were_compressed(
    compressed: bool, tmp_path: Path, traces: list[GenerationTrace]
) -> None:
    answers = [
        PromptResult(
            one, trace(one.key, one.source, one.visual_tokens, -1, "autoregressive"), Comparison(one.key, "exact")
        )
        for one in (traces if compressed else traces[2:3])
    ]
    settings = {"method": "specvlm", "target": "tiny", "device": "cpu", "dtype": "float32", "max_new_tokens": 8}
    SpeedResult(answers, {}, settings).save(tmp_path / "evaluation" / "final")
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    record = json.loads((tmp_path / "report.json").read_text())
    assert ("## Compressed pictures" in text) == compressed
    assert ("4.1x" in text and "50.0%" in text) == compressed
    assert record["compression"] == (compression_figures(traces) if compressed else {})


def test_branches_at_the_settings_of_the_paper() -> None:
    table = branch_table([576, 1])
    assert table[0] == ["branch", "576 tokens", "1 tokens"]
    rows = {row[0]: row[1:] for row in table[1:]}
    assert len(rows) == 3 * 5 + 5 + 2
    assert rows["prune 20x"] == rows["pool 20x"] == ["29 (19.9x)", "1 (1.0x)"]
    assert rows["conv 3x"] == ["192 (3.0x)", "1 (1.0x)"]
    assert rows["resampler 2"] == ["2 (288.0x)", "1 (1.0x)"]
    assert rows["text_only"] == ["0 (all dropped)"] * 2
    assert rows["concat"] == ["252 (2.3x)", "1 (1.0x)"]


def test_the_command_prints_the_branches() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fovea.evaluation.compression", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    printed = run("2880", "40")
    assert printed.returncode == 0
    assert "| conv 3x      |      960 (3.0x) |       14 (2.9x) |" in printed.stdout
    refused = run("many")
    assert refused.returncode == 1
    assert refused.stderr.startswith("usage: ")
