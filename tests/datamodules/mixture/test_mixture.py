"""The FOVEA paper's training mixture: splits, decontamination, manifests, the same bytes each time."""

from __future__ import annotations

import json

import pytest

from datamodules.conversations import JsonlConversations, SourceError
from datamodules.mixture import Sizes, build, write
from datamodules.mixture.__main__ import main
from datamodules.mixture.recipe import train_test_split
from tests.datamodules.mixture.pictures import drawn
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


def benchmarks(folders, *names):
    return {name: str(folders / name) for name in names or ("mathvista", "chartqa")}


def built(folders, *names, **sizes):
    llava = JsonlConversations(folders / "llava/mix.json")
    return build(llava, benchmarks(folders, *names), Sizes(**{"llava": 13, "train": 2, "evaluation": 3} | sizes))


def part(mixture, name):
    (found,) = [part for part in mixture.train if part.name == name]
    return found


def refused(mixture, split="train"):
    return [(refusal.source, refusal.key, refusal.reason) for refusal in mixture.refused if refusal.split == split]


def test_the_split_is_that_of_scikit_learn():
    """The example of its documentation: five rows, test_size=0.33 (two of them), random_state=42."""
    assert train_test_split(5, 3, 2) == ([2, 0, 3], [1, 4], [])
    assert train_test_split(5, 2, 2) == ([2, 0], [1, 4], [3])


def test_the_rest_is_evaluated_if_it_is_small():
    train, test, others = train_test_split(3500, 1000, 3000)
    assert (len(train), len(test), others) == (1000, 2500, [])
    assert sorted(train + test) == list(range(3500))
    with pytest.raises(SourceError, match="1000 samples cannot give 1000 to train and others"):
        train_test_split(1000, 1000, 3000)


def test_its_parts(folders):
    mixture = built(folders)
    assert [str(part) for part in (*mixture.train, *mixture.evaluation)] == [
        "train, llava: 13 read, 13 drawn, 12 kept; refused: 1 without a picture",
        "train, mathvista: 6 read, 2 drawn, 2 kept",
        "train, chartqa: 4 read, 2 drawn, 2 kept",
        "evaluation-mathvista, mathvista: 6 read, 3 drawn, 3 kept",
        "evaluation-chartqa, chartqa: 4 read, 2 drawn, 2 kept",
    ]
    splits = mixture.splits
    train = splits.pop("train")
    assert [item.source for item in train[12:]] == ["mathvista"] * 2 + ["chartqa"] * 2
    assert not {item.key for item in train} & {item.key for items in splits.values() for item in items}
    asked = [item.messages[0]["content"][1]["text"] for item in train[14:]]
    assert sorted(asked) == ["train augmented?", "train human?"]
    keys = [item.key for item in part(mixture, "llava").kept]
    assert keys != sorted(keys, key=lambda key: int(key.split("#")[1]))
    few = part(built(folders, llava=5), "llava")  # the first five of the same order, but for the one without a picture
    assert [item.key for item in few.kept] == keys[: len(few.kept)]
    assert len(few.kept) + len(few.refused) == 5


def test_what_is_evaluated_on_is_refused_and_replaced(folders):
    before = [item.key for item in part(built(folders, llava=6), "llava").kept]
    number = int(before[0].split("#")[0])
    put(folders / f"llava/coco/{number:012d}.png", 60)  # ChartQA's test picture under another name
    mixture = built(folders, llava=6)
    after = [item.key for item in part(mixture, "llava").kept]
    assert after[:-1] == before[1:]
    assert len(after) == len(before)
    assert after[-1] not in before
    assert ("coco", before[0], "its picture is that of chartqa/test/1") in refused(mixture)


def test_benchmarks_are_kept_apart_from_their_own_evaluation(folders):
    """Two questions of MathVista about one picture, one of either part; the sixth takes the place of the first."""
    (first, second), (held, *_), (other,) = train_test_split(6, 2, 3)
    put(folders / f"mathvista/images/{first}.png", held)
    mixture = built(folders)
    kept = part(mixture, "mathvista").kept
    assert [item.key for item in kept] == [f"mathvista/{second}", f"mathvista/{other}"]
    assert ("mathvista", f"mathvista/{first}", f"its picture is that of mathvista/{held}") in refused(mixture)


def test_the_shortfall_is_told(folders):
    put(folders / "chartqa/train/png/1.png", 60)  # both questions to train are about it
    mixture = built(folders)
    assert str(part(mixture, "chartqa")) == (
        "train, chartqa: 4 read, 2 drawn, 0 kept; refused: 2 evaluated on; 2 short of 2"
    )


def test_the_same_sample_with_another_picture_is_refused(folders):
    """LLaVA has a conversation of MathVista under the identifier that is evaluated on."""
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "it"}]
    held = built(folders).evaluation[0].kept[0].meta["id"]
    put(folders / "llava/mathvista/x.png", 200)
    record = {"id": held, "image": "mathvista/x.png", "conversations": turns}
    put_json(folders / "llava/mix.json", [record])
    mixture = built(folders)
    assert refused(mixture) == [("mathvista", f"{held}#1", f"'mathvista/{held}' is that of mathvista/{held}")]


def test_planted_duplicates(folders):
    """Of an evaluated picture of COCO: another under its number, its pixels under another name, two re-encodings."""
    picture = drawn(1)
    half = picture.resize((80, 60))
    (folders / "mmspec/images").mkdir(parents=True)
    picture.save(folders / "mmspec/images/COCO_val2014_000000033471.png")
    record = {"id": "m0", "image": "COCO_val2014_000000033471.png", "turns": ["What?"], "topic": "t", "category": "c"}
    (folders / "mmspec/mmspec.jsonl").write_text(json.dumps(record))
    images = {
        "id": ("coco/train2017/000000033471.png", drawn(2)),
        "pixels": ("coco/train2017/000000000005.png", picture),
        "jpeg": ("coco/train2017/000000000006.jpg", picture),
        "half": ("coco/train2017/000000000007.png", half),
        "other": ("coco/train2017/000000000008.png", drawn(3)),
    }
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "it"}]
    (folders / "llava/coco/train2017").mkdir()
    for path, image in images.values():
        image.save(folders / "llava" / path)
    records = [{"id": name, "image": path, "conversations": turns} for name, (path, _) in images.items()]
    put_json(folders / "llava/mix.json", records)
    mixture = built(folders, "mmspec")
    assert sorted(refused(mixture)) == [
        ("coco", "id#1", "'coco:33471' is that of m0"),
        ("coco", "pixels#2", "its picture is that of m0"),
    ]
    assert sorted(item.key for item in mixture.splits["train"]) == ["half#4", "jpeg#3", "other#5"]
    assert sorted(record["key"] for record in mixture.look_alikes) == ["half#4", "jpeg#3"]
    write(mixture, folders / "out")
    (first, _) = map(json.loads, (folders / "out/perceptual.jsonl").read_text().splitlines())
    assert (first["source"], first["split"], first["evaluated_key"]) == ("coco", "evaluation-mmspec", "m0")
    (entry,) = map(json.loads, (folders / "out/manifests/evaluation-mmspec.jsonl").read_text().splitlines())
    assert (entry["ids"], entry["images"]) == (["m0", "coco:33471"], [first["evaluated_image"]])
    assert (int(entry["looks"][0], 16) ^ mixture.prints(folders / "llava" / images["half"][0]).look).bit_count() <= 6


def test_broken_pictures_are_left_out_on_both_sides(folders):
    (first, _), (held, *_), (other,) = train_test_split(6, 2, 3)
    for number in (first, held):
        (folders / f"mathvista/images/{number}.png").write_bytes(b"no picture")
    mixture = built(folders)
    assert [item.key for item in part(mixture, "mathvista").kept][-1] == f"mathvista/{other}"
    assert str(mixture.evaluation[0]).endswith("3 drawn, 2 kept; refused: 1 with a broken picture; 1 short of 3")
    (lost,) = refused(mixture, "evaluation-mathvista")
    assert lost[:2] == ("mathvista", f"mathvista/{held}")
    assert f"{held}.png' cannot be opened" in lost[2]
    (folders / "chartqa/test/png/1.png").unlink()
    with pytest.raises(SourceError, match=r"chartqa in .*: no picture can be read, the first as image .* not exist"):
        built(folders)


def command(folders, out, *names):
    pairs = [f"--benchmark={name}={folder}" for name, folder in benchmarks(folders, *names).items()]
    counts = ["--llava-count=13", "--train-count=2", "--evaluation-count=3"]
    return [f"--llava={folders / 'llava/mix.json'}", f"--out={folders / out}", *pairs, *counts, "--partial"]


def test_the_command(folders, capsys):
    put(folders / "llava/coco/000000000003.png", 60)  # ChartQA's test picture
    (folders / "llava/coco/000000000004.png").unlink()

    def run(out):
        main(command(folders, out))
        paths = sorted(path for path in (folders / out).rglob("*") if path.is_file())
        return {str(path.relative_to(folders / out)): path.read_bytes() for path in paths}

    first = run("one")
    told = capsys.readouterr().out.splitlines()
    assert first == run("two")
    assert told[0] == (
        "train, llava: 13 read, 13 drawn, 10 kept; "
        "refused: 1 without a picture, 1 evaluated on, 1 with a broken picture; 2 short of 12"
    )
    assert told[5].startswith("14 to train; each refusal is in dropped.jsonl")
    assert told[6].startswith("0 pictures to train look like one to evaluate")
    assert told[7].startswith(
        "nothing was kept apart from mmt_bench, seed_bench_2, ocrbench_v2, scienceqa, textvqa, mme, ocrbench, mmbench, "
    )
    assert told[8].endswith(f"(benchmark=<name> benchmark.exclude={folders / 'one'})")
    splits = ("train", "evaluation-mathvista", "evaluation-chartqa")
    files = {f"{folder}{split}.jsonl" for split in splits for folder in ("", "manifests/")}
    assert set(first) == files | {"dropped.jsonl", "perceptual.jsonl"}
    trained = JsonlConversations(folders / "one/train.jsonl")
    assert len(trained) == 14
    assert all(image.is_file() for item in trained for image in item.images)
    judged = JsonlConversations(folders / "one/evaluation-chartqa.jsonl")
    assert [item.key for item in judged] == ["chartqa/test/1", "chartqa/test/2"]
    (line, *_) = first["manifests/evaluation-chartqa.jsonl"].decode().splitlines()
    assert json.loads(line).keys() == {"source", "key", "ids", "images", "looks", "split"}
    assert json.loads(line)["split"] == "evaluation-chartqa"
    (lost, *_) = first["dropped.jsonl"].decode().splitlines()
    assert json.loads(lost).keys() == {"split", "source", "key", "kind", "reason"}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--benchmark", "chartqa"], "write <name>=<folder>"),
        (["--benchmark", "pope=x"], "'pope' has no place in the mixture; choose from: chartqa, llava_bench, mathvista"),
        (["--benchmark", "ocrbench=x"], "the mixture lacks mmt_bench, seed_bench_2, mathvista, ocrbench_v2, scienceqa"),
        (["--partial", "--benchmark", "mathvista=nowhere"], "no MathVista there"),
        (["--benchmark", "mme=a", "--benchmark", "mme=b"], "--benchmark mme is given twice"),
        (
            ["--benchmark", "chartqa=x"],
            "lacks mmt_bench, seed_bench_2, mathvista, ocrbench_v2, scienceqa; give --bench",
        ),
        ([], "the mixture lacks mmt_bench, seed_bench_2, mathvista, ocrbench_v2, scienceqa, chartqa; give"),
        (["--train-count", "-2"], "argument --train-count: must be a whole number of at least 1, got -2"),
        (["--llava-count=-5"], "argument --llava-count: must be a whole number of at least 1, got -5"),
        (["--evaluation-count", "0"], "argument --evaluation-count: must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_commands(folders, capsys, typed, message):
    with pytest.raises(SystemExit) as stopped:
        main([f"--llava={folders / 'llava/mix.json'}", f"--out={folders / 'out'}", *typed])
    assert stopped.value.code != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folders / "out").exists()


def test_another_encoding_is_named_with_its_line(folders, capsys):
    (folders / "llava/mix.json").write_bytes('[\n{"id": "\u00f6"}]'.encode("latin-1"))
    with pytest.raises(SystemExit):
        main(command(folders, "out"))
    assert "mix.json, line 2: not UTF-8" in capsys.readouterr().err


def test_an_address_of_the_hub_stays_as_typed(folders, capsys, monkeypatch):
    asked = []

    def none(address, subset, split):
        asked.append((address, split))
        raise SourceError(f"{address}, split {split} cannot be loaded")

    monkeypatch.setattr("datamodules.benchmarks.source.hub_records", none)
    typed = [f"--llava={folders / 'llava/mix.json'}", f"--out={folders / 'out'}", "--partial"]
    with pytest.raises(SystemExit):
        main([*typed, "--benchmark=textvqa=hf://datasets/a/b"])
    assert asked == [("hf://datasets/a/b", "val"), ("hf://datasets/a/b", "validation")]
    assert capsys.readouterr().err == "hf://datasets/a/b, split val cannot be loaded\n"


@pytest.mark.usefixtures("own_tables")
class TestTables:
    def test_pictures_become_files(self, tmp_path):
        fields = {"question": "Is it?", "answer": "Yes", "category": "count"}
        records = [{"question_id": f"{n}", "image": n, **fields} for n in (1, 2)]
        put_parquet(tmp_path / "mme/data/test-0.parquet", records, "image")
        write(build([], benchmarks(tmp_path, "mme")), tmp_path / "out")
        items = JsonlConversations(tmp_path / "out/evaluation-mme.jsonl")
        assert [shown(item) for item in items] == ["[1]Is it?", "[2]Is it?"]

    def test_the_hub_calls_a_split_otherwise(self, tmp_path):
        record = {"question_id": 31, "image_id": "0a1b2c3d4e5f6a7b", "question": "What?", "image": 1}
        put_parquet(tmp_path / "textvqa/data/validation-0.parquet", [record], "image")
        write(build([], benchmarks(tmp_path, "textvqa")), tmp_path / "out")
        entry = json.loads((tmp_path / "out/manifests/evaluation-textvqa.jsonl").read_text())
        assert entry["ids"] == ["textvqa/31", "openimages:0a1b2c3d4e5f6a7b"]


def test_mmspec_is_evaluated_with_all_its_turns(folders):
    put(folders / "mmspec/images/b.png", 7)
    record = {"id": "m1", "image": "b.png", "turns": ["What?", "And why?"], "topic": "t", "category": "c"}
    (folders / "mmspec").mkdir(exist_ok=True)
    (folders / "mmspec/mmspec.jsonl").write_text(json.dumps(record))
    write(built(folders, "mmspec"), folders / "out")
    (item,) = JsonlConversations(folders / "out/evaluation-mmspec.jsonl")
    assert (item.key, len(item.messages), len(item.images)) == ("m1", 2, 1)
