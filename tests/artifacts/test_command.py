"""The command line of the export."""

import errno
import json
import logging
import os
import sys

import pytest

from fovea.artifacts import command
from fovea.artifacts.reading import open_artifacts
from fovea.targets.load import ADAPTERS


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        for i in range(3):
            messages = [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "red"}]
            file.write(json.dumps({"key": f"k.{i}", "messages": messages}) + "\n")
    return ["--data", "datamodules.conversations:JsonlConversations", f"path={path}", "limit=2"]


def test_exports_and_resumes(tmp_path, small_target_path, data, capsys, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    arguments = ["--target", str(small_target_path), "--out", str(tmp_path / "out"), "--device", "cpu", *data]
    for _ in range(2):
        command.main([*arguments, "--answers", "dataset", "--mid-layers", "1", "2"])
        assert "2 samples in 1 shards" in capsys.readouterr().out
    assert [sample.key for sample in open_artifacts(tmp_path / "out")] == ["k.0", "k.1"]
    with pytest.raises(SystemExit, match=r"error: .*answers is 'dataset' there, 'target' here"):
        command.main([*arguments, "--mid-layers", "1", "2"])


def test_a_plugin_of_the_working_directory_is_imported_first(tmp_path, monkeypatch, data):
    name = "Mine" + "ForConditionalGeneration"
    (tmp_path / "my_target.py").write_text(
        f"from fovea.targets.load import ADAPTERS\nfrom fovea.targets.llava import Llava\nADAPTERS[{name!r}] = Llava\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fovea.targets.load.ADAPTERS", dict(ADAPTERS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "unheard_of"}))
    arguments = ["--target", str(tmp_path), "--out", str(tmp_path / "out"), *data]
    with pytest.raises(SystemExit, match=f"holds {name}; supported are"):
        command.main(arguments)
    with pytest.raises(SystemExit, match=f"holds a {name} that transformers cannot read"):
        command.main([*arguments, "--plugin", "my_target"])


def test_an_empty_file_is_named_before_the_target_is_loaded(tmp_path, small_target_path, monkeypatch):
    monkeypatch.setattr("fovea.targets.load.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    data = ["--data", "datamodules.conversations:JsonlConversations", f"path={empty}"]
    with pytest.raises(SystemExit, match=rf"^error: there is no conversation in {empty}; is a file empty"):
        command.main(["--target", str(small_target_path), "--out", str(tmp_path / "out"), "--device", "cpu", *data])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "nonsense"], "write module:factory key=value"),
        (["--data", "datamodules.conversations:Nothing"], "Nothing"),
        (["--data", "datamodules.conversations:JsonlConversations", "file=x"], "file"),
        (["--data", "datamodules.conversations:JsonlConversations", "path=nowhere.jsonl"], r"nowhere\.jsonl"),
        (["--batch-size", "0"], "batch_size"),
        (["--target", "nowhere"], "nowhere"),
        (["--plugin", "no_such_module"], "--plugin no_such_module: No module named .*extend PYTHONPATH"),
        (["--visual", "recomputed"], "reads text only; export with visual=stored"),
    ],
)
def test_errors_are_one_sentence(tmp_path, small_target_path, data, change, message):
    if "--visual" in change:
        config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": 0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        small_target_path = tmp_path
    arguments = ["--target", str(small_target_path), "--out", str(tmp_path), *data, *change]
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        command.main(arguments)


@pytest.mark.parametrize(
    ("number", "file", "message"),
    [
        (errno.ENOSPC, "a/.lock-00", r"no room for a/\.lock-00 \(No space left on device; .* goes on with an export"),
        (errno.EDQUOT, None, r"no room for .*out \(Disk quota exceeded"),
        (errno.ENOLCK, None, "cannot be locked .*name a local --out"),
        (errno.EACCES, "a", r"Permission denied: 'a'"),
    ],
)
def test_files_that_cannot_be_written_end_it_in_one_sentence(tmp_path, monkeypatch, number, file, message):
    def full(options):
        raise OSError(number, os.strerror(number), *([file] if file else []))

    monkeypatch.setattr(command, "_run", full)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        command.main(["--target", "t", "--out", str(tmp_path / "out"), "--data", "m:f"])


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, small_target_path, data):
    (tmp_path / "out").write_text("")
    with pytest.raises(SystemExit, match=r"--out .*out is no folder, and a file is in its way; name another one"):
        command.main(["--target", str(small_target_path), "--out", str(tmp_path / "out"), *data])
