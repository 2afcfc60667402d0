"""Artifacts of another target, data set or configuration are refused by the name of what differs."""

import json
from dataclasses import asdict, replace

import pytest

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import FingerprintMismatchError
from fovea.artifacts.fingerprint import Fingerprint, fingerprint_checkpoint, processor_settings


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("weights", "other", "weights"),
        ("processor", {"max_pixels": 8}, "processor.max_pixels"),
        ("data", "other", "data"),
        ("mid_layers", (1, 2, 3), "mid_layers"),
        ("dtype", "fp8", "dtype"),
        ("answers", "target", "answers"),
        ("max_new_tokens", 7, "max_new_tokens"),
        ("max_tokens", 7, "max_tokens"),
    ],
)
def test_each_field_is_named(fingerprint, field, value, name):
    other = replace(fingerprint, **{field: value})
    with pytest.raises(FingerprintMismatchError, match=rf"in /some/folder do not fit: {name} is "):
        fingerprint.require(other, "/some/folder")
    assert other.digest() != fingerprint.digest()


def test_only_the_asked_fields(fingerprint):
    fingerprint.require(replace(fingerprint, data="other"), "there", fields=("weights",))
    with pytest.raises(FingerprintMismatchError, match="weights"):
        fingerprint.require(replace(fingerprint, data="other", weights="other"), "there", fields=("weights",))


def test_provenance_is_not_refused_but_versions_are_reported(fingerprint, caplog):
    other = replace(fingerprint, target="elsewhere", revision="main", versions={"transformers": "9.9"})
    fingerprint.require(other, "there")
    assert "transformers" in caplog.text
    assert "9.9" in caplog.text
    assert other.digest() == fingerprint.digest()


def test_json_round_trip(fingerprint):
    assert Fingerprint.from_json(json.loads(json.dumps(asdict(fingerprint)))) == fingerprint


def test_checkpoint(small_target_path, tmp_path):
    config = ExportConfig(mid_layers=(1, 2))
    one = fingerprint_checkpoint(small_target_path, config, "data")
    assert one == fingerprint_checkpoint(small_target_path, config, "data")
    assert one.max_new_tokens == 500
    assert fingerprint_checkpoint(small_target_path, replace(config, answers="dataset"), "data").max_new_tokens is None

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in small_target_path.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert not fingerprint_checkpoint(copy, config, "data").differences(one)
    names = ("preprocessor_config.json", "processor_config.json")
    settings = next(path for name in names if (path := copy / name).is_file())
    settings.write_text(settings.read_text().replace(str(28 * 28 * 64), str(28 * 28 * 32)))
    different = fingerprint_checkpoint(copy, config, "data").differences(one)
    assert different
    assert all(name.startswith("processor.") for name in different)
    assert set(different.values()) == {(28 * 28 * 32, 28 * 28 * 64)}
    assert processor_settings(copy) != processor_settings(small_target_path)
