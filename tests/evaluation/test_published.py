"""Published traces by our metrics: by hand on small files, and against the published numbers where they lie."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from fovea.evaluation import published_report
from fovea.evaluation.json_lines import RecordError
from fovea.evaluation.published import PUBLISHED, judge
from fovea.evaluation.recorded import ENTRIES, IDXS, IDXS_AND_LAST, trace_folders
from fovea.evaluation.results import ALL
from tests.evaluation.mmspec_layout import MMSPEC, record, write, write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "target")


def test_figures_by_hand(folder):
    by_round, by_turn = judge(folder).methods
    pooled = by_round.figures[ALL]
    assert list(by_round.figures) == ["general vqa", "talk", ALL]
    assert (pooled["conversations"], pooled["samples"], pooled["rounds"]) == (3, 4, 11)
    assert pooled["tau"] == pytest.approx(39 / 11)
    assert pooled["accepted_drafts_per_round"] == pooled["recorded_accepted"] == pytest.approx(28 / 11)
    assert pooled["tau_without_first_token"] == pytest.approx(35 / 11)
    assert pooled["speedup"] == pytest.approx(8.5 / 5.25)
    assert pooled["throughput_ratio"] == pytest.approx((39 / 5.25) / (40 / 8.5))
    assert pooled["mean_of_sample_throughput_ratios"] == pytest.approx((2 + 2.2 + 0.5 + 1) / 4)
    assert pooled["share_faster_than_ar"] == 0.75
    assert pooled["reach_rate"] == pytest.approx([9 / 11, 7 / 11, 7 / 11, 5 / 11])
    assert pooled["time_share"] == pytest.approx({"draft": 1.25 / 5.25, "target": 2.25 / 5.25, "rest": 1.75 / 5.25})
    assert by_round.figures["talk"]["tau"] == 4.0
    pooled = by_turn.figures[ALL]
    assert pooled["tau"] == 4.0
    assert pooled["accepted_drafts_per_round"] == 3.0
    assert pooled["recorded_accepted"] == pytest.approx(2.575)
    assert pooled["reach_rate"] is None
    assert "decode_speedup" not in pooled, "the layout has no prefill time"


def test_every_rule_is_shown(folder):
    by_round, by_turn = judge(folder).methods
    assert (by_round.rule, by_turn.rule) == (ENTRIES, IDXS)
    assert by_round.tau_by_rule == pytest.approx({ENTRIES: 39 / 11, IDXS: 39 / 7, IDXS_AND_LAST: 39 / 11})
    assert by_turn.tau_by_rule == {ENTRIES: None, IDXS: 4.0, IDXS_AND_LAST: 40 / 14}


def test_published_values_stand_beside_ours(folder):
    judged = judge(folder)
    assert judged.skipped == ["without_a_file"]
    by_round, by_turn = judged.methods
    assert [(b.group, b.column) for b in by_round.beside if not b.equal] == [("talk", "draft_accept_mean")]
    assert len(by_round.beside) == 10
    assert all(b.equal for b in by_turn.beside)
    (folder / "summary.csv").unlink()
    assert judge(folder).methods[0].beside == []


def test_texts_are_compared(folder):
    by_round, by_turn = judge(folder).methods
    assert by_round.lossless.counts() == {"exact": 2, "cut": 0, "tie": 0, "unexplained": 2}
    assert by_round.lossless.sample_counts()["exact"] == 1
    assert by_turn.lossless.sample_counts()["exact"] == 3
    assert judge(folder, cap=2).methods[0].lossless.counts()["cut"] == 1


def test_a_likely_cap_is_named_and_changes_no_count(folder):
    path = folder / "baseline-temperature-0.jsonl"
    cut = [record(s, [words], [16], [1.0]) for s, words in (("a", "red"), ("b", "one two"), ("c", "le"))]
    write(path, *cut)
    write(folder / "by_turn-temperature-0.jsonl", record("c", ["left"], [19], [0.5], idxs=[1], acceptance_length=[2.0]))
    for cap, counts in ((None, (0, 1)), (16, (1, 0))):
        by_turn = judge(folder, cap=cap).methods[1].lossless
        assert (by_turn.counts()["cut"], by_turn.counts()["unexplained"]) == counts
    console = Console(file=io.StringIO(), width=400)
    published_report.print_tables([judge(folder)], console)
    words = "3 answers of baseline-temperature-0.jsonl have exactly 16 tokens, the most of all"
    assert console.file.getvalue().count(words) == 1  # type: ignore[attr-defined]
    assert "auditing.cap=16" in judge(folder).methods[1].lossless.hints[0]
    assert judge(folder, cap=16).methods[1].lossless.hints == []


def test_what_has_no_partner_is_named(folder):
    path = folder / "by_round-temperature-0.jsonl"
    made = [json.loads(line) for line in path.read_text().splitlines()]
    write(path, *made[1:], record("d", ["x"], [2], [1.0], acceptance_length=[[1]]))
    method = judge(folder).methods[0]
    assert method.unpaired == ["d", "a"]
    assert method.figures[ALL]["samples"] == 3
    assert (method.lossless.missing, method.lossless.extra) == (["a"], ["d"])
    write(path, record("d", ["x"], [2], [1.0], acceptance_length=[[1]]))
    with pytest.raises(RecordError, match=r"by_round.*baseline.* share no question_id"):
        judge(folder)


def test_a_method_is_paired_with_the_baseline_of_its_temperature(folder):
    made = write_folder(folder.parent / "hot")
    (made / "by_turn-temperature-0.jsonl").rename(folder / "by_turn-temperature-1.0.jsonl")
    with pytest.raises(FileNotFoundError, match=r"holds no baseline-temperature-1\.0\.jsonl to compare by_turn"):
        judge(folder)
    hot = [record(s, t, n, w) for s, t, n, w in (("a", ["red"], [10], [9.0]), ("c", ["left"], [4], [9.0]))]
    write(folder / "baseline-temperature-1.0.jsonl", *hot)
    judged = {method.name: method for method in judge(folder).methods}
    assert judged.keys() == {"by_round-temperature-0", "by_turn-temperature-0", "by_turn-temperature-1.0"}
    assert judged["by_turn-temperature-1.0"].figures[ALL]["speedup"] == 18 / 1.5
    (folder / "baseline-temperature-0.jsonl").unlink()
    for path in folder.glob("by_*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="holds no answers of a method"):
        judge(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("method\nx\n", "line 2: 'group'"), ("method,group,MAT\nx,ALL,z\n", "'MAT'")]
)
def test_a_summary_that_cannot_be_read(folder, text, message):
    (folder / "summary.csv").write_text(text)
    with pytest.raises(RecordError, match=rf"summary\.csv, .*{message}"):
        judge(folder)


def test_report(folder, tmp_path):
    judged = [judge(folder)]
    published_report.write(judged, tmp_path)
    text = (tmp_path / "traces.md").read_text()
    for piece in (
        "| by_turn  |       idxs |              - |      4.0000 |          2.8571 |",
        "by_turn: its tau of 4.0000 counts idxs as rounds; with every pass of the loop as a round, as for by_round",
        "by_turn: the recorded accept lengths have a mean of 2.5750 (draft_accept_mean), and tokens "
        "and rounds give 3.0000 drafts a round",
        "by_round: a speedup of 1.6190 in wall-clock is 1.5786 in tokens per second",
        "without an answer file here: without_a_file",
        "by_round, 'c': unexplained, the first difference is character 1: 'eft' and 'ost'",
    ):
        assert piece in text
    data = json.loads((tmp_path / "traces.json").read_text())
    methods = data["targets"]["target"]["methods"]
    assert methods["by_round"]["figures"][ALL]["tau"] == pytest.approx(39 / 11)
    assert methods["by_round"]["figures"][ALL].keys() - {"draft_s", "target_s"} <= data["definitions"].keys()
    assert methods["by_turn"]["lossless"]["samples"]["exact"] == 3
    low, high = methods["by_round"]["figures"][ALL]["intervals"]["speedup"]
    assert low < 8.5 / 5.25 < high
    console = Console(file=io.StringIO(), width=160)
    published_report.print_tables(judged, console)
    assert "by_round: 9 of 10 published values are met" in console.file.getvalue()  # type: ignore[attr-defined]
    assert published_report.numbers(judged)["target/by_turn/tau"] == 4.0


@pytest.mark.skipif(not (MMSPEC / "traces").is_dir(), reason="the published traces are not there")
def test_every_published_number_is_met():
    equal_samples = {"eagle": 52, "msd": 51, "vispec": 4}
    seen = {}
    for folder in trace_folders(MMSPEC / "traces"):
        for method in judge(folder).methods:
            assert {b.column for b in method.beside} == set(PUBLISHED)
            for value in method.beside:
                assert value.ours == pytest.approx(value.published, rel=1e-14), (method.name, value.column)
            assert method.unaccounted == 0
            assert not method.unpaired
            seen[method.name] = method
    assert {name: m.lossless.sample_counts()["exact"] for name, m in seen.items()} == equal_samples
    assert seen["msd"].tau_by_rule[IDXS_AND_LAST] == pytest.approx(4.5787, abs=5e-5)
    for name in ("eagle", "vispec"):
        assert seen[name].tau_by_rule[ENTRIES] == seen[name].tau_by_rule[IDXS_AND_LAST]


def test_a_summary_in_another_encoding(folder):
    path = folder / "summary.csv"
    text = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    assert all(method.beside for method in judge(folder, resamples=10).methods)
    path.write_bytes(text + b"caf\xe9,ALL\n")
    line = text.count(b"\n") + 1
    with pytest.raises(RecordError, match=rf"summary\.csv, line {line}: not UTF-8 \(byte 0xe9, column 4\)"):
        judge(folder, resamples=10)
