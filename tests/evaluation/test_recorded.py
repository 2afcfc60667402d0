"""Published answer files as traces: what is kept, what is spread, and what is refused by file, line and field."""

from __future__ import annotations

import re

import pytest

from fovea.decoding.trace import GenerationTrace, load_traces, save_traces
from fovea.evaluation.json_lines import RecordError
from fovea.evaluation.recorded import (
    ENTRIES,
    IDXS,
    IDXS_AND_LAST,
    RECORDED_MEAN,
    read_methods,
    read_turns,
    trace_folders,
)
from tests.evaluation.mmspec_layout import record, write, write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "target")


def test_turns_of_all_methods(folder):
    baseline, by_round, by_turn = read_methods(folder)
    assert [(m.method, m.suffix) for m in (baseline, by_round, by_turn)] == [
        (name, "-temperature-0") for name in ("baseline", "by_round", "by_turn")
    ]
    assert [turn.key for turn in baseline.turns] == ["a", "b#1", "b#2", "c"]
    assert [turn.sample for turn in baseline.turns] == ["a", "b", "b", "c"]
    assert [turn.rule for turn in by_round.turns] == [ENTRIES] * 4
    assert [turn.rule for turn in by_turn.turns] == [IDXS] * 4
    assert [by_round.turns[0].rounds(rule) for rule in (ENTRIES, IDXS, IDXS_AND_LAST)] == [3, 2, 3]
    assert [by_turn.turns[0].rounds(rule) for rule in (ENTRIES, IDXS, IDXS_AND_LAST)] == [None, 3, 4]


def test_recorded_rounds_are_kept(folder):
    turn = read_methods(folder)[1].turns[0]
    trace = turn.speculative("by_round")
    assert [(r.accepted, r.committed) for r in trace.rounds] == [(4, 5), (3, 4), (0, 1)]
    assert (trace.tokens, trace.num_tokens, trace.total_s) == ([], 10, 1.0)
    assert sum(r.draft_s for r in trace.rounds) == pytest.approx(0.25)
    assert sum(r.verify_s for r in trace.rounds) == pytest.approx(0.5)
    assert turn.autoregressive().rounds == []
    assert trace.notes == {}


def test_without_recorded_rounds_tokens_are_spread(folder):
    trace = read_methods(folder)[2].turns[0].speculative("by_turn")
    assert [r.committed for r in trace.rounds] == [4, 3, 3]
    assert [r.accepted for r in trace.rounds] == [3, 2, 2]
    assert {r.tree_depth for r in trace.rounds} == {0}, "how deep a draft was accepted is not known"
    assert trace.notes == {RECORDED_MEAN: 2.5}


def test_rounds_that_do_not_add_up_keep_their_drafts(tmp_path):
    path = write(tmp_path / "m.jsonl", record("a", ["x"], [10], [1.0], acceptance_length=[[4, 1]]))
    (turn,) = read_turns(path, speculative=True)
    assert not turn.accounted
    assert [(r.accepted, r.committed) for r in turn.speculative("m").rounds] == [(4, 5), (1, 5)]


def test_a_counted_trace_survives_its_file(folder, tmp_path):
    traces = [turn.speculative("m") for turn in read_methods(folder)[1].turns]
    save_traces(tmp_path / "t.jsonl", traces)
    assert load_traces(tmp_path / "t.jsonl") == traces
    older = {name: value for name, value in traces[0].to_json().items() if name != "counted"}
    assert GenerationTrace.from_json(older | {"tokens": [1, 2]}).num_tokens == 2


def test_folders_of_folders(folder, tmp_path):
    write_folder(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    assert [path.name for path in trace_folders(tmp_path)] == ["other", "target"]
    assert trace_folders(folder) == [folder]
    with pytest.raises(FileNotFoundError, match=r"empty holds no answer files; give a folder with"):
        trace_folders(tmp_path / "empty")


GOOD = record("a", ["x"], [9], [1.0], acceptance_length=[[8]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acceptance_length": None}, "choices[0]: 'acceptance_length' is missing; there are index, turns"),
        ({"target_time": None}, "choices[0]: 'target_time' is missing"),
        ({"turns": None}, "choices[0]: 'turns' is missing"),
        ({"wall_time": [0]}, "choices[0]: 'wall_time[0]' is 0; no answer takes no time"),
        ({"wall_time": []}, "choices[0]: 'wall_time' has 0 entries for 1 turns"),
        ({"wall_time": [float("nan")]}, "choices[0]: 'wall_time[0]' is nan"),
        ({"new_tokens": ["9"]}, "choices[0]: 'new_tokens[0]' must be a whole number, got '9'"),
        ({"new_tokens": [-1]}, "choices[0]: 'new_tokens[0]' is -1"),
        ({"acceptance_length": [[1, None]]}, "choices[0]: 'acceptance_length[0]'[1] must be a whole number, got None"),
        ({"acceptance_length": [[1, -5]]}, "choices[0]: 'acceptance_length[0]'[1] is -5; it must not be negative"),
        ({"acceptance_length": [True]}, "choices[0]: 'acceptance_length[0]' must be a number, got True"),
        ({"turns": [3]}, "choices[0]: 'turns[0]' must be text, got 3"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, change, message):
    choice = {**GOOD["choices"][0], **change}
    choice = {name: value for name, value in choice.items() if value is not None}
    path = write(tmp_path / "m.jsonl", {**GOOD, "question_id": "first"}, {**GOOD, "choices": [choice]})
    with pytest.raises(RecordError, match=re.escape(f"m.jsonl, line 2, {message}")):
        list(read_turns(path, speculative=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: must be a JSON object, got list"),
        ('{"question_id": "a"}', "line 1: 'choices' is missing; there are question_id"),
        ('{"question_id": "a", "choices": []}', "line 1: 'choices' is empty"),
        ('{"question_id": "a", "choices": [{"turns": ["x"]}]}', "line 1: 'topic' is missing"),
    ],
)
def test_what_is_no_record(tmp_path, line, message):
    (tmp_path / "m.jsonl").write_text(line)
    with pytest.raises(RecordError, match=message):
        list(read_turns(tmp_path / "m.jsonl", speculative=True))


def test_a_sample_that_comes_twice(tmp_path):
    with pytest.raises(RecordError, match=r"line 2: question_id 'a' stands in line 1 already"):
        list(read_turns(write(tmp_path / "m.jsonl", GOOD, GOOD), speculative=True))


def test_tokens_without_a_round(tmp_path):
    for accepted, field in (([[]], "acceptance_length"), ([1.5], "idxs")):
        made = record("a", ["x"], [9], [1.0], idxs=[0], acceptance_length=accepted)
        (turn,) = read_turns(write(tmp_path / "m.jsonl", made), speculative=True)
        with pytest.raises(RecordError, match=f"line 1.*'{field}' of 'a' counts no round for 9 tokens"):
            turn.speculative("m")


def test_an_empty_file(tmp_path):
    (tmp_path / "m.jsonl").write_text("\n\n")
    with pytest.raises(RecordError, match=r"m\.jsonl is empty; give a file with a sample per line"):
        list(read_turns(tmp_path / "m.jsonl", speculative=True))


def test_other_encodings(tmp_path):
    path = write(tmp_path / "m.jsonl", GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [turn.key for turn in read_turns(path, speculative=True)] == ["a"]
    path.write_bytes(path.read_bytes() + b'{"question_id": "caf\xe9"}\n')
    with pytest.raises(RecordError, match=r"m\.jsonl, line 2: not UTF-8 \(byte 0xe9, column 21\); save it as UTF-8"):
        list(read_turns(path, speculative=True))
