"""What a run's folder says about where it comes from."""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest

from fovea.app import provenance
from fovea.app.provenance import FILE, identity_of_drafter, note_fingerprints, write_provenance


def read(folder):
    return json.loads((folder / FILE).read_text())


def test_calls_that_go_on_in_a_folder_keep_the_records_of_before(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        monkeypatch.setattr(sys, "argv", ["train.py", f"seed={number}"])
        write_provenance(tmp_path / "run")
        note_fingerprints(tmp_path / "run", target=f"hash {number}")
    record = read(tmp_path / "run")
    calls = [*record["earlier"], record]
    assert [call["command"].split()[1:] for call in calls] == [["train.py", f"seed={number}"] for number in (1, 2, 3)]
    assert [call["fingerprints"] for call in calls] == [{"target": f"hash {number}"} for number in (1, 2, 3)]
    assert all("earlier" not in call for call in record["earlier"])


def test_fingerprints_are_added_to_each_other_and_nothing_else_is_touched(tmp_path):
    write_provenance(tmp_path)
    before = read(tmp_path)
    note_fingerprints(tmp_path, target="a", train={"weights": "a"})
    note_fingerprints(tmp_path, drafter={"weights": "b"})
    assert read(tmp_path) == before | {
        "fingerprints": {"target": "a", "train": {"weights": "a"}, "drafter": {"weights": "b"}}
    }


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_record_does_not_stop_a_run(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    write_provenance(tmp_path)
    assert "earlier" not in read(tmp_path)


def test_a_worker_of_a_sweep_names_the_command_of_its_job(monkeypatch):
    config = SimpleNamespace(
        job=SimpleNamespace(name="train"), overrides=SimpleNamespace(task=["experiment=fovea", "name=a b"])
    )
    monkeypatch.setattr(sys, "argv", ["submitit/core/_submit.py", "/jobs/%j"])
    monkeypatch.setattr(
        provenance, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: config), raising=True
    )
    assert provenance.provenance()["command"].endswith(" train.py experiment=fovea 'name=a b'")


def test_a_drafter_is_told_by_its_weights_and_its_origin(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text(json.dumps({"drafter": "fovea", "origin": {"commit": "abc"}}))
    assert identity_of_drafter(tmp_path) == {
        "folder": str(tmp_path),
        "weights": hashlib.sha256(b"weights").hexdigest(),
        "origin": {"commit": "abc"},
    }
