"""Further benchmarks of the SpecVLM paper in every layout: prompts word for word, pictures, order, sources."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.datamodules.published import EXPLAIN, put, put_json, put_parquet, put_tsv, read, shown, summary, text

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")


class TestSEEDBench:
    RECORD: ClassVar = {
        "answer": "A",
        "choice_a": "One",
        "choice_b": "Two",
        "choice_c": "Three",
        "choice_d": "Four",
        "data_id": "145_259",
        "data_type": "image",
        "question": "How many towels are there?",
        "question_id": "101669",
        "question_type_id": 5,
    }
    TEXT = f"How many towels are there?\nA. One\nB. Two\nC. Three\nD. Four\n{EXPLAIN}"
    KEY = ("seed_bench/101669", "seed_bench/Instances Counting")

    def test_its_files(self, tmp_path):
        video = {**self.RECORD, "data_type": "video", "data_id": "9.webm", "question_id": "v1", "question_type_id": 10}
        put_json(tmp_path / "SEED-Bench.json", {"questions": [video, self.RECORD], "question_type": {}})
        put(tmp_path / "SEED-Bench-image/145_259", 4)
        assert summary(read("seed_bench", tmp_path)) == [(*self.KEY, f"[4]{self.TEXT}", "A")]

    def test_the_hub(self, tmp_path):
        records = [{**self.RECORD, "image": [8]}]
        put_parquet(tmp_path / "data/test-00000-of-00418.parquet", records, "image")
        assert summary(read("seed_bench", tmp_path)) == [(*self.KEY, f"[8]{self.TEXT}", "A")]

    def second(self, kind, number, names, question="What?"):
        source = "cc3m" if isinstance(names, str) else "SEED-Bench v2"
        fields = {"data_type": kind, "question_type_id": number, "data_id": names, "data_source": source}
        return {**self.RECORD, **fields, "question": question, "question_id": f"{number}_0"}

    def test_the_second_one(self, tmp_path):
        records = [
            self.second("Single Image", 1, "145_259"),
            self.second("Multiple Images", 17, ["task17/1.png", "task17/2.png"]),
            self.second("Video", 19, ["task19/1.png"]),
            self.second("Interleaved Image", 23, ["task23/1.jpg", "task23/2.jpg"], "<img>: red. <img>:"),
            self.second("Image Generation", 25, ["task25/1.jpg"]),
        ]
        put_json(tmp_path / "SEED-Bench_v2_level1_2_3.json", {"questions": records})
        put(tmp_path / "cc3m-image/145_259", 1)
        for number, name in enumerate(["task17/1.png", "task17/2.png", "task23/1.jpg", "task23/2.jpg"], 2):
            put(tmp_path / "SEED-Bench-2-image" / name, number)
        assert summary(read("seed_bench_2", tmp_path)) == [
            ("seed_bench_2/1_0", "seed_bench_2/Scene Understanding", "[1]What?", "A"),
            ("seed_bench_2/17_0", "seed_bench_2/Difference Spotting", "[2][3]What?", "A"),
            ("seed_bench_2/23_0", "seed_bench_2/In-Context Captioning", "[4]: red. [5]:", "A"),
        ]


class TestLLaVABench:
    def test_its_files(self, tmp_path):
        line = '{"question_id": %d, "image": "001.jpg", "text": "Where?", "category": "%s"}\n'
        (tmp_path / "questions.jsonl").write_text(line % (0, "conv") + "\n" + line % (1, "detail"))
        put(tmp_path / "images/001.jpg", 3)
        assert summary(read("llava_bench", tmp_path)) == [
            ("llava_bench/0", "llava_bench/conv", "[3]Where?", None),
            ("llava_bench/1", "llava_bench/detail", "[3]Where?", None),
        ]

    def test_the_hub(self, tmp_path):
        record = {"question_id": "4", "question": "Where?", "image": 2, "category": "complex"}
        put_parquet(tmp_path / "data/train-00000-of-00001.parquet", [record], "image")
        assert summary(read("llava_bench", tmp_path)) == [("llava_bench/4", "llava_bench/complex", "[2]Where?", None)]


class TestMMBench:
    def test_its_table(self, tmp_path):
        record = {
            "index": 241,
            "question": "Which?",
            "hint": "Read.",
            "A": "x",
            "B": "y",
            "C": "",
            "D": "",
            "answer": "A",
        }
        record |= {"category": "ocr", "image": text(1) + "\n", "l2-category": "perception"}
        second = {**record, "index": 1000241, "hint": "", "C": "z", "image": "241"}  # the picture of record 241
        put_tsv(tmp_path / "mmbench_dev_20230712.tsv", record, second)
        put_tsv(tmp_path / "mmbench_test_20230712.tsv", record)
        assert summary(read("mmbench", tmp_path)) == [
            ("mmbench/241", "mmbench/perception", f"[1]Read.\nWhich?\nA. x\nB. y\n{EXPLAIN}", "A"),
            ("mmbench/1000241", "mmbench/perception", f"[1]Which?\nA. x\nB. y\nC. z\n{EXPLAIN}", "A"),
        ]
        assert len(read("mmbench", tmp_path / "mmbench_test_20230712.tsv")) == 1
        put_tsv(tmp_path / "MMBench_DEV_EN.tsv", record)
        with pytest.raises(ValueError, match=r"several tables of 'dev': MMBench_DEV_EN.tsv, mmbench_dev_20230712.tsv"):
            read("mmbench", tmp_path)

    def test_the_hub(self, tmp_path):
        record = {"index": 1, "question": "Which?", "hint": "nan", "A": "x", "B": "None", "C": "nan", "D": "nan"}
        record |= {"answer": "A", "category": "ocr", "L2-category": "perception", "image": 7}
        put_parquet(tmp_path / "en/dev-00000-of-00001.parquet", [record], "image")
        put_parquet(tmp_path / "cn/dev-00000-of-00001.parquet", [record], "image")
        expected = ("mmbench/1", "mmbench/perception", f"[7]Which?\nA. x\nB. None\n{EXPLAIN}", "A")
        assert summary(read("mmbench", tmp_path, "subsets=[en]")) == [expected]


class TestVQAv2:
    def test_its_files(self, tmp_path):
        for split, folder, number in (("val2014", "val2014", 1), ("test-dev2015", "test2015", 2)):
            questions = [{"image_id": 262, "question": "Is it?", "question_id": 262000}]
            put_json(
                tmp_path / f"v2_OpenEnded_mscoco_{split}_questions.json",
                {"data_subtype": split, "questions": questions},
            )
            put(tmp_path / f"{folder}/COCO_{folder}_000000000262.jpg", number)
        assert summary(read("vqav2", tmp_path)) == [("vqav2/262000", "vqav2", f"[2]Is it?\n{EXPLAIN}", None)]
        assert shown(read("vqav2", tmp_path, "split=val2014")[0]) == f"[1]Is it?\n{EXPLAIN}"

    def test_the_hub(self, tmp_path):
        records = [{"question_id": n, "image_id": n, "question": "Is it?", "image": n} for n in (1, 2, 3)]
        put_parquet(tmp_path / "data/testdev-00000-of-00004.parquet", records, "image")
        items = read("vqav2", tmp_path, "split=testdev", "limit=2")
        assert [item.key for item in items] == ["vqav2/1", "vqav2/2"]


class TestMMMU:
    def put(self, folder):
        for subject in ("Art", "Biology", "Chemistry", "Economics", "Math", "Physics"):
            empty = {f"image_{n}": None for n in range(1, 8)}
            first = {
                "id": f"validation_{subject}_1",
                "question": "<image 1> Compare it with <image 2>. See <image 1>.",
                "options": "['<image 3>', \"it's\"]",
                "answer": "B",
                **empty,
                **{f"image_{n}": n for n in (1, 2, 3)},
            }
            second = {**first, "id": f"validation_{subject}_2", "question": "What?", "options": "[]", "answer": "12"}
            second |= {**empty, "image_1": 9}
            put_parquet(folder / subject / "validation-00000-of-00001.parquet", [first, second], *empty)

    def test_the_hub(self, tmp_path):
        self.put(tmp_path)
        items = read("mmmu", tmp_path)
        assert len(items) == 12
        assert [item.source for item in items[::2]] == [
            f"mmmu/{subject}" for subject in ("Art", "Biology", "Chemistry", "Economics", "Math", "Physics")
        ]
        compare = f"[1] Compare it with [2]. See <image 1>.\nA. [3]B. it's\n{EXPLAIN}"
        assert summary(items[:2]) == [
            ("mmmu/validation_Art_1", "mmmu/Art", compare, "B"),
            ("mmmu/validation_Art_2", "mmmu/Art", f"[9]What?\n{EXPLAIN}", "12"),
        ]

    def test_one_subject(self, tmp_path):
        self.put(tmp_path)
        (item,) = read("mmmu", tmp_path, "subsets=[Math]", "options=false", "limit=1")
        assert shown(item) == f"[3][1] Compare it with [2]. See <image 1>.\n{EXPLAIN}"
        with pytest.raises(
            FileNotFoundError, match=r"no MMMU there: .*/Art does not exist; it should hold validation-"
        ):
            read("mmmu", tmp_path / "Math")
