"""The FOVEA paper's training mixture: splits, decontamination, manifests, the same bytes each time."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from datamodules.conversations import JsonlConversations, SourceError
from datamodules.mixture import build, decontaminate, main, train_test_split, write
from fovea.targets.conversation import Conversation
from tests.datamodules.published import put, put_json, put_parquet, shown

MATHVISTA = {"question": "How?", "choices": None, "answer": "1", "query": "q", "metadata": {"task": "t"}}


@pytest.fixture
def folders(tmp_path):
    """Twelve conversations of LLaVA, six questions of MathVista in two splits, and ChartQA's two splits."""
    llava = []
    for n in range(12):
        turns = [{"from": "human", "value": f"<image>\nWhat is {n}?"}, {"from": "gpt", "value": "it"}]
        llava.append({"id": f"{n}", "image": f"coco/{n:012d}.png", "conversations": turns})
        put(tmp_path / f"llava/coco/{n:012d}.png", 100 + n)
    llava.append({"id": "t", "conversations": [{"from": "human", "value": "Say."}, {"from": "gpt", "value": "it"}]})
    put_json(tmp_path / "llava/mix.json", llava)
    for split, numbers in (("testmini", range(4)), ("test", range(4, 6))):
        records = {f"{n}": {**MATHVISTA, "pid": f"{n}", "image": f"images/{n}.png"} for n in numbers}
        put_json(tmp_path / f"mathvista/{split}.json", records)
        for n in numbers:
            put(tmp_path / f"mathvista/images/{n}.png", n)
    for split, number in (("train", 50), ("test", 60)):
        for kind in ("human", "augmented"):
            records = [{"imgname": "1.png", "query": f"{split} {kind}?", "label": "1"}]
            put_json(tmp_path / f"chartqa/{split}/{split}_{kind}.json", records)
        put(tmp_path / f"chartqa/{split}/png/1.png", number)
    return tmp_path


def built(folders, **sizes):
    llava = JsonlConversations(folders / "llava/mix.json")
    benchmarks = {name: folders / name for name in ("mathvista", "chartqa")}
    return build(llava, benchmarks, (sizes.get("llava", 13), sizes.get("train", 2), sizes.get("evaluation", 3)))


def test_the_split_is_that_of_scikit_learn():
    """The example of its documentation: five rows, test_size=0.33 (two of them), random_state=42."""
    assert train_test_split(5, 3, 2) == ([2, 0, 3], [1, 4])


def test_the_rest_is_evaluated_if_it_is_small():
    train, test = train_test_split(3500, 1000, 3000)
    assert (len(train), len(test)) == (1000, 2500)
    assert sorted(train + test) == list(range(3500))
    with pytest.raises(SourceError, match="1000 samples cannot give 1000 to train and others"):
        train_test_split(1000, 1000, 3000)


def test_its_parts(folders):
    mixture = built(folders)
    assert mixture.llava == 12  # the one without a picture is dropped
    assert [item.source for item in mixture.train[12:]] == ["mathvista"] * 2 + ["chartqa"] * 2
    assert {name: len(items) for name, items in mixture.evaluation.items()} == {"mathvista": 3, "chartqa": 2}
    trained = {item.key for item in mixture.train}
    assert not trained & {item.key for items in mixture.evaluation.values() for item in items}
    asked = [item.messages[0]["content"][1]["text"] for item in mixture.train[14:]]
    assert sorted(asked) == ["train augmented?", "train human?"]
    assert all(item.messages[-1]["role"] == "user" for item in mixture.train[12:])
    first = built(folders, llava=5)  # the first five of the same order, but for the one without a picture
    assert [item.key for item in first.train[: first.llava]] == [item.key for item in mixture.train[: first.llava]]
    assert 4 <= first.llava <= 5
    drawn = [item.key for item in mixture.train[:12]]
    assert drawn != sorted(drawn, key=lambda key: int(key.split("#")[1]))


def test_pictures_of_the_evaluation_are_dropped(tmp_path):
    put(tmp_path / "a/000000000001.png", 1)
    Image.new("RGB", (2, 2), (2, 2, 2)).save(tmp_path / "same_pixels.bmp")
    put(tmp_path / "b/000000000001.jpg", 9)
    put(tmp_path / "b/12.png", 3)
    put(tmp_path / "a/12.png", 4)
    put(tmp_path / "b/held.png", 2)

    def asking(key, name):
        return Conversation(key, [], images=(tmp_path / name,))

    held = [asking("x", "b/000000000001.jpg"), asking("y", "b/held.png"), asking("z", "b/12.png")]
    names = ("a/000000000001.png", "same_pixels.bmp", "a/12.png", "gone.png")
    kept, dropped = decontaminate([asking(name, name) for name in names], held)
    assert [item.key for item in kept] == ["a/12.png"]  # a short name is no identifier
    assert dropped["a/000000000001.png"] == "its picture is that of x"
    assert dropped["same_pixels.bmp"] == "its picture is that of y"
    assert "does not exist" in dropped["gone.png"]


def test_the_command(folders, capsys):
    put(folders / "llava/coco/000000000003.png", 60)  # ChartQA's test picture
    (folders / "llava/coco/000000000004.png").unlink()

    def run(out):
        main(
            [
                *("--llava", str(folders / "llava/mix.json"), "--out", str(folders / out)),
                *("--benchmark", f"mathvista={folders / 'mathvista'}", "--benchmark", f"chartqa={folders / 'chartqa'}"),
                *("--llava-count", "13", "--train-count", "2", "--evaluation-count", "3"),
            ]
        )
        paths = sorted(path for path in (folders / out).rglob("*") if path.is_file())
        return {str(path.relative_to(folders / out)): path.read_bytes() for path in paths}

    first = run("one")
    assert first == run("two")
    assert "10 of LLaVA and 4 of benchmarks to train, 2 dropped" in capsys.readouterr().out
    assert set(first) == {
        "train.jsonl",
        "evaluation-mathvista.jsonl",
        "evaluation-chartqa.jsonl",
        "dropped.jsonl",
        "manifests/train.jsonl",
        "manifests/evaluation-mathvista.jsonl",
        "manifests/evaluation-chartqa.jsonl",
    }
    trained = JsonlConversations(folders / "one/train.jsonl")
    assert len(trained) == 14
    assert all(image.is_file() for item in trained for image in item.images)
    judged = JsonlConversations(folders / "one/evaluation-chartqa.jsonl")
    assert [item.key for item in judged] == ["chartqa/test/1", "chartqa/test/2"]
    (line, *_) = first["manifests/evaluation-chartqa.jsonl"].decode().splitlines()
    assert json.loads(line).keys() == {"source", "key", "images", "split"}
    assert json.loads(line)["split"] == "evaluation-chartqa"


def test_bad_commands(folders, capsys):
    llava = ["--llava", str(folders / "llava/mix.json"), "--out", str(folders / "out")]
    for typed, message in (
        (["--benchmark", "chartqa"], "write <name>=<folder>"),
        (
            ["--benchmark", f"mmmu={folders}"],
            "'mmmu' has no place in the mixture; choose from: chartqa, mathvista, mme, mmspec",
        ),
        (["--benchmark", f"mathvista={folders / 'llava'}"], "no MathVista there"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*llava, *typed])
        assert stopped.value.code != 0
        assert message in capsys.readouterr().err


def test_pictures_in_tables_become_files(tmp_path, own_tables):
    records = [
        {"question_id": f"{n}", "question": "Is it?", "image": n, "answer": "Yes", "category": "count"} for n in (1, 2)
    ]
    put_parquet(tmp_path / "mme/data/test-0.parquet", records, "image")
    write(build([], {"mme": tmp_path / "mme"}, (5, 5, 5)), tmp_path / "out")
    items = JsonlConversations(tmp_path / "out/evaluation-mme.jsonl")
    assert [shown(item) for item in items] == ["[1]Is it?", "[2]Is it?"]


def test_mmspec_is_evaluated_and_keeps_its_pictures_out_of_training(folders, tmp_path):
    """One question about a picture that LLaVA has under another name, one with two turns about another."""
    put(tmp_path / "mmspec/images/a.png", 103)
    put(tmp_path / "mmspec/images/b.png", 7)
    records = [
        {"id": f"m{n}", "image": image, "turns": turns, "topic": "t", "category": "c"}
        for n, (image, turns) in enumerate([("a.png", ["What?"]), ("b.png", ["What?", "And why?"])])
    ]
    (tmp_path / "mmspec/mmspec.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    llava = JsonlConversations(folders / "llava/mix.json")
    mixture = build(llava, {"mmspec": tmp_path / "mmspec"}, (13, 2, 3))
    assert [item.key for item in mixture.evaluation["mmspec"]] == ["m0", "m1"]
    assert list(mixture.dropped.values()) == ["its picture is that of m0"]
    write(mixture, tmp_path / "out")
    manifest = (tmp_path / "out/manifests/evaluation-mmspec.jsonl").read_text().splitlines()
    assert [(json.loads(line)["key"], len(json.loads(line)["images"])) for line in manifest] == [("m0", 1), ("m1", 1)]
    written = JsonlConversations(tmp_path / "out/evaluation-mmspec.jsonl")
    assert [len(item.messages) for item in written] == [1, 2]
