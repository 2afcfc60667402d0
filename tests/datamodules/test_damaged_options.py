"""Options that a record lacks are named by file, record and field; none is asked with fewer or other letters."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest

from datamodules.conversation_source import SourceError
from fovea.app.errors import is_user_error
from tests.datamodules.published import put, put_json, put_parquet, put_tsv, read, shown, text

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")

BARE = "instruction=null"


def without(record, *names):
    return {name: value for name, value in record.items() if name not in names}


def refused(source, message):
    with pytest.raises(SourceError, match=re.escape(message)) as told:
        len(source)
    assert is_user_error(told.value)


class TestListed:
    """ScienceQA, MathVista and MMMU: a list in one field."""

    PROBLEM: ClassVar = {"question": "Which?", "hint": "", "image": "image.png", "subject": "s", "split": "test"}
    ASKED: ClassVar = {"question": "How?", "image": "1.png", "answer": "1", "metadata": {"task": "t"}}
    SUBJECT: ClassVar = {"id": "validation_Art_1", "question": "What?", "answer": "B", "image_1": 1}

    def scienceqa(self, folder, **fields):
        sound = {**self.PROBLEM, "choices": ["x", "y"], "answer": 1}
        put_json(folder / "problems.json", {"4": sound, "5": {**self.PROBLEM, "answer": 0, **fields}})
        for number in (4, 5):
            put(folder / f"test/{number}/image.png", number)
        return read("scienceqa", folder, BARE)

    def mathvista(self, folder, **fields):
        put_json(folder / "testmini.json", {"7": {**self.ASKED, "pid": "7", **fields}})
        put(folder / "1.png", 1)
        return read("mathvista", folder)

    def mmmu(self, folder, **fields):
        put_parquet(folder / "Art/validation-0.parquet", [{**self.SUBJECT, **fields}], "image_1")
        return read("mmmu", folder, "subsets=[Art]", BARE)

    def test_the_field_is_missing(self, tmp_path):
        where = f"{tmp_path / 'problems.json'}, record '5': not a record of ScienceQA"
        refused(self.scienceqa(tmp_path), f"{where} ('choices' is missing; it has answer, hint, id, image, question, ")
        where = f"{tmp_path / 'testmini.json'}, record '7': not a record of MathVista"
        refused(self.mathvista(tmp_path, question_type="multi_choice"), f"{where} ('choices' is missing; it has ")
        refused(self.mathvista(tmp_path), f"{where} ('choices' is missing; it has ")
        where = f"{tmp_path / 'Art/validation-0.parquet'}, record 1: not a record of MMMU"
        refused(self.mmmu(tmp_path), f"{where} ('options' is missing; it has ")

    @pytest.mark.parametrize("nothing", [None, [], ["", " "]])
    def test_there_is_none(self, tmp_path, nothing):
        none = "; mend the record or take it out)"
        name = "choices[0]" if nothing else "choices"
        refused(
            self.scienceqa(tmp_path, choices=nothing),
            f"record '5': not a record of ScienceQA (no option in '{name}'{none}",
        )
        asked = self.mathvista(tmp_path, question_type="multi_choice", choices=nothing)
        refused(asked, f"record '7': not a record of MathVista (no option in '{name}'{none}")

    def test_a_subject_without_options(self, tmp_path):
        asked = self.mmmu(tmp_path, question_type="multiple-choice", options="[]")
        refused(asked, "record 1: not a record of MMMU (no option in 'options'; mend")

    @pytest.mark.parametrize("hole", ["", " ", None, "nan"])
    def test_one_in_between_is_empty(self, tmp_path, hole):
        asked = self.scienceqa(tmp_path, choices=["x", hole, "z", ""])
        message = "(option 'choices[1]' is empty and 'choices[2]' behind it is not; mend the record or take it out)"
        refused(asked, f"{tmp_path / 'problems.json'}, record '5': not a record of ScienceQA {message}")

    @pytest.mark.parametrize("damaged", ["['x', 'y'", "x, y", "'xy'", "{'A': 'x'}"])
    def test_a_text_that_is_no_list(self, tmp_path, damaged):
        message = "record 1: not a record of MMMU ('options' is no list of options but "
        refused(self.mmmu(tmp_path, options=damaged), message)

    def test_free_questions_have_none(self, tmp_path):
        free = [{"question_type": "free_form"}, {"question_type": "free_form", "choices": None}, {"choices": None}]
        for number, fields in enumerate(free):
            assert [shown(item) for item in self.mathvista(tmp_path / f"{number}", **fields)] == ["[1]How?"]
        for number, fields in enumerate([{"question_type": "open"}, {"question_type": "open", "options": "[]"}]):
            assert [shown(item) for item in self.mmmu(tmp_path / f"m{number}", **fields)] == ["[1]What?"]

    def test_what_a_free_question_offers_is_shown(self, tmp_path):
        (item,) = self.mmmu(tmp_path, question_type="open", options="['x', 'y']")
        assert shown(item) == "[1]What?\nA. x\nB. y"

    def test_options_that_are_not_shown_are_not_asked_for(self, tmp_path):
        self.mathvista(tmp_path, question_type="multi_choice")
        assert shown(read("mathvista", tmp_path, "options=false")[0]) == "[1]How?"


class TestSEEDBench:
    FIELDS = ("choice_a", "choice_b", "choice_c", "choice_d")
    RECORD: ClassVar = {"question": "What?", "question_id": "1", "question_type_id": 1, "answer": "A", "data_id": "1"}
    FULL: ClassVar = {**RECORD, "data_type": "image", **dict(zip(FIELDS, ("One", "Two", "Three", "Four"), strict=True))}

    def asked(self, folder, record):
        put_json(folder / "SEED-Bench.json", {"questions": [self.FULL, {**record, "question_id": "2"}]})
        put(folder / "SEED-Bench-image/1", 1)
        return read("seed_bench", folder, BARE)

    @pytest.mark.parametrize("name", FIELDS)
    def test_a_field_is_missing(self, tmp_path, name):
        where = f"{tmp_path / 'SEED-Bench.json'}, record 2: not a record of SEED-Bench"
        refused(self.asked(tmp_path, without(self.FULL, name)), f"{where} ('{name}' is missing; it has answer, ")

    def test_all_are_missing(self, tmp_path):
        refused(self.asked(tmp_path, without(self.FULL, *self.FIELDS)), "('choice_a' is missing; it has answer, ")

    def test_one_in_between_is_empty(self, tmp_path):
        asked = self.asked(tmp_path, {**self.FULL, "choice_b": None})
        refused(
            asked, "record 2: not a record of SEED-Bench (option 'choice_b' is empty and 'choice_d' behind it is not"
        )

    def test_the_last_may_be_empty(self, tmp_path):
        _, item = self.asked(tmp_path, {**self.FULL, "choice_c": "", "choice_d": None})
        assert shown(item) == "[1]What?\nA. One\nB. Two"


class TestLettered:
    """MMBench, and any benchmark in a TSV of VLMEvalKit: a column for each."""

    ROW: ClassVar = {"index": 1, "question": "Which?", "hint": "", "answer": "C", "category": "c", "image": text(1)}
    FULL: ClassVar = {**ROW, "A": "x", "B": "y", "C": "z", "D": "w"}

    @pytest.mark.parametrize("lacking", ["A", "B", "C", "D", "ABCD"])
    def test_a_column_is_missing(self, tmp_path, lacking):
        path = tmp_path / "mmbench_dev.tsv"
        put_tsv(path, without(self.FULL, *lacking))
        refused(read("mmbench", path), f"{path}, line 2: not a record of MMBench ('{lacking[0]}' is missing; it has ")

    def test_one_in_between_is_empty(self, tmp_path):
        path = tmp_path / "mmbench_dev.tsv"
        put_tsv(path, self.FULL, {**self.FULL, "index": 2, "B": "", "D": ""})
        message = "(option 'B' is empty and 'C' behind it is not; mend the record or take it out)"
        refused(read("mmbench", path), f"{path}, line 3: not a record of MMBench {message}")
        put_parquet(tmp_path / "en/dev-0.parquet", [{**self.FULL, "image": 7, "A": None}], "image")
        refused(
            read("mmbench", tmp_path / "en"), "record 1: not a record of MMBench (option 'A' is empty and 'D' behind"
        )

    def test_the_last_may_be_empty(self, tmp_path):
        path = tmp_path / "mmbench_dev.tsv"
        put_tsv(path, {**self.FULL, "C": "", "D": "nan"}, {**self.FULL, "index": 2, "D": ""})
        assert [shown(item) for item in read("mmbench", path, BARE)] == [
            "[1]Which?\nA. x\nB. y",
            "[1]Which?\nA. x\nB. y\nC. z",
        ]

    def test_a_row_without_any(self, tmp_path):
        path = tmp_path / "mmbench_dev.tsv"
        put_tsv(path, {**self.FULL, **dict.fromkeys("ABCD", "")})
        refused(read("mmbench", path), f"{path}, line 2: not a record of MMBench (no option in 'A'; mend the record")

    @pytest.mark.parametrize("name", ["mmt_bench", "scienceqa", "seed_bench", "mathvista", "mmmu"])
    def test_as_others_write_it(self, tmp_path, name):
        path = tmp_path / f"{name}.tsv"
        row = {**self.FULL, "task": "t", "E": "", "F": ""}
        typed = [BARE, "options=true", *(["subsets=[]"] if name == "mmmu" else [])]
        put_tsv(path, row)
        (item,) = read(name, path, *typed)
        assert shown(item) == "[1]Which?\nA. x\nB. y\nC. z\nD. w"
        put_tsv(path, without(row, "C"))
        refused(read(name, path, *typed), f"{path}, line 2: not a record of ")
        refused(read(name, path, *typed), "('C' is missing; it has A, B, D, E, F, answer, ")
