"""Benchmarks of the FOVEA paper in every layout: prompts word for word, pictures, order, sources."""

from __future__ import annotations

from typing import ClassVar

import pytest

from datamodules.benchmarks import BenchmarkConversations
from datamodules.benchmarks.catalog import BENCHMARKS
from fovea.app.launch import CONFIG_DIR
from tests.datamodules.published import (
    EXPLAIN,
    LETTER,
    SHORT,
    put,
    put_json,
    put_parquet,
    put_tsv,
    read,
    shown,
    summary,
    text,
)

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")


def test_every_benchmark_has_its_settings():
    ours = {path.stem for path in (CONFIG_DIR / "benchmark").glob("*.yaml")} - {"heldout", "jsonl", "mmspec"}
    assert ours == set(BENCHMARKS)


class TestMMTBench:
    RECORDS = (
        {"index": 5, "question": "Which?", "image": text(1), "A": "None", "B": "NA", "C": "", "answer": "B"},
        {"index": 7, "question": "Who?", "image": text(2), "A": "I", "B": "you", "C": "we", "answer": "C"},
    )

    def records(self):
        return [{**record, "category": "c", "l2-category": f"kind {n}"} for n, record in enumerate(self.RECORDS)]

    def test_its_table(self, tmp_path):
        put_tsv(tmp_path / "MMT-Bench_VAL.tsv", *self.records())
        put_tsv(tmp_path / "MMT-Bench_VAL_MI.tsv", {**self.records()[0], "index": 99})
        assert summary(read("mmt_bench", tmp_path)) == [
            ("mmt_bench/5", "mmt_bench/kind 0", "[1]Which?", "B"),
            ("mmt_bench/7", "mmt_bench/kind 1", "[2]Who?", "C"),
        ]
        first, second = read("mmt_bench", tmp_path, "options=true", "instruction=published")
        assert shown(first) == f"[1]Which?\nA. None\nB. NA\n{LETTER}"
        assert shown(second) == f"[2]Who?\nA. I\nB. you\nC. we\n{LETTER}"

    def test_several_pictures(self, tmp_path):
        several = str([text(3), text(4)])
        record = {**self.records()[0], "image": several}
        put_tsv(tmp_path / "MMT-Bench_VAL_MI.tsv", record)
        assert shown(read("mmt_bench", tmp_path, "split=VAL_MI")[0]) == "[3][4]Which?"
        record["image"] = [3, 4]
        put_parquet(tmp_path / "hub/data/val-00000-of-00001.parquet", [record], "image")
        assert shown(read("mmt_bench", tmp_path / "hub", "split=val")[0]) == "[3][4]Which?"


class TestTextVQA:
    def test_its_files(self, tmp_path):
        data = [{"question": f"what {n}?", "image_id": f"i{n}", "question_id": 30 + n} for n in (1, 2)]
        put_json(tmp_path / "TextVQA_0.5.1_val.json", {"dataset_type": "val", "data": data})
        for n in (1, 2):
            put(tmp_path / f"train_images/i{n}.jpg", n)
        assert summary(read("textvqa", tmp_path)) == [
            ("textvqa/31", "textvqa", f"[1]what 1?\n{EXPLAIN}", None),
            ("textvqa/32", "textvqa", f"[2]what 2?\n{EXPLAIN}", None),
        ]
        assert shown(read("textvqa", tmp_path, "instruction=published")[0]) == f"[1]what 1?\n{SHORT}"

    def test_the_hub(self, tmp_path):
        records = [{"image_id": "x", "question_id": n, "question": f"what {n}?", "image": n} for n in (1, 2, 3)]
        put_parquet(tmp_path / "data/validation-00000-of-00002.parquet", records[:2], "image")
        put_parquet(tmp_path / "data/validation-00001-of-00002.parquet", records[2:], "image")
        put_parquet(tmp_path / "data/train-00000-of-00001.parquet", records, "image")
        items = read("textvqa", tmp_path, "split=validation", "instruction=null")
        assert [shown(item) for item in items] == ["[1]what 1?", "[2]what 2?", "[3]what 3?"]


class TestMME:
    def test_its_folders(self, tmp_path):
        for place, number in (("existence/1.jpg", 1), ("landmark/images/a.png", 2)):
            put(tmp_path / "MME_Benchmark_release_version" / place, number)
        root = tmp_path / "MME_Benchmark_release_version"
        lines = "Is it {}? Please answer yes or no.\tYes\nIs it not? Please answer yes or no.\tNo\n"
        (root / "existence/1.txt").write_text(lines.format("red"))
        (root / "landmark/questions_answers_YN").mkdir()
        (root / "landmark/questions_answers_YN/a.txt").write_text(lines.format("blue"))
        (root / "eval_tool").mkdir()
        (root / "eval_tool/readme.txt").write_text("how to evaluate")
        expected = [
            ("mme/existence/1.jpg", "mme/existence", f"[1]Is it red?\n{EXPLAIN}", "Yes"),
            ("mme/existence/1.jpg/2", "mme/existence", f"[1]Is it not?\n{EXPLAIN}", "No"),
            ("mme/landmark/a.png", "mme/landmark", f"[2]Is it blue?\n{EXPLAIN}", "Yes"),
            ("mme/landmark/a.png/2", "mme/landmark", f"[2]Is it not?\n{EXPLAIN}", "No"),
        ]
        assert summary(read("mme", root)) == summary(read("mme", tmp_path)) == expected
        assert shown(read("mme", root, "instruction=published")[0]) == "[1]Is it red?\nPlease answer yes or no."
        assert {item.source for item in read("mme", root, "categories=false")} == {"mme"}

    def test_the_hub(self, tmp_path):
        question = "Is it? Please answer yes or no."
        records = [
            {"question_id": "code/1.png", "image": 9, "question": question, "answer": answer, "category": "code"}
            for answer in ("Yes", "No")
        ]
        put_parquet(tmp_path / "data/test-00000-of-00001-0ab.parquet", records, "image")
        assert summary(read("mme", tmp_path)) == [
            ("mme/code/1.png", "mme/code", f"[9]Is it?\n{EXPLAIN}", "Yes"),
            ("mme/code/1.png/2", "mme/code", f"[9]Is it?\n{EXPLAIN}", "No"),
        ]


class TestChartQA:
    def test_its_files(self, tmp_path):
        for kind, number in (("human", 1), ("augmented", 2)):
            put_json(
                tmp_path / f"ChartQA Dataset/test/test_{kind}.json",
                [{"imgname": f"{number}.png", "query": f"How {kind}?", "label": "4"}],
            )
            put(tmp_path / f"ChartQA Dataset/test/png/{number}.png", number)
        put_json(tmp_path / "ChartQA Dataset/val/val_human.json", [{"imgname": "x", "query": "no", "label": "no"}])
        assert summary(read("chartqa", tmp_path)) == [
            ("chartqa/test/1", "chartqa/human", "[1]How human?", "4"),
            ("chartqa/test/2", "chartqa/machine", "[2]How augmented?", "4"),
        ]

    def test_the_hub(self, tmp_path):
        import datasets

        records = [{"image": 3, "query": "How?", "label": ["5"], "human_or_machine": 1}]
        kinds = datasets.ClassLabel(names=["human", "machine"])
        put_parquet(tmp_path / "a/data/test-00000-of-00001.parquet", records, "image", human_or_machine=kinds)
        assert summary(read("chartqa", tmp_path / "a")) == [("chartqa/test/1", "chartqa/machine", "[3]How?", "['5']")]
        records = [{"image": 3, "question": "How?", "answer": "5", "type": "human_test"}]
        put_parquet(tmp_path / "b/data/test-00000-of-00001.parquet", records, "image")
        assert summary(read("chartqa", tmp_path / "b")) == [("chartqa/test/1", "chartqa/human_test", "[3]How?", "5")]


class TestMathVista:
    CHOICE: ClassVar = {
        "pid": "1",
        "question": "How long?",
        "image": "images/1.jpg",
        "choices": ["3 cm", "4 cm"],
        "answer": "4 cm",
        "query": "Hint: choose.\nQuestion: How long?\nChoices:\n(A) 3 cm\n(B) 4 cm",
        "metadata": {"task": "geometry problem solving"},
    }
    FREE: ClassVar = {
        **CHOICE,
        "pid": "2",
        "choices": None,
        "answer": "7",
        "image": "images/2.jpg",
        "query": "Hint: a number.",
        "metadata": {"task": "figure question answering"},
    }
    EXPECTED = (
        ("mathvista/1", "mathvista/geometry problem solving", "[1]How long?\nA. 3 cm\nB. 4 cm", "4 cm"),
        ("mathvista/2", "mathvista/figure question answering", "[2]How long?", "7"),
    )

    def test_its_files(self, tmp_path):
        put_json(tmp_path / "data/testmini.json", {"1": self.CHOICE, "2": self.FREE})
        for n in (1, 2):
            put(tmp_path / f"images/{n}.jpg", n)
        assert tuple(summary(read("mathvista", tmp_path))) == self.EXPECTED
        asked = read("mathvista", tmp_path, "instruction=published")
        assert [shown(item) for item in asked] == [f"[1]{self.CHOICE['query']}", "[2]Hint: a number."]

    def test_the_hub(self, tmp_path):
        records = [{**self.CHOICE, "decoded_image": 1}, {**self.FREE, "decoded_image": 2}]
        put_parquet(tmp_path / "data/testmini-00000-of-00001-7.parquet", records, "decoded_image")
        assert tuple(summary(read("mathvista", tmp_path))) == self.EXPECTED


@pytest.mark.parametrize(
    ("name", "file", "root"),
    [
        ("ocrbench", "OCRBench.json", "OCRBench_Images"),
        ("ocrbench_v2", "OCRBench_v2.json", "."),
    ],
)
def test_ocrbench(tmp_path, name, file, root):
    record = {
        "dataset_name": "IIIT5K",
        "type": "Regular Text Recognition",
        "id": 0,
        "image_path": "IIIT5K/1.png",
        "question": "what is written?",
        "answers": ["CENTRE"],
    }
    put_json(tmp_path / file, [record, {**record, "id": 1, "type": "Digits"}])
    put(tmp_path / root / "IIIT5K/1.png", 5)
    assert summary(read(name, tmp_path)) == [
        (f"{name}/0", f"{name}/Regular Text Recognition", "[5]what is written?", "['CENTRE']"),
        (f"{name}/1", f"{name}/Digits", "[5]what is written?", "['CENTRE']"),
    ]


def test_ocrbench_on_the_hub(tmp_path):
    record = {"dataset": "d", "question": "what?", "question_type": "Digits", "answer": ["1"], "image": 6}
    put_parquet(tmp_path / "1/data/test-00000-of-00001.parquet", [record, record], "image")
    assert summary(read("ocrbench", tmp_path / "1")) == [
        ("ocrbench/test/1", "ocrbench/Digits", "[6]what?", "['1']"),
        ("ocrbench/test/2", "ocrbench/Digits", "[6]what?", "['1']"),
    ]
    record = {"id": 8, "dataset_name": "d", "question": "what?", "type": "t", "answers": ["1"], "image": 6}
    put_parquet(tmp_path / "2/data/test-00000-of-00001.parquet", [record], "image")
    assert summary(read("ocrbench_v2", tmp_path / "2")) == [("ocrbench_v2/8", "ocrbench_v2/t", "[6]what?", "['1']")]


class TestScienceQA:
    RECORD: ClassVar = {
        "question": "Which is farthest north?",
        "choices": ["Ohio", "Maine"],
        "answer": 1,
        "hint": "",
        "image": "image.png",
        "subject": "social science",
        "split": "test",
    }
    TEXT = f"Which is farthest north?\nA. Ohio\nB. Maine\n{EXPLAIN}"

    def test_its_files(self, tmp_path):
        problems = {
            "4": self.RECORD,
            "5": {**self.RECORD, "image": None},
            "6": {**self.RECORD, "split": "train"},
            "7": {**self.RECORD, "hint": "Look.", "answer": 0},
        }
        put_json(tmp_path / "problems.json", problems)
        for n in (4, 7):
            put(tmp_path / f"test/{n}/image.png", n)
        assert summary(read("scienceqa", tmp_path)) == [
            ("scienceqa/4", "scienceqa/social science", f"[4]{self.TEXT}", "Maine"),
            ("scienceqa/7", "scienceqa/social science", f"[7]Context: Look.\n{self.TEXT}", "Ohio"),
        ]
        everything = BenchmarkConversations("scienceqa", tmp_path, "test", with_images=False)
        assert [(item.key, len(item.images)) for item in everything] == [
            ("scienceqa/4", 1),
            ("scienceqa/5", 0),
            ("scienceqa/7", 1),
        ]

    def test_the_hub(self, tmp_path):
        records = [{**self.RECORD, "image": number} for number in (1, None, 3)]
        for folder, kept in (("ScienceQA-FULL", records), ("ScienceQA-IMG", records[::2])):
            plain = [{name: value for name, value in record.items() if name != "split"} for record in kept]
            put_parquet(tmp_path / folder / "test-00000-of-00001.parquet", plain, "image")
        assert [shown(item) for item in read("scienceqa", tmp_path / "ScienceQA-FULL")] == [
            f"[1]{self.TEXT}",
            f"[3]{self.TEXT}",
        ]
        with pytest.raises(ValueError, match=r"in several folders: ScienceQA-FULL, ScienceQA-IMG; name one"):
            read("scienceqa", tmp_path)
        one = read("scienceqa", tmp_path, "subsets=[ScienceQA-IMG]", "limit=1")
        assert summary(one) == [
            ("scienceqa/ScienceQA-IMG/test/1", "scienceqa/social science", f"[1]{self.TEXT}", "Maine")
        ]
