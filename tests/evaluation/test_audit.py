"""The audit of two sets of answers: what explains a difference, and which files it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fovea.decoding.trace import GenerationTrace, Round, save_traces
from fovea.evaluation.answers import Answer, AnswerSet, read_answers, read_comparisons
from fovea.evaluation.audit import OUTCOMES, Audit, IncompleteError, audit
from fovea.evaluation.json_lines import RecordError
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.results import LosslessnessError, PromptResult, SpeedResult
from tests.evaluation.mmspec_layout import record, write


def answers(name: str, **given: Answer) -> AnswerSet:
    keys = {key.replace("__", "#"): answer for key, answer in given.items()}
    return AnswerSet(name, {key: replace(answer, key=key) for key, answer in keys.items()})


def tokens(*ids: int, finish: str = "") -> Answer:
    return Answer("k", None, ids, len(ids), finish)


def text(words: str, count: int | None = None, finish: str = "") -> Answer:
    return Answer("k", words, None, count, finish)


def outcome(a: Answer, b: Answer, **more) -> str:
    first, second = answers("a", k=a), answers("b", k=b)
    there = audit(first, second, **more).verdicts[0].outcome
    caps = more.pop("caps", (None, None))
    assert audit(second, first, caps=caps[::-1], **more).verdicts[0].outcome == there, "the order must not matter"
    return there


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (tokens(1, 2), tokens(1, 2), "exact"),
        (tokens(), tokens(), "exact"),
        (tokens(1, 2), tokens(1, 3), "unexplained"),
        (tokens(1, 2), tokens(1, 2, 3), "unexplained"),
        (tokens(1, 2, finish="cap"), tokens(1, 2, 3), "cut"),
        (tokens(1, 2, finish="eos"), tokens(1, 2, 3, finish="cap"), "unexplained"),
        (tokens(1, 4, finish="cap"), tokens(1, 2, 3), "unexplained"),
        (text("one"), text("one"), "exact"),
        (text("one"), text("one two"), "unexplained"),
        (text("one", finish="cap"), text("one two"), "cut"),
        (text("caf\ufffd", finish="cap"), text("café au lait"), "cut"),
        (text("caf\ufffd", finish="cap"), text("cart"), "unexplained"),
    ],
)
def test_outcomes_by_what_is_recorded(a, b, expected):
    assert outcome(a, b) == expected


@pytest.mark.parametrize(
    ("a", "b", "caps", "expected"),
    [
        (tokens(1, 2), tokens(1, 2, 3), (2, 2), "cut"),
        (tokens(1, 2), tokens(1, 2, 3), (1, 9), "cut"),  # a tree may overshoot
        (tokens(1, 2), tokens(1, 2, 3), (9, 2), "unexplained"),
        (tokens(1, 2, finish="eos"), tokens(1, 2, 3), (2, 2), "unexplained"),
        (text("one", 7), text("one two", 9), (7, 7), "cut"),
        (text("one", 6), text("one two", 9), (7, 7), "unexplained"),
        (text("one"), text("one two", 9), (1, 1), "unexplained"),
    ],
)
def test_outcomes_by_a_given_cap(a, b, caps, expected):
    assert outcome(a, b, caps=caps) == expected


def test_only_the_target_explains_a_tie():
    asked = []

    def judge(a: Answer, b: Answer) -> Comparison:
        asked.append((a.tokens, b.tokens))
        return Comparison("k", "tie" if b.tokens == (1, 3) else "unexplained", 1, 2, 3, 0.01, 0.02)

    first = answers("a", p=tokens(1, 2), q=tokens(1, 2), r=tokens(1, 2), s=tokens(1, 2, finish="cap"))
    second = answers("b", p=tokens(1, 3), q=tokens(1, 4), r=tokens(1, 2), s=tokens(1, 2, 3))
    found = audit(first, second, judge=judge)
    assert [verdict.outcome for verdict in found.verdicts] == ["tie", "unexplained", "exact", "cut"]
    assert "logit gap 0.01" in found.verdicts[0].detail
    assert asked == [((1, 2), (1, 3)), ((1, 2), (1, 4))]
    texts = audit(answers("a", k=text("one")), answers("b", k=text("two")), judge=judge)
    assert texts.verdicts[0].outcome == "unexplained"


def test_later_turns_answer_other_prompts_once_a_turn_differs():
    def judge(a: Answer, b: Answer) -> Comparison:
        return Comparison("k", "tie", 0, 1, 2, 0.0, 0.1)

    first = answers("a", k__1=tokens(1), k__2=tokens(1), k__3=tokens(1), other__2=tokens(1))
    second = answers("b", k__1=tokens(2), k__2=tokens(2), k__3=tokens(1), other__2=tokens(2))
    found = audit(first, second, judge=judge)
    assert [verdict.outcome for verdict in found.verdicts] == ["tie", "unexplained", "exact", "tie"]
    assert found.verdicts[1].detail.endswith("an earlier turn differs")
    same = audit(first, second, judge=judge, same_prompts=True)
    assert [verdict.outcome for verdict in same.verdicts] == ["tie", "tie", "exact", "tie"]
    assert found.counts() == {"exact": 1, "cut": 0, "tie": 2, "unexplained": 1}
    assert found.sample_counts() == {"exact": 0, "cut": 0, "tie": 1, "unexplained": 1}


def test_keys_without_a_partner_are_named(tmp_path):
    found = audit(answers("one", a=tokens(1), b=tokens(1)), answers("two", b=tokens(1), c=tokens(1), d=tokens(1)))
    assert (found.missing, found.extra) == (["a"], ["c", "d"])
    assert found.lines() == ["1 only in one, not in two: a", "2 only in two, not in one: c, d"]
    with pytest.raises(IncompleteError, match="1 answers could be compared; two lacks 1 and one lacks 2, such as 'a'"):
        found.require_whole()
    audit(answers("one", a=tokens(1)), answers("two", a=tokens(1))).require_whole()
    with pytest.raises(RecordError, match="one and two share no key; the first ones are 'a' and 'b'"):
        audit(answers("one", a=tokens(1)), answers("two", b=tokens(1)))
    with pytest.raises(RecordError, match="only text and the other only tokens"):
        audit(answers("one", k=tokens(1)), answers("two", k=text("x")))


def test_report_and_failure(tmp_path):
    found = audit(answers("one", a=tokens(1, 2), b=tokens(1)), answers("two", a=tokens(1, 3), b=tokens(1)))
    found.save(tmp_path)
    data = json.loads((tmp_path / "audit.json").read_text())
    assert data["answers"] == {"exact": 1, "cut": 0, "tie": 0, "unexplained": 1}
    assert [verdict["key"] for verdict in data["verdicts"]] == ["a"]
    assert set(data["definitions"]) == set(OUTCOMES)
    assert "unexplained, the first difference is token 1: 2 and 3" in (tmp_path / "audit.md").read_text()
    with pytest.raises(LosslessnessError, match="1 of 2 answers differ without an explanation"):
        found.require_explained()
    Audit("one", "two", [v for v in found.verdicts if v.outcome == "exact"]).require_explained()


def trace(key: str, ids: list[int], finish: str = "eos") -> GenerationTrace:
    return GenerationTrace(key, "s", "m", 5, 0, ids, finish, 0.1, 1.0, [Round(3, 2, 1, 2)])


@pytest.fixture
def evaluation(tmp_path) -> Path:
    """A run with an evaluation of two prompts, of which the second is tied."""
    tie = Comparison("q", "tie", 1, 2, 3, 0.01, 0.02)
    prompts = [
        PromptResult(trace("p", [1, 2]), trace("p", [1, 2]), Comparison("p", "exact"), trace("p", [1, 9])),
        PromptResult(trace("q", [1, 3]), trace("q", [1, 2], "cap"), tie),
    ]
    SpeedResult(prompts).save(tmp_path / "run" / "evaluation" / "final")
    return tmp_path / "run"


def test_answers_of_an_evaluation(evaluation):
    for source in (evaluation, evaluation / "evaluation/final", evaluation / "evaluation/final/traces.jsonl"):
        assert {key: a.tokens for key, a in read_answers(str(source)).answers.items()} == {"p": (1, 2), "q": (1, 3)}
    baseline = read_answers(f"{evaluation}@autoregressive").answers
    assert (baseline["q"].tokens, baseline["q"].finish) == ((1, 2), "cap")
    assert list(read_answers(f"{evaluation}@transformers").answers) == ["p"]
    comparisons = read_comparisons(str(evaluation))
    assert comparisons is not None
    assert comparisons["q"].outcome == "tie"


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({"key": "p", "outcome": "exact", "when": 1}, "not as it was written, .*unexpected keyword argument 'when'"),
        ({"key": "p"}, "not as it was written, .*missing 1 required"),
        (["p", "exact"], r"'comparison' must be an object, got \['p', 'exact'\]"),
    ],
)
def test_a_damaged_comparison_is_named(evaluation, damaged, message):
    path = evaluation / "evaluation" / "final" / "traces.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | {'comparison': damaged})}\n")
    with pytest.raises(RecordError, match=rf"traces\.jsonl, line 2.*{message}"):
        read_comparisons(str(evaluation))


def test_a_folder_of_something_else_is_told_what_an_audit_takes(tmp_path):
    write(tmp_path / "mmspec" / "eagle.jsonl", record("a", ["x"], [9], [1.0]))
    with pytest.raises(
        FileNotFoundError, match=r"mmspec is no folder of a run.*MMSpec publishes.*there are .*eagle\.jsonl$"
    ):
        read_answers(str(tmp_path / "mmspec"))


def test_answers_of_the_other_layouts(tmp_path):
    save_traces(tmp_path / "traces.jsonl", [trace("p", [1, 2], "cap"), trace("q", [3])])
    read = read_answers(str(tmp_path / "traces.jsonl")).answers
    assert [(a.key, a.tokens, a.finish) for a in read.values()] == [("p", (1, 2), "cap"), ("q", (3,), "eos")]
    assert read_comparisons(str(tmp_path / "traces.jsonl")) is None
    path = write(tmp_path / "m.jsonl", record("a", ["x"], [9], [1.0]), record("b", ["y", "z"], [3, 4], [1.0, 1.0]))
    read = read_answers(str(path)).answers
    assert [(a.key, a.text, a.count) for a in read.values()] == [("a", "x", 9), ("b#1", "y", 3), ("b#2", "z", 4)]
    path = write(tmp_path / "plain.jsonl", {"key": 1, "text": "x", "finish": "cap"}, {"key": 2, "tokens": [4, 5]})
    read = read_answers(str(path)).answers
    assert read["1"] == Answer("1", "x", None, None, "cap")
    assert read["2"] == Answer("2", None, (4, 5), 2)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "x"}], "line 1: 'key' is missing; there are text"),
        ([{"key": "a"}], "line 1: the answer to 'a' has neither 'text' nor 'tokens'"),
        ([{"key": "a", "text": "x"}, {"key": "a", "text": "y"}], "line 2: there is an answer to 'a' already"),
        ([{"key": "a", "tokens": [1, "2"]}], r"line 1: 'tokens\[1\]' must be a whole number, got '2'"),
        ([{"key": "a", "tokens": [], "counted": 4}], "line 1: the answer to 'a' has neither"),
        ([{"question_id": "a", "choices": [{}]}], r"line 1, choices\[0\]: 'turns' is missing"),
        ([], "holds no answers"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, records, message):
    path = write(tmp_path / "x.jsonl", *records)
    with pytest.raises(RecordError, match=rf"x\.jsonl.*{message}"):
        read_answers(str(path))


def test_missing_files_and_sides(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.jsonl"):
        read_answers(str(tmp_path / "none.jsonl"))
    path = write(tmp_path / "x@1.jsonl", {"key": "a", "text": "x"})
    assert read_answers(str(path)).answers["a"].text == "x"
    with pytest.raises(RecordError, match="leave @autoregressive out"):
        read_answers(f"{path}@autoregressive")


def test_no_cap_is_guessed_where_the_records_say_how_answers_ended_or_nothing_is_unexplained():
    def hints(a: Answer, b: Answer) -> list[str]:
        return audit(answers("a", x=a, y=a), answers("b", x=b, y=b)).hints

    assert [hint.partition(" tokens")[0] for hint in hints(text("one", 4), text("one two", 6))] == [
        *("2 answers of a have exactly 4", "2 answers of b have exactly 6"),
    ]
    assert hints(text("one", 4), text("one", 4)) == []
    assert hints(text("one", 4, "eos"), text("one two", 6, "eos")) == []
