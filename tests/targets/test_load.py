import importlib.util
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fovea.targets.architecture import read_architecture
from fovea.targets.chat_template import PromptError
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.load import (
    load_generation_config,
    load_head,
    load_spec,
    load_target,
    resolve_checkpoint,
    weights_fingerprint,
)
from fovea.targets.processor import read_processor
from fovea.targets.spec import UnsupportedTargetError
from fovea.targets.vision import load_vision


@pytest.fixture
def folder(small_target_path: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint to spoil."""
    return Path(shutil.copytree(small_target_path, tmp_path / "target"))


def edit(file: Path, **changes) -> None:
    config = json.loads(file.read_text())
    for name, value in changes.items():
        place, _, leaf = name.rpartition("__")
        (config[place] if place else config)[leaf] = value
    file.write_text(json.dumps(config))


def as_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {f"model-{number + 1:05}-of-00003.safetensors": names[number::3] for number in range(3)}
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, kept in parts.items() for name in kept}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_old_names(folder: Path) -> None:
    """The names that the published Qwen2.5-VL checkpoints use."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("language_model.", "").replace("model.visual.", "visual."): t for name, t in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", [lambda folder: None, as_shards, as_bin, as_old_names])
def test_every_layout_of_a_checkpoint_gives_the_same_head(small_target, folder: Path, layout) -> None:
    layout(folder)
    head, whole = load_head(folder, dtype=torch.float32), load_target(folder).head
    for name in ("embedding", "lm_head_weight", "norm_weight"):
        assert torch.equal(getattr(head, name), getattr(small_target.head, name))
        assert torch.equal(getattr(whole, name), getattr(small_target.head, name))
    assert load_head(folder, dtype=torch.bfloat16).lm_head_weight.dtype == torch.bfloat16


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    head = load_head(folder, dtype=torch.float32)
    assert head.lm_head_weight is head.embedding
    assert head.to("cpu", torch.float64).lm_head_weight.dtype == torch.float64
    assert torch.equal(load_target(folder).head.lm_head_weight, head.embedding)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "norm.weight"])
def test_a_missing_tensor_is_never_made_up(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {key: t for key, t in tensors.items() if not key.endswith(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds no (LM head|input embedding|final norm weight)"):
        load_head(folder, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=rf"lacks \d+ tensors of a Qwen2_5_VL.*{name} among them"):
        load_target(folder)


def test_tensors_without_a_place_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_target(folder)
    assert not caplog.records
    tensors = load_file(folder / "model.safetensors")
    norm = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[norm.replace("q_proj", "q_norm")] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_target(folder)
    assert "1 tensors of" in caplog.text
    assert "layers.0.self_attn.q_norm.weight among them" in caplog.text


def test_the_spec_needs_no_weights(small_target, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    spec = load_spec(folder)
    assert spec == small_target.spec
    assert (spec.num_layers, spec.head_dim, spec.rope.axes, spec.qkv_bias) == (4, 16, 3, True)
    assert spec.eos_ids == tuple(small_target.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert small_target.image_token_id in spec.placeholder_ids


def test_end_tokens_come_from_the_configuration_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (end,) = load_spec(folder).eos_ids
    assert end == json.loads((folder / "config.json").read_text())["text_config"]["eos_token_id"]
    edit(folder / "config.json", text_config__eos_token_id=None)
    with pytest.raises(ValueError, match=r"names no end token"):
        load_spec(folder)


def test_the_model_itself_applies_no_generation_settings(folder: Path) -> None:
    target = load_target(folder)
    assert load_generation_config(folder).repetition_penalty == 1.3
    (folder / "generation_config.json").unlink()
    assert load_generation_config(folder) is None
    assert target.model.generation_config.repetition_penalty in (None, 1.0)
    assert target.model.generation_config.eos_token_id == list(target.spec.eos_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; supported are .*Qwen2_5_VLFor.*new_target"),
        ({"text_config__layer_types": ["sliding_attention"] * 4}, "sliding_attention.*use_sliding_window=false"),
        ({"text_config__rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
    ],
)
def test_targets_that_cannot_be_decoded_losslessly_are_refused(folder: Path, changes, message) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(UnsupportedTargetError, match=message):
        load_spec(folder)
    with pytest.raises(UnsupportedTargetError, match=message):
        load_target(folder)


def test_a_missing_chat_template_is_found_before_the_weights_are_read(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(PromptError, match=r"no chat template; add chat_template.jinja"):
        load_target(folder)


CODE = "from pathlib import Path\nPath('{mark}').touch()\n"


@pytest.fixture
def armed(folder: Path, tmp_path: Path, monkeypatch) -> tuple[Path, Path]:
    """A checkpoint with modules of its own, and what stands there if one of them was run; who is asked says yes."""
    mark = tmp_path / "owned"
    for name in ("configuration_own", "modeling_own", "processing_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(CODE.format(mark=mark))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(mark=mark))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder, mark


MODEL = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}


@pytest.mark.parametrize("architecture", ["OwnForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_a_folder_that_needs_its_own_code_is_refused(armed, architecture) -> None:
    folder, mark = armed
    edit(folder / "config.json", architectures=[architecture], model_type="own", auto_map=MODEL)
    named = r"target' can only be read by Python code that it brings .* docs/new_target\.md"
    for read in (load_spec, load_target, read_architecture, lambda path: load_head(path, dtype=torch.float32)):
        with pytest.raises(UnsupportedTargetError, match=named) as error:
            read(folder)
        assert "\n" not in str(error.value)
    assert not mark.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(armed, small_checkpoint) -> None:
    folder, mark = armed
    shutil.copytree(small_checkpoint("llama"), folder, dirs_exist_ok=True)
    own = {"AutoTokenizer": ["tokenization_own.Own", None]}
    edit(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="OwnTokenizer")
    edit(folder / "config.json", model_type="own")
    with pytest.raises(UnsupportedTargetError, match=r"can only be read by Python code that it brings"):
        read_processor(folder, AutoTokenizer)
    assert not mark.exists()


def test_of_a_folder_that_transformers_knows_no_code_is_run(armed, small_target) -> None:
    """Models that have come into transformers keep theirs."""
    folder, mark = armed
    edit(folder / "config.json", auto_map=MODEL)
    own = {"AutoProcessor": "processing_own.Own", "AutoTokenizer": ["tokenization_own.Own", None]}
    for name in ("processor_config.json", "tokenizer_config.json"):
        edit(folder / name, auto_map=own)
    assert load_target(folder).spec == small_target.spec
    assert not mark.exists()


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "optimum"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}, "bitsandbytes"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
            "compressed-tensors",
        ),
    ],
)
@pytest.mark.parametrize("where", ["quantization_config", "text_config__quantization_config"])
def test_quantised_weights_name_the_package_that_reads_them(folder: Path, settings, package, where) -> None:
    if importlib.util.find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    edit(folder / "config.json", **{where: settings})
    (folder / "model.safetensors").write_bytes(b"not looked at")
    named = rf"quantised \({settings['quant_method']}\) and cannot be read here: .*{package}.* model\.path=<folder>$"
    for read in (load_target, lambda path: load_vision(path, device="cpu", dtype=torch.float32)):
        with pytest.raises(UnsupportedTargetError, match=named) as error:
            read(folder)
        assert "\n" not in str(error.value)


def test_a_language_model_without_the_reader_of_its_tokenizer_is_named(small_checkpoint, tmp_path, monkeypatch) -> None:
    folder = Path(shutil.copytree(small_checkpoint("llama"), tmp_path / "target"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x05\n")
    monkeypatch.setattr("fovea.targets.processor.is_sentencepiece_available", lambda: False)
    with pytest.raises(CheckpointError, match=r"holds tokenizer\.model and no .*; run pip install sentencepiece$"):
        load_target(folder)


def test_attention_without_a_tree_mask_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'flash_attention_2' takes no tree mask; use 'sdpa'"):
        load_target(folder, attn_implementation="flash_attention_2")


def test_half_precision_is_that_of_weights_cache_and_states(small_target_path, small_conversations) -> None:
    target = load_target(small_target_path, dtype=torch.bfloat16)
    encoded = target.encode(small_conversations[0])
    state, prefill = target.prefill(encoded, 4, draft_rows=4)
    hidden = target.extend(state, torch.tensor([9, 8]), state.text_positions(torch.tensor([0, 1])))
    dtypes = {target.dtype, state.cache.buffer.dtype, prefill.hidden.dtype, prefill.visual.dtype, hidden.dtype}
    assert dtypes == {torch.bfloat16}
    (sample,) = target.teach([encoded], [1])
    assert sample.mid.dtype == torch.bfloat16


def test_a_local_folder_is_taken_as_it_is(small_target_path: Path) -> None:
    assert resolve_checkpoint(str(small_target_path), "some/model") == small_target_path


def test_what_is_missing_is_said_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*model.path=<folder>"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint is named.*model.path=<folder>"):
        resolve_checkpoint(None)
    as_shards(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 3 weight files, model-00002-of-00003.safetensors"):
        resolve_checkpoint(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights.*model.path=<folder>"):
        resolve_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json; point model.path"):
        resolve_checkpoint(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "model.safetensors").write_text(POINTER), r"model.safetensors' is a Git-LFS pointer.*lfs pull"),
        (lambda f: cut(f / "model.safetensors"), r"model.safetensors' is cut off.*fetch this file again"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), r"model.safetensors' is cut off: it is empty; fetch"),
        (lambda f: cut(f / "config.json"), r"config.json' is no whole JSON.*fetch this file again"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json' holds no JSON object.*model.path="),
        (lambda f: cut(f / "generation_config.json"), r"generation_config.json' is no whole JSON.*model.path="),
        (lambda f: [p.unlink() for p in f.glob("*token*")], r"holds no tokenizer \(tokenizer.json.*model.path="),
        (lambda f: (f / "processor_config.json").unlink(), r"holds no processor or tokenizer.*model.path="),
        (lambda f: edit(f / "config.json", text_config__vocab_size=77), r"config.json' has other sizes than the wei"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), r"index.json' names no weight files"),
    ],
)
def test_damage_is_named_with_file_and_remedy(folder: Path, spoil, message: str) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load_target(folder)
    assert "\n" not in str(error.value)


class Armed:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file, mark: cut(file), "is cut off or no weight file of torch"),
        (lambda file, mark: file.write_bytes(b""), "is cut off: it is empty"),
        (lambda file, mark: file.write_text(POINTER), "is a Git-LFS pointer"),
        (lambda file, mark: file.write_bytes(b"<html>not found</html>" * 9), "is cut off or no weight file of torch"),
        (lambda file, mark: file.write_bytes(pickle.dumps(Armed(mark), 2)), r"would run code .*\(\w+\.system\)"),
        (lambda file, mark: file.write_bytes(pickle.dumps(Armed(mark), 5)), "is cut off or no weight file of torch"),
        (lambda file, mark: torch.save({"x": Armed(mark)}, file), r"would run code when it is read \(\w+\.system\)"),
        (
            lambda file, mark: torch.save({"epoch": 3, "w": torch.ones(2)}, file),
            "holds something else than tensors by name",
        ),
        (lambda file, mark: torch.save([torch.ones(2)], file), "holds something else than tensors by name"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_bin_is_named_and_runs_nothing(folder: Path, tmp_path: Path, spoil, message: str) -> None:
    as_bin(folder)
    mark = tmp_path / "owned"
    spoil(folder / "pytorch_model.bin", mark)
    for read in (load_target, lambda path: load_head(path, dtype=torch.float32)):
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin' {message}.*model\.path=") as error:
            read(folder)
        assert "\n" not in str(error.value)
    assert not mark.exists()


def test_one_damaged_shard_of_several_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {name: f"pytorch_model-{number % 2 + 1:05}-of-00002.bin" for number, name in enumerate(sorted(tensors))}
    for file in set(index.values()):
        torch.save({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert load_head(folder, dtype=torch.float32).embedding.shape[1] == 64
    cut(folder / "pytorch_model-00002-of-00002.bin")
    for read in (load_target, lambda path: load_head(path, dtype=torch.float32)):
        with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin' is cut off"):
            read(folder)


def test_a_bin_from_before_archives_is_read(small_target, folder: Path) -> None:
    """torch wrote plain pickles before 1.6; these cannot be mapped."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    assert torch.equal(load_head(folder, dtype=torch.float32).lm_head_weight, small_target.head.lm_head_weight)


@pytest.mark.parametrize("spoil", [cut, lambda file: file.write_text(POINTER)])
def test_a_head_is_not_read_from_damaged_weights(folder: Path, spoil) -> None:
    spoil(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors' is .*model.path="):
        load_head(folder, dtype=torch.float32)


def test_an_empty_list_of_end_tokens_is_none(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[])
    with pytest.raises(ValueError, match=r"names no end token"):
        load_spec(folder)


def test_the_hub_is_asked_on_request_only(folder: Path, monkeypatch) -> None:
    asked: list[bool] = []

    def snapshot(hub_id: str, revision: str | None, local_files_only: bool) -> str:
        asked.append(local_files_only)
        return str(folder)

    monkeypatch.setattr("fovea.targets.checkpoint.snapshot_download", snapshot)
    assert resolve_checkpoint(None, "some/model", "abc") == folder
    assert resolve_checkpoint(None, "some/model", "abc", download=True) == folder
    assert asked == [True, False]


def test_a_model_that_is_not_at_hand_is_named_with_its_revision(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    named = r"the weights of nobody/nothing at revision abc .*model.path=<folder>"
    for download, what in ((False, r"are not in the local hub cache.*model.download=true"), (True, "be downloaded")):
        with pytest.raises(CheckpointError, match=named) as error:
            resolve_checkpoint(None, "nobody/nothing", "abc", download=download)
        assert re.search(what, str(error.value))
        assert "\n" not in str(error.value)


def test_the_fingerprint_follows_the_weights(folder: Path, monkeypatch) -> None:
    before = weights_fingerprint(folder)
    assert before == weights_fingerprint(folder)
    (folder / "README.md").write_text("words")
    assert weights_fingerprint(folder) == before
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(folder) != before


def test_large_files_are_sampled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fovea.targets.checkpoint._WHOLE_FILE", 64)
    monkeypatch.setattr("fovea.targets.checkpoint._BLOCK", 8)
    monkeypatch.setattr("fovea.targets.checkpoint._STRIDE", 32)
    content = bytearray(range(128))
    file = tmp_path / "model.safetensors"
    prints = []
    for place in (None, 33, 20):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        file.write_bytes(changed)
        prints.append(weights_fingerprint(tmp_path))
    assert prints[1] != prints[0]
    assert prints[2] == prints[0]
