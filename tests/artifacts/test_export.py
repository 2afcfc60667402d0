"""The export: nothing mixed up, nothing lost, whatever the batch size, the order, and however it was interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from datamodules.conversations import JsonlConversations
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError, FingerprintMismatchError
from fovea.artifacts.export import export
from fovea.artifacts.fingerprint import fingerprint_checkpoint
from fovea.artifacts.lesson import hash_image
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.reading import open_artifacts
from fovea.targets.chat_template import PromptError
from fovea.targets.images import BrokenImageError

SCRIPT = Path(__file__).parent / "export_script.py"


def by_key(folder):
    return {sample.key: sample for sample in open_artifacts(folder)}


def test_every_conversation_comes_back(tmp_path, conversations, config, fingerprint, fake_target, assert_same):
    manifest = export(fake_target(), conversations, tmp_path, config, fingerprint, progress=False)
    artifacts = open_artifacts(tmp_path)
    assert [entry.key for entry in manifest.samples()] == [c.key for c in conversations]
    assert len(manifest.shards) > 1
    ordered = sorted(conversations, key=lambda c: c.key)
    assert [sample.key for sample in artifacts] == [c.key for c in ordered]
    expected = fake_target().teach([fake_target().encode(c) for c in ordered], (1,))
    for found, sample in zip(artifacts, expected, strict=True):
        assert_same(found, sample)
    hashes = [artifacts.meta(ordered.index(conversations[place])).image_hashes for place in (2, 3, 4)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert artifacts.meta(0).source == "test"
    assert f"{len(conversations)} samples" in manifest.summary()


def test_again_does_nothing(tmp_path, conversations, config, fingerprint, fake_target):
    first = export(fake_target(), conversations, tmp_path, config, fingerprint, progress=False)
    target = fake_target()
    assert export(target, conversations, tmp_path, config, fingerprint, progress=False) == first
    assert not target.batches
    with pytest.raises(FingerprintMismatchError, match="weights"):
        export(target, conversations, tmp_path, config, replace(fingerprint, weights="new"), progress=False)


def test_two_ranks(tmp_path, conversations, config, fingerprint, fake_target):
    settings = {"progress": False, "world_size": 2}
    second, first = fake_target(), fake_target()
    assert export(second, conversations, tmp_path, config, fingerprint, rank=1, **settings) is None
    assert export(first, conversations, tmp_path, config, fingerprint, rank=0, **settings) is not None
    assert sum(first.batches) == sum(second.batches) == len(conversations) / 2
    assert sorted(by_key(tmp_path)) == sorted(c.key for c in conversations)


def test_what_gives_no_sample_is_counted(
    tmp_path, conversations, config, fingerprint, fake_target, make_conversation, caplog
):
    broken = tmp_path / "page.png"
    broken.write_text("<html>404</html>")
    extra = [
        make_conversation("empty", answer=""),
        make_conversation("broken", images=(broken,)),
        make_conversation("gone", images=(tmp_path / "none.png",)),
        make_conversation("long", answer="x" * 100),
    ]
    config = replace(config, max_tokens=50)
    manifest = export(fake_target(), [*conversations, *extra], tmp_path / "out", config, fingerprint, progress=False)
    assert len(manifest) == len(conversations)
    assert set(manifest.skipped) == {"empty", "broken", "gone", "long"}
    assert manifest.skipped["empty"].startswith("no supervised token")
    assert "page.png" in manifest.skipped["broken"]
    assert "108 tokens" in manifest.skipped["long"]
    assert Manifest.read(tmp_path / "out") == manifest
    assert "skipped 2: broken picture" in manifest.summary()
    assert "'gone' gives no sample" in caplog.text


def test_strict_stops_at_a_broken_picture(tmp_path, config, fingerprint, fake_target, make_conversation):
    items = [make_conversation("a"), make_conversation("b", images=(tmp_path / "none.png",))]
    with pytest.raises(BrokenImageError, match=r"none\.png"):
        export(fake_target(), items, tmp_path, replace(config, strict=True), fingerprint, progress=False)


def test_nothing_supervised_is_an_error(tmp_path, config, fingerprint, fake_target, make_conversation):
    items = [make_conversation(key, answer="") for key in "abc"]
    with pytest.raises(ArtifactError, match=r"not one of 3 conversations gave a sample .*no supervised token"):
        export(fake_target(), items, tmp_path, config, fingerprint, progress=False)
    assert not (tmp_path / MANIFEST).exists()


def test_doubled_keys_are_refused_before_any_work(tmp_path, config, fingerprint, fake_target, make_conversation):
    target = fake_target()
    with pytest.raises(ArtifactError, match="the key 'a'"):
        export(target, [make_conversation("a")] * 2, tmp_path, config, fingerprint, progress=False)
    assert not target.batches


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_ctrl_c_keeps_what_is_done(tmp_path, conversations, config, fingerprint, fake_target, writer):
    config = replace(config, writer=writer)

    def interrupt(batch):
        if batch[0].key == conversations[6].key:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(fake_target(interrupt), conversations, tmp_path, config, fingerprint, progress=False)
    target = fake_target()
    export(target, conversations, tmp_path, config, fingerprint, progress=False)
    assert sum(target.batches) == 4  # six were kept
    assert list(by_key(tmp_path)) == sorted(c.key for c in conversations)


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_process_resumes_to_the_same_set(tmp_path, fake_target, make_conversation, assert_same, sent, writer):
    """Ctrl-C reaches all processes of a terminal; a kill the exporting one alone."""

    def arguments(pause):
        return [sys.executable, str(SCRIPT), str(tmp_path), "12", pause, writer]

    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    # Ctrl-C reaches the child also where the tests run in the background, with the signal ignored.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    own = {"preexec_fn": heed, "start_new_session": True}
    process = subprocess.Popen(arguments("0.2"), stderr=subprocess.PIPE, env=environment, **own)
    deadline = time.monotonic() + 120
    # Killed once two shards are whole and a third one has begun.
    while len(list(tmp_path.glob("shard-*.tar"))) < 2 or not list(tmp_path.glob(".shard-*.partial")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    errors = process.communicate()[1].decode()
    assert process.returncode != 0
    assert errors.count("Traceback") == (sent == signal.SIGINT), errors
    with pytest.raises(ArtifactError, match=r"whole shards there, run it again"):
        open_artifacts(tmp_path)
    assert sent == signal.SIGKILL or not list(tmp_path.glob(".shard-*.partial"))

    subprocess.run(arguments("0"), check=True, env=environment)
    artifacts = open_artifacts(tmp_path)
    artifacts.verify()
    assert sorted(s.key for s in artifacts) == sorted(f"k.{i}" for i in range(12))
    assert not list(tmp_path.glob(".shard-*.partial"))
    for found in artifacts:
        assert_same(found, *fake_target().teach([fake_target().encode(make_conversation(found.key))], (1,)))


@pytest.mark.parametrize("answers", ["dataset", "target"])
def test_batch_size_and_order_change_nothing(
    tmp_path, small_target, small_target_path, small_conversations, assert_same, answers
):
    """On a real target, once more in the same process, and resumed in the middle."""
    config = ExportConfig(mid_layers=(1, 2), dtype="fp32", answers=answers, max_new_tokens=6, shard_bytes=60_000)
    fingerprint = fingerprint_checkpoint(small_target_path, config, "data")
    shuffled = [small_conversations[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    runs = {"one": (small_conversations, 1), "four": (small_conversations, 4), "shuffled": (shuffled, 4)}
    for name, (conversations, size) in runs.items():
        settings = replace(config, batch_size=size)
        export(small_target, conversations, tmp_path / name, settings, fingerprint, progress=False)

    (tmp_path / "resumed").mkdir()
    for path in sorted((tmp_path / "one").glob("shard-*"))[:4]:  # two shards with their index
        (tmp_path / "resumed" / path.name).write_bytes(path.read_bytes())
    export(small_target, shuffled, tmp_path / "resumed", replace(config, batch_size=3), fingerprint, progress=False)

    expected = by_key(tmp_path / "one")
    assert len(expected) == (7 if answers == "dataset" else 8)  # one is a prompt without an answer
    for name in ("four", "shuffled", "resumed"):
        found = by_key(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, sample in expected.items():
            assert_same(found[key], sample, tolerance=1e-5 * sample.last.abs().max().item())


@pytest.mark.parametrize("answers", ["dataset", "target"])
def test_what_the_context_does_not_hold_is_left_out_by_name(
    tmp_path, small_target, small_target_path, small_conversations, answers, monkeypatch
):
    """Before it was answered, or because the answers made it too long; the others are taught all the same."""
    lengths = {c.key: len(small_target.encode(c).ids) for c in small_conversations}
    context = lengths["turns"] - 2
    monkeypatch.setattr(small_target, "spec", replace(small_target.spec, max_positions=context))
    config = ExportConfig(mid_layers=(1, 2), answers=answers, max_new_tokens=30)
    fingerprint = fingerprint_checkpoint(small_target_path, config, "data")
    manifest = export(small_target, small_conversations, tmp_path, config, fingerprint, progress=False)
    assert f"has {lengths['turns']} tokens" in manifest.skipped["turns"]
    assert f"context holds {context}" in manifest.skipped["turns"]
    assert len(manifest) + len(manifest.skipped) == len(small_conversations)
    assert len(manifest) >= 5


@pytest.mark.parametrize("answers", ["dataset", "target"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("[1]", "it is a list, not an object"),
        ('{"key": "b", "messages": [{"content": "hi"}]}', "turn 1 has no 'role'"),
        ('{"key": "b", "messages": [{"role": "user", "content": "\\ud83d"}]}', "turn 1 holds half a character"),
        (
            '{"key": "b", "messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]}',
            "turn 1",
        ),
        ('{"id": 1, "video": "a.mp4", "conversations": [{"from": "human", "value": "what?"}]}', "it has 'video'"),
    ],
)
def test_a_bad_line_ends_an_export_only_if_asked(tmp_path, small_target, small_target_path, answers, bad, reason):
    good = '{"key": "%s", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}'
    (tmp_path / "c.jsonl").write_text("\n".join((good % "a", bad, good % "c")))
    source = JsonlConversations(tmp_path / "c.jsonl")
    config = ExportConfig(mid_layers=(1, 2), answers=answers, max_new_tokens=4)
    fingerprint = fingerprint_checkpoint(small_target_path, config, source.digest())
    manifest = export(small_target, source, tmp_path / "out", config, fingerprint, progress=False)
    assert sorted(found.key for found in manifest.samples()) == ["a", "c"]
    assert list(manifest.skipped) == ["c.jsonl:2"]
    assert manifest.skipped["c.jsonl:2"].startswith(f"unreadable: conversation 'c.jsonl:2': {reason}")
    with pytest.raises(PromptError, match=re.escape(f"conversation 'c.jsonl:2': {reason}")):
        export(small_target, source, tmp_path / "s", replace(config, strict=True), fingerprint, progress=False)


@pytest.mark.parametrize("name", [300 * "x", "iVBORw0KGgo" * 40])
def test_a_name_that_no_file_can_have_is_a_broken_picture(tmp_path, small_target, small_target_path, name):
    text = json.dumps({"key": "b", "images": name, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
    good = '{"key": "a", "messages": [{"role": "user", "content": "hi"}]}'
    (tmp_path / "c.jsonl").write_text(f"{good}\n{text}")
    source, config = JsonlConversations(tmp_path / "c.jsonl"), ExportConfig(mid_layers=(1, 2), max_new_tokens=4)
    fingerprint = fingerprint_checkpoint(small_target_path, config, source.digest())
    manifest = export(small_target, source, tmp_path / "out", config, fingerprint, progress=False)
    assert [found.key for found in manifest.samples()] == ["a"]
    assert "broken picture: image" in manifest.skipped["b"]
    assert len(manifest.skipped["b"]) < 400


def test_image_hash(tmp_path):
    one, other = Image.new("RGB", (4, 6)), Image.new("RGB", (6, 4))
    one.save(tmp_path / "a.png")
    assert hash_image(one) == hash_image(one.copy()) != hash_image(other)
    assert hash_image(tmp_path / "a.png") == hash_image(str(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mid_layers": ()}, "mid_layers"),
        ({"mid_layers": (1, 1)}, "mid_layers"),
        ({"dtype": "fp16"}, "choose from: bf16, fp32, fp8"),
        ({"answers": "mine"}, "choose from: target, dataset"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"writer": "fork"}, "writer is 'fork'; choose from: auto, process, thread"),
    ],
)
def test_settings_are_refused_by_name(config, change, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **change)
