"""What the readers tell of a conversation besides: the identifiers of samples and pictures that their files use."""

from __future__ import annotations

import pytest

from datamodules.conversations import JsonlConversations
from tests.datamodules.published import picture, put, put_json, put_parquet, put_tsv, read, text


def told(item):
    return item.meta["id"], item.meta["images"]


def test_files(tmp_path):
    data = [{"question": "what?", "image_id": "0a1b2c3d4e5f6a7b", "question_id": 31}]
    put_json(tmp_path / "TextVQA_0.5.1_val.json", {"data": data})
    put(tmp_path / "train_images/0a1b2c3d4e5f6a7b.jpg", 1)
    assert told(read("textvqa", tmp_path)[0]) == ("31", ["train_images/0a1b2c3d4e5f6a7b.jpg"])


def test_llava(tmp_path):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "it"}]
    record = {"id": "000000033471", "image": "coco/train2017/000000033471.jpg", "conversations": turns}
    put_json(tmp_path / "mix.json", [record])
    (item,) = JsonlConversations(tmp_path / "mix.json")
    assert told(item) == ("000000033471", ["coco/train2017/000000033471.jpg"])


@pytest.mark.usefixtures("own_tables")
class TestTables:
    def test_a_column_names_them(self, tmp_path):
        record = {"question": "what?", "image_id": "0a1b2c3d4e5f6a7b", "question_id": 31, "image": 1}
        put_parquet(tmp_path / "validation-0.parquet", [record], "image")
        (item,) = read("textvqa", tmp_path, "split=validation")
        assert told(item) == ("31", ["train_images/0a1b2c3d4e5f6a7b.jpg"])

    def test_the_column_of_pictures_names_them(self, tmp_path):
        import datasets

        stored = [{"bytes": picture(n), "path": f"{n}.png"} for n in (1, 2)]
        made = datasets.Dataset.from_dict({"index": [5], "question": ["Which?"], "category": ["c"], "answer": ["A"]})
        made = made.add_column("image", [stored]).cast_column("image", datasets.List(datasets.Image()))
        made.to_parquet(tmp_path / "val-0.parquet")
        (item,) = read("mmt_bench", tmp_path, "split=val")
        assert told(item) == ("5", ["1.png", "2.png"])

    def test_nobody_names_them(self, tmp_path):
        record = {"index": 5, "question": "Which?", "image": text(1), "answer": "B", "category": "c"}
        put_tsv(tmp_path / "MMT-Bench_VAL.tsv", record)
        assert told(read("mmt_bench", tmp_path)[0]) == ("5", [None])
