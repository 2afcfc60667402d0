"""Every benchmark that can be measured on can be kept out of the training mixture."""

from __future__ import annotations

import json

import pytest
import yaml

from datamodules.benchmarks.catalog import BENCHMARKS
from datamodules.conversations import JsonlConversations
from datamodules.mixture import Sizes, build, write
from datamodules.mixture.recipe import MMSPEC, ONLY_EVALUATED, SUBSETS, TRAINED
from fovea.app.launch import CONFIG_DIR
from tests.datamodules.published import put, put_json, put_parquet, put_tsv, text

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")

#: Number of the picture that every benchmark below asks about.
HELD = 7


def test_all_are_known_with_the_split_that_is_evaluated_by_default():
    assert {*TRAINED, *ONLY_EVALUATED} == {*BENCHMARKS, MMSPEC}
    for name, alternatives in ONLY_EVALUATED.items():
        settings = yaml.safe_load((CONFIG_DIR / "benchmark" / f"{name}.yaml").read_text())
        assert alternatives[:1] == (((settings["split"],),) if "split" in settings else ())
        assert SUBSETS.get(name, ()) == tuple(settings.get("subsets", ()))


def textvqa(folder):
    record = {"question": "What?", "image_id": "i1", "question_id": 1}
    put_json(folder / "TextVQA_0.5.1_val.json", {"data": [record]})
    put(folder / "train_images/i1.jpg", HELD)


def mme(folder):
    put(folder / "existence/1.jpg", HELD)
    (folder / "existence/1.txt").write_text("Is it?\tYes\n")


def ocrbench(folder):
    put_json(folder / "OCRBench.json", [{"id": 0, "type": "t", "image_path": "1.png", "question": "?", "answers": []}])
    put(folder / "OCRBench_Images/1.png", HELD)


def mmbench(folder):
    row = {"index": 1, "question": "Which?", "hint": "", "A": "x", "answer": "A", "category": "c", "image": text(HELD)}
    put_tsv(folder / "mmbench_dev_20230712.tsv", row)


def seed_bench(folder):
    record = {"question": "?", "question_id": "1", "question_type_id": 1, "answer": "A", "data_id": "1"}
    put_json(folder / "SEED-Bench.json", {"questions": [record]})
    put(folder / "SEED-Bench-image/1", HELD)


def vqav2(folder):
    questions = {"data_subtype": "test-dev2015", "questions": [{"image_id": 9, "question": "?", "question_id": 9}]}
    put_json(folder / "v2_OpenEnded_mscoco_test-dev2015_questions.json", questions)
    put(folder / "test2015/COCO_test2015_000000000009.jpg", HELD)


def mmmu(folder):
    for subject in SUBSETS["mmmu"]:
        record = {"id": f"validation_{subject}_1", "question": "?", "options": "[]", "answer": "1", "image_1": HELD}
        put_parquet(folder / subject / "validation-00000-of-00001.parquet", [record], "image_1")


def llava_bench(folder):
    put(folder / "images/001.jpg", HELD)
    line = {"question_id": 0, "image": "001.jpg", "text": "Where?", "category": "c"}
    (folder / "questions.jsonl").write_text(json.dumps(line))


def mmspec(folder):
    put(folder / "images/b.png", HELD)
    record = {"id": "m1", "image": "b.png", "turns": ["What?"], "topic": "t", "category": "c"}
    (folder / "mmspec.jsonl").write_text(json.dumps(record))


PUBLISHED = {f.__name__: f for f in (textvqa, mme, ocrbench, mmbench, seed_bench, vqav2, mmmu, llava_bench, mmspec)}


def conversations(folder, **pictures):
    """LLaVA's file with a conversation per picture, of which a number is drawn."""
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "it"}]
    for name, number in pictures.items():
        put(folder / f"llava/{name}.png", number)
    records = [{"id": name, "image": f"{name}.png", "conversations": turns} for name in pictures]
    put_json(folder / "llava/mix.json", records)
    return JsonlConversations(folder / "llava/mix.json")


@pytest.mark.parametrize("name", ONLY_EVALUATED)
def test_its_pictures_are_not_trained_on(tmp_path, name):
    PUBLISHED[name](tmp_path / name)
    mixture = build(conversations(tmp_path, same=HELD, other=8), {name: str(tmp_path / name)})
    (refusal,) = mixture.refused
    held = mixture.evaluation[0].kept[0]
    assert (refusal.key, refusal.reason) == ("same#1", f"its picture is that of {held.key}")
    assert [item.key for item in mixture.splits["train"]] == ["other#2"]
    write(mixture, tmp_path / "out")
    entries = (tmp_path / f"out/manifests/evaluation-{name}.jsonl").read_text().splitlines()
    assert len(entries) == len(mixture.evaluation[0].kept) == (6 if name == "mmmu" else 1)


def test_a_picture_of_coco_is_known_by_its_number(tmp_path):
    vqav2(tmp_path / "vqav2")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "it"}]
    put(tmp_path / "llava/coco/000000000009.png", 1)
    put_json(tmp_path / "llava/mix.json", [{"id": "x", "image": "coco/000000000009.png", "conversations": turns}])
    mixture = build(JsonlConversations(tmp_path / "llava/mix.json"), {"vqav2": str(tmp_path / "vqav2")})
    assert [refusal.reason for refusal in mixture.refused] == ["'coco:9' is that of vqav2/9"]


def test_what_ocrbench_shares_with_its_second_version_is_not_trained_on(tmp_path):
    """Ten questions of the second version about one picture of the first stay to evaluate only."""
    ocrbench(tmp_path / "ocrbench")
    record = {"type": "t", "question": "?", "answers": []}
    pictures = [HELD if number % 2 else 20 + number for number in range(20)]
    for number, drawn in enumerate(pictures):
        put(tmp_path / f"ocrbench_v2/{number}.png", drawn)
    records = [{**record, "id": number, "image_path": f"{number}.png"} for number in range(20)]
    put_json(tmp_path / "ocrbench_v2/OCRBench_v2.json", records)
    folders = {name: str(tmp_path / name) for name in ("ocrbench_v2", "ocrbench")}
    mixture = build([], folders, Sizes(llava=1, train=3, evaluation=6))
    trained = [int(item.meta["id"]) for item in mixture.splits["train"]]
    assert len(trained) == 3
    assert all(number % 2 == 0 for number in trained)
    assert mixture.refused
    assert {refusal.split for refusal in mixture.refused} == {"train"}
    assert len(mixture.splits["evaluation-ocrbench_v2"]) == 6
    assert [item.key for item in mixture.splits["evaluation-ocrbench"]] == ["ocrbench/0"]


def test_all_subjects_of_mmmu_in_one_table(tmp_path):
    row = {"index": 1, "question": "?", "answer": "A", "category": "Art", "image": text(HELD)}
    put_tsv(tmp_path / "MMMU_DEV_VAL.tsv", row)
    mixture = build(conversations(tmp_path, same=HELD), {"mmmu": str(tmp_path / "MMMU_DEV_VAL.tsv")})
    assert [refusal.reason for refusal in mixture.refused] == ["its picture is that of mmmu/1"]
