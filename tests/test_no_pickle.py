"""Nothing that is read from a disk can run code: no pickle in our code, and none while files of others are read."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("fovea", "datamodules", "callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += [ROOT / "train.py", ROOT / "evaluate.py"]
#: Modules that make objects, or run code, of what they read.
FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def faults(source: str) -> list[str]:
    """What in ``source`` could run code that it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"imports {name.name}" for name in node.names if name.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found.append(f"imports from {node.module}")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called == "torch.load" and given.get("weights_only") != "True":
                found.append("torch.load without weights_only=True")
            if given.get("weights_only") == "False" or given.get("allow_pickle") == "True":
                found.append(f"{called} allows pickles")
            if called.endswith("trainer.fit") and "ckpt_path" in given and given.get("weights_only") != "True":
                found.append("resumes a checkpoint without weights_only=True")
            reads_folder = called.endswith(".from_pretrained") and called != "GenerationConfig.from_pretrained"
            if given.get("trust_remote_code", "" if reads_folder else "False") != "False":
                found.append(f"{called} without trust_remote_code=False")
            if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
                found.append(f"calls {called}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "trainer.fit(module, ckpt_path=path)",
        "AutoConfig.from_pretrained(folder)",
        "AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)",
        "eval(text)",
    ],
)
def test_the_check_finds_what_it_looks_for(source):
    assert faults(source)


class Armed:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.fixture
def no_unpickling(monkeypatch):
    """Any unpickling by Python's own modules fails the test; torch's restricted one has its own."""

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    load = torch.load

    def guarded(*args, **settings):
        assert settings.get("weights_only") is True, "torch.load without weights_only=True"
        return load(*args, **settings)

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", guarded)


def test_no_reading_path_unpickles(no_unpickling, small_target, small_target_path, small_conversations, tmp_path):
    """Artifacts through both doors, drafters, heads of targets, results of evaluations."""
    from fovea.artifacts.config import ExportConfig
    from fovea.artifacts.export import export
    from fovea.artifacts.fingerprint import fingerprint_checkpoint
    from fovea.artifacts.reading import open_artifacts
    from fovea.artifacts.streaming import StreamedArtifacts
    from fovea.drafters.checkpoint import load_drafter, save_drafter
    from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
    from fovea.targets.load import load_head, load_spec

    config = ExportConfig(mid_layers=(1, 2), answers="dataset")
    fingerprint = fingerprint_checkpoint(small_target_path, config, "data")
    export(small_target, small_conversations, tmp_path / "artifacts", config, fingerprint, progress=False)
    assert len(list(open_artifacts(tmp_path / "artifacts"))) == 7
    cached = StreamedArtifacts(f"pipe:cat {tmp_path}/artifacts/{{name}}", batch_size=2, cache=tmp_path / "cache")
    assert sum(len(batch.keys) for batch in cached) == 7
    head, spec = load_head(small_target_path, dtype=torch.float32), load_spec(small_target_path)
    save_drafter(tmp_path / "drafter", FoveaDrafter(spec, FoveaConfig(num_blocks=1, correction_width=8), head))
    load_drafter(tmp_path / "drafter", head, spec)


def test_a_checkpoint_that_is_resumed_cannot_run_code(no_unpickling, tmp_path):
    """Also one that is a sound archive, with all that a training keeps beside the code."""
    from fovea.app.resumable import _KEPT, require_checkpoint
    from fovea.app.typed import SettingError

    mark, path = tmp_path / "owned", tmp_path / "last.ckpt"
    torch.save({name: {} for name in _KEPT} | {"callbacks": Armed(mark)}, path)
    with pytest.raises(SettingError, match="no checkpoint of plain types and tensors"):
        require_checkpoint(path)
    assert not mark.exists()


def test_a_folder_of_deepspeed_that_is_resumed_cannot_run_code(no_unpickling, tmp_path):
    """In any of its files, those behind a link included; nor may it send DeepSpeed to files elsewhere."""
    from fovea.app.resumable import require_checkpoint
    from fovea.app.typed import SettingError

    mark, folder, beside = tmp_path / "owned", tmp_path / "last.ckpt", tmp_path / "beside"
    (folder / "checkpoint").mkdir(parents=True)
    beside.mkdir()
    torch.save({"module": {"w": torch.ones(3)}}, folder / "checkpoint" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("checkpoint\n")
    require_checkpoint(folder)
    (folder / "latest").write_text("../beside")
    with pytest.raises(SettingError, match=r"latest leads out of .*'\.\./beside'"):
        require_checkpoint(folder)
    (folder / "latest").write_text("linked")
    (folder / "linked").symlink_to(beside)
    torch.save({"loss_scaler": Armed(mark)}, beside / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(SettingError, match=r"optim_states.pt is no checkpoint of plain types and tensors"):
        require_checkpoint(folder)
    assert not mark.exists()


def test_a_drafter_that_is_a_pickle_is_refused(no_unpickling, small_target, tmp_path):
    from fovea.drafters.checkpoint import CheckpointError, load_drafter, save_drafter
    from fovea.drafters.fovea import FoveaConfig, FoveaDrafter

    save_drafter(tmp_path, FoveaDrafter(small_target.spec, FoveaConfig(num_blocks=1), small_target.head))
    mark = tmp_path / "owned"
    torch.save(Armed(mark), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut or damaged"):
        load_drafter(tmp_path, small_target.head, small_target.spec)
    assert not mark.exists()
