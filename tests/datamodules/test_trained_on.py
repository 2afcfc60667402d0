"""Prompts that a drafter was trained on are told of, and can be left out."""

from __future__ import annotations

import json
import re

import pytest

from datamodules.conversations import JsonlConversations, SourceError
from datamodules.mixture import Sizes, build, write
from datamodules.trained_on import NotTrainedOn, TrainedOn, place_of, tell_of_trained
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.lesson import hash_image
from fovea.artifacts.manifest import Manifest, SampleEntry, ShardEntry
from tests.datamodules.published import put, put_json, read

RECORD = {"question": "How?", "choices": None, "answer": "1", "query": "q", "metadata": {"task": "t"}}


@pytest.fixture
def folder(tmp_path):
    """MathVista's eight questions, and a mixture of them: two to train, three to evaluate, three in neither."""
    for split, numbers in (("testmini", range(6)), ("test", range(6, 8))):
        records = {f"{n}": {**RECORD, "pid": f"{n}", "image": f"images/{n}.png"} for n in numbers}
        put_json(tmp_path / f"mathvista/{split}.json", records)
        for n in numbers:
            put(tmp_path / f"mathvista/images/{n}.png", n)
    write(
        build([], {"mathvista": str(tmp_path / "mathvista")}, Sizes(llava=1, train=2, evaluation=3)), tmp_path / "mix"
    )
    return tmp_path


def keys(path):
    return [json.loads(line)["key"] for line in path.read_text().splitlines()]


def asked(folder):
    return read("mathvista", folder / "mathvista", "split=testmini")


def artifacts(folder, conversations, turn=""):
    """The manifest of what was exported of ``conversations``."""
    samples = tuple(
        SampleEntry(f"{item.key}{turn}", 1, 1, 1, (0, 1), (1, 1), images=tuple(map(hash_image, item.images)))
        for item in conversations
    )
    fingerprint = Fingerprint("none", {}, "random", (1,), "bf16", "dataset")
    folder.mkdir()
    Manifest(fingerprint, (ShardEntry("shard-00000-000000.tar", 1, "", samples),)).write(folder)
    return folder


@pytest.mark.parametrize("place", ["mix", "mix/train.jsonl", "artifacts"])
def test_what_was_trained_on(folder, place):
    artifacts(folder / "artifacts", JsonlConversations(folder / "mix/train.jsonl"), turn="#1")
    trained = TrainedOn(folder / place)
    wanted = keys(folder / "mix/train.jsonl")
    assert len(wanted) == 2
    everything = [*asked(folder), *read("mathvista", folder / "mathvista", "split=test")]
    assert {item.key for item in everything if trained.has(item)} == {*wanted}
    assert not any(trained.has(item) for item in JsonlConversations(folder / "mix/evaluation-mathvista.jsonl"))
    assert all(trained.has(item) for item in JsonlConversations(folder / "mix/train.jsonl"))


@pytest.mark.parametrize("place", ["mix", "artifacts"])
def test_a_picture_under_another_name(folder, place):
    artifacts(folder / "artifacts", JsonlConversations(folder / "mix/train.jsonl"))
    held = keys(folder / "mix/evaluation-mathvista.jsonl")[0].removeprefix("mathvista/")
    learned = keys(folder / "mix/train.jsonl")[0].removeprefix("mathvista/")

    def seen():
        trained = TrainedOn(folder / place)
        return [item.key for item in JsonlConversations(folder / "mix/evaluation-mathvista.jsonl") if trained.has(item)]

    assert seen() == []
    put(folder / f"mathvista/images/{held}.png", int(learned))
    assert seen() == [f"mathvista/{held}"]
    (folder / f"mathvista/images/{held}.png").write_bytes(b"no picture")
    assert seen() == []


def test_they_are_left_out_and_counted(folder):
    unseen = NotTrainedOn(asked(folder), TrainedOn(folder / "mix"))
    wanted = [f"mathvista/{n}" for n in range(6)]
    learned = {*keys(folder / "mix/train.jsonl")} & {*wanted}
    assert learned
    assert [item.key for item in unseen] == [key for key in wanted if key not in learned]
    assert unseen.counts() == {"read": 6, "kept": 6 - len(learned), "trained on": len(learned)}
    before = unseen.digest()
    assert before != asked(folder).digest()
    with (folder / "mix/manifests/train.jsonl").open("a") as file:
        file.write(json.dumps({"key": "k", "ids": [], "images": []}) + "\n")
    assert unseen.digest() != before
    with pytest.raises(SourceError, match=r"all 2 prompts were trained on, as .*manifests/train.jsonl says"):
        len(NotTrainedOn(JsonlConversations(folder / "mix/train.jsonl"), TrainedOn(folder / "mix")))


def test_a_missing_picture_is_still_named_by_its_record(folder):
    (folder / "mathvista/images/3.png").unlink()
    with pytest.raises(SourceError, match=r"testmini.json, record '3': the picture"):
        NotTrainedOn(asked(folder), TrainedOn(folder / "mix")).require_pictures()
    file = folder / "mix/evaluation-mathvista.jsonl"
    (folder / f"mathvista/images/{keys(file)[1].removeprefix('mathvista/')}.png").unlink()
    with pytest.raises(SourceError, match=re.escape(f"{file}, line ")):
        NotTrainedOn(JsonlConversations(file), TrainedOn(folder / "mix")).require_pictures()


def test_they_are_told_of(folder, caplog):
    prompts, place = [*asked(folder)], str(folder / "mix/train.jsonl")
    trained = TrainedOn(place)
    seen = [item.key for item in prompts if trained.has(item)]
    assert tell_of_trained(prompts, place, "mathvista") == len(seen)
    (told,) = caplog.messages
    assert told.startswith(f"{len(seen)} of the 6 prompts of mathvista, the first '{seen[0]}', or their pictures were")
    assert told.endswith(f"leave them out with benchmark.exclude={place}")
    caplog.clear()
    assert tell_of_trained([item for item in prompts if item.key not in seen], place, "mathvista") == 0
    assert tell_of_trained(prompts, str(folder / "mathvista"), "mathvista") == 0  # says nothing
    assert caplog.messages == []


def test_a_damaged_manifest(folder, caplog):
    path = folder / "mix/manifests/train.jsonl"
    path.write_text('{"key": "k", "ids": [], "images": []}\n{"key": "k"}\n')
    with pytest.raises(SourceError, match=r"train.jsonl, line 2: no line of a mixture's manifest; build it again"):
        TrainedOn(folder / "mix")
    assert tell_of_trained([*asked(folder)], str(folder / "mix"), "mathvista") == 0
    (told,) = caplog.messages
    assert told.startswith(f"nobody can tell whether prompts of mathvista were trained on: {path}, line 2")
    with pytest.raises(
        SourceError, match="is neither a training mixture nor a folder of artifacts: it has no manifest"
    ):
        TrainedOn(folder / "mathvista")
    (folder / "mathvista/manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="is damaged"):
        TrainedOn(folder / "mathvista")


def test_where_the_training_data_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert place_of({"path": "mix/train.jsonl", "limit": None}) == place_of("mix/train.jsonl")
    assert place_of("mix/train.jsonl") == str(tmp_path / "mix/train.jsonl")
    for nowhere in (None, {}, {"path": None}, {"split": "train"}, "https://example.org/artifacts", "pipe:cat {name}"):
        assert place_of(nowhere) is None
