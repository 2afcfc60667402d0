"""Artifacts of another target, data set or configuration are refused by the name of what differs."""

import json
import shutil
from dataclasses import asdict, replace

import pytest

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import FingerprintMismatchError
from fovea.artifacts.fingerprint import Fingerprint, fingerprint_checkpoint, model_settings, processor_settings


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
    one, two = (replace(fingerprint, model={"rope.theta": theta}) for theta in (10.0, 20.0))
    one.require(two, "there", fields=("dtype",))
    with pytest.raises(FingerprintMismatchError, match=r"model\.rope\.theta is 10\.0 there, 20\.0 here"):
        one.require(two, "there", fields=("weights",))
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


def edit(file, part, **values):
    content = json.loads(file.read_text())
    (content[part] if part else content).update(values)
    file.write_text(json.dumps(content, indent=7))


ROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("file", "part", "values", "name"),
    [
        ("config.json", "text_config", {"rope_parameters": ROPE}, "rope.theta"),
        ("config.json", "text_config", {"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ("config.json", "text_config", {"num_attention_heads": 2, "num_key_value_heads": 1}, "num_heads"),
        ("config.json", "text_config", {"hidden_act": "relu"}, "text.hidden_act"),
        ("config.json", "vision_config", {"window_size": 28}, "vision.window_size"),
        ("config.json", "", {"vision_feature_layer": -1}, "vision_feature_layer"),
        ("generation_config.json", "", {"eos_token_id": 0}, "eos_ids"),
        ("tokenizer_config.json", "", {"eos_token": "<|other|>"}, "tokenizer.eos_token"),
        ("tokenizer_config.json", "", {"add_bos_token": True}, "tokenizer.add_bos_token"),
    ],
)
def test_what_changes_prompts_or_states_is_named(small_target_path, tmp_path, file, part, values, name):
    """Weights, processor and tokenizer.json are the same."""
    copy = shutil.copytree(small_target_path, tmp_path / "copy")
    edit(copy / file, part, **values)
    one, other = (fingerprint_checkpoint(p, ExportConfig((1,)), "d") for p in (small_target_path, copy))
    assert f"model.{name}" in one.differences(other)
    assert {field.split(".")[0] for field in one.differences(other)} == {"model"}
    assert one.digest() != other.digest()


def test_a_chat_template_counts_where_it_is_read_from(small_target_path, tmp_path):
    copy = shutil.copytree(small_target_path, tmp_path / "copy")
    before = model_settings(copy)
    edit(copy / "tokenizer_config.json", "", chat_template="another")
    assert model_settings(copy) == before  # chat_template.jinja is read instead
    (copy / "chat_template.jinja").unlink()
    found = []
    for template in ("one", "two"):
        edit(copy / "tokenizer_config.json", "", chat_template=template)
        found.append(model_settings(copy)["tokenizer.chat_template"])
    assert found[0] != found[1]


def test_another_layout_of_the_same_settings_is_no_difference(small_target_path, tmp_path):
    copy = shutil.copytree(small_target_path, tmp_path / "copy")
    ends = json.loads((copy / "generation_config.json").read_text())["eos_token_id"]
    edit(copy / "generation_config.json", "", eos_token_id=ends[::-1], transformers_version="4.0")
    edit(copy / "config.json", "", dtype="bfloat16", transformers_version="4.0", _name_or_path="/elsewhere")
    edit(copy / "config.json", "text_config", initializer_range=1.0, use_cache=False)
    ending = json.loads((copy / "tokenizer_config.json").read_text())["eos_token"]
    edit(copy / "tokenizer_config.json", "", eos_token={"content": ending, "lstrip": False}, padding_side="left")
    one, other = (fingerprint_checkpoint(p, ExportConfig((1,)), "d") for p in (small_target_path, copy))
    assert one.differences(other) == {}
    assert one.digest() == other.digest()


def test_older_artifacts_that_do_not_know_these_settings_are_read(fingerprint):
    newer = replace(fingerprint, model={"rope.theta": 10.0})
    assert fingerprint.differences(newer) == newer.differences(fingerprint) == {}
    assert newer.differences(replace(fingerprint, model={"rope.theta": 20.0})) == {"model.rope.theta": (10.0, 20.0)}
