"""Benchmark folders as people have them: what is missing, doubled, cut or encoded otherwise is named, all counted."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datamodules.benchmarks import BenchmarkConversations
from datamodules.benchmarks.sheets import sheet
from datamodules.conversation_source import SourceError
from fovea.app.errors import is_user_error
from fovea.targets.conversation import conversation_of, turn_key
from tests.datamodules.published import put, put_json, put_parquet, put_tsv, read, shown, text

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")

QUESTION = {"imgname": "1.png", "query": "How?", "label": "4"}


def chartqa(folder, *records):
    put_json(folder / "test/test_human.json", list(records))
    put(folder / "test/png/1.png", 1)
    return BenchmarkConversations("chartqa", folder, "test")


def refused(source, message):
    with pytest.raises(SourceError, match=re.escape(message)) as told:
        len(source)
    assert is_user_error(told.value)


def test_missing_pictures_are_named_by_their_record(tmp_path):
    items = chartqa(tmp_path, QUESTION, {**QUESTION, "imgname": "8.png"}, {**QUESTION, "imgname": "9.png"})
    lost = tmp_path / "test/png/8.png"
    message = f"test_human.json, record 2: the picture '{lost}' does not exist (2 of 3 records lack one); put it there"
    refused(items, message)


@pytest.mark.parametrize(("query", "why"), [(None, "null"), ("", "empty"), (" \n", "empty")])
def test_a_question_that_is_none(tmp_path, query, why):
    message = f"test_human.json, record 2: not a record of ChartQA (the question is {why}; mend the record"
    refused(chartqa(tmp_path, QUESTION, {**QUESTION, "query": query}), message)


def test_records_without_identifiers_that_come_twice_are_told_of(tmp_path, caplog):
    items = chartqa(tmp_path, QUESTION, {**QUESTION, "query": "Why?"}, QUESTION)
    assert [item.key for item in items] == ["chartqa/test/1", "chartqa/test/2", "chartqa/test/3"]
    path = tmp_path / "test/test_human.json"
    told = (
        f"1 records ask what another one asks of the same picture, and are kept; the first: {path}, record 3 as {path}"
    )
    assert f"{told}, record 1" in caplog.text


def test_identifiers_that_come_twice(tmp_path):
    record = '{"question_id": 1, "image": "1.png", "text": "Where?", "category": "c"}\n'
    (tmp_path / "questions.jsonl").write_text(record + "\n" + record)
    put(tmp_path / "images/1.png", 1)
    path = tmp_path / "questions.jsonl"
    refused(read("llava_bench", tmp_path), f"{path}, line 3: the key 'llava_bench/1' is that of {path}, line 1 already")
    row = {"index": 5, "question": "Which?", "image": text(1), "answer": "A", "category": "c"}
    put_tsv(tmp_path / "MMT-Bench_VAL.tsv", row, row)
    path = tmp_path / "MMT-Bench_VAL.tsv"
    refused(read("mmt_bench", path), f"{path}, line 3: the key 'mmt_bench/5' is that of {path}, line 2 already")
    (tmp_path / "testmini.json").write_text('{"1": {}, "2": {}, "1": {}}')
    refused(read("mathvista", tmp_path), "testmini.json: an object has the name '1' twice, as its entries 1 and 3")


def test_subsets_may_have_the_same_identifiers(tmp_path):
    record = {"index": 1, "question": "Which?", "hint": "", "answer": "A", "category": "ocr", "image": 7}
    record |= dict(zip("ABCD", "xyzw", strict=True))
    for subset in ("en", "cn"):
        put_parquet(tmp_path / subset / "dev-00000-of-00001.parquet", [record], "image")
    assert [i.key for i in read("mmbench", tmp_path, "subsets=[en,cn]")] == ["mmbench/1", "mmbench/cn/1"]


def test_two_questions_about_a_picture_are_two_conversations(tmp_path):
    put(tmp_path / "existence/1.jpg", 1)
    (tmp_path / "existence/1.txt").write_bytes(b"\xef\xbb\xbfIs it?\tYes\r\nIs it not?\tNo\r\n")
    items = read("mme", tmp_path, "instruction=null")
    assert [shown(item) for item in items] == ["[1]Is it?", "[1]Is it not?"]
    assert [conversation_of(item.key) for item in items] == ["mme/existence/1.jpg", "mme/existence/1.jpg/2"]


@given(st.text(max_size=4), st.integers(0, 20), st.integers(1, 3))
def test_turns_and_conversations_are_told_apart(name, number, turns):
    for key in (name, f"{name}#{number}"):
        keys = [turn_key(key, turn, turns) for turn in range(1, turns + 1)]
        assert {conversation_of(key) for key in keys} == {key}
        assert len(set(keys)) == turns


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("chartqa", "test/test_human.json", "test_human.json, line 2: not UTF-8 (byte 0xe9, column 5)"),
        ("llava_bench", "questions.jsonl", "questions.jsonl, line 2: not UTF-8 (byte 0xe9, column 5)"),
        ("mme", "existence/1.txt", "existence/1.txt, line 2: not UTF-8 (byte 0xe9, column 5)"),
        ("mmspec", "mmspec.jsonl", "mmspec.jsonl, line 2: not UTF-8 (byte 0xe9, column 5)"),
        ("mmt_bench", "MMT-Bench_VAL.tsv", "MMT-Bench_VAL.tsv, line 2: not UTF-8 (byte 0xe9)"),
    ],
)
def test_other_encodings_are_named_by_their_line(tmp_path, name, file, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"\n[caf\xe9\n")
    refused(read(name, tmp_path), message)


def test_what_was_read_and_why_some_of_it_was_not(tmp_path, caplog):
    record = {"question": "Which?", "choices": ["a"], "answer": 0, "hint": "", "image": "image.png", "subject": "s"}
    problems = {"1": {"split": "train"}, "2": {"image": None}, "3": {}, "4": {"split": "train"}, "5": {}, "6": {}}
    put_json(tmp_path / "problems.json", {n: {**record, "split": "test", **own} for n, own in problems.items()})
    for number in (3, 5, 6):
        put(tmp_path / f"test/{number}/image.png", number)
    with caplog.at_level("INFO"):
        assert [item.key for item in read("scienceqa", tmp_path, "limit=2")] == ["scienceqa/3", "scienceqa/5"]
    account = (
        "5 records read, 2 kept (limit=2: what follows was not read), 2 left out of another split, 1 left out without"
    )
    assert account in caplog.text
    everything = read("scienceqa", tmp_path, "limit=null")
    assert everything.counts() == {"read": 6, "kept": 3, "of another split": 2, "without a picture": 1}


class TestSheets:
    ROW: ClassVar = {"index": 1, "question": "Which?", "image": text(1), "answer": "A", "category": "c"}

    def test_rows_that_are_cut_or_too_long(self, tmp_path):
        path = tmp_path / "MMT-Bench_VAL.tsv"
        put_tsv(path, {**self.ROW, "question": 'two\n"lines"'}, {**self.ROW, "index": 2})
        whole = path.read_bytes()
        assert [shown(item) for item in read("mmt_bench", tmp_path)] == ['[1]two\n"lines"', "[1]Which?"]
        path.write_bytes(whole[: whole.rindex(b"Which") + 6])
        refused(read("mmt_bench", tmp_path), f"{path}, line 4: 2 fields, and the header has 5; there is none for image")
        path.write_bytes(whole.rstrip() + b"\tmore\n")
        refused(
            read("mmt_bench", tmp_path), f"{path}, line 4: 6 fields, and the header has 5; the last is one too many"
        )
        path.write_bytes(whole + b'3\t"open\n')
        refused(read("mmt_bench", tmp_path), f"{path}, line 5: a field in quotes that does not end")

    def test_a_column_that_is_missing(self, tmp_path):
        path = tmp_path / "MMT-Bench_VAL.tsv"
        put_tsv(path, {name: value for name, value in self.ROW.items() if name != "image"})
        message = f"{path}, line 2: not a record of MMT-Bench ('image' is missing; it has answer, category, index, "
        refused(read("mmt_bench", tmp_path), message)
        put_tsv(path, {name: value for name, value in self.ROW.items() if name != "index"})
        refused(read("mmt_bench", tmp_path), f"{path}, line 2: not a record of MMT-Bench ('index' is missing")
        path.write_bytes(b"")
        refused(read("mmt_bench", tmp_path), f"{path}, line 1: no header of a table, the file is empty")
        path.write_text("index\tindex\n")
        refused(read("mmt_bench", tmp_path), f"{path}, line 1: no header of a table, column 'index' stands there twice")

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
    @given(st.lists(st.lists(st.text('a"\t\n \u00e9', max_size=4), min_size=2, max_size=2), max_size=4))
    def test_rows_begin_where_a_writer_of_tables_put_them(self, tmp_path, rows):
        put_tsv(tmp_path / "t.tsv", {"one": "", "two": ""}, *({"one": one, "two": two} for one, two in rows))
        begins = [2]
        for before in [["", ""], *rows]:
            begins.append(begins[-1] + 1 + sum(field.count("\n") for field in before))
        found = sheet(tmp_path / "t.tsv")
        assert (list(found.columns), list(found.rows)) == (["one", "two"], begins[:-1])
