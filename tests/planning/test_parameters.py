"""Parameter counts of the papers' targets, against the modules that the FOVEA paper states, summed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fovea.app.launch import CONFIG_DIR
from fovea.drafters.fovea import FoveaConfig
from fovea.planning.plan import weightless_drafter
from fovea.targets.architecture import Architecture

REPORTED = Path(__file__).resolve().parents[2] / "benchmarks" / "parameters.yaml"


#: Model, blocks, width d, MLP width, width of keys and values, biases of queries, keys and values.
@pytest.mark.parametrize(
    ("model", "blocks", "d", "mlp", "kv", "biases"),
    [
        ("llava_next_vicuna_7b", 2, 4096, 11_008, 4096, 0),
        ("llava_next_vicuna_13b", 3, 5120, 13_824, 5120, 0),
        ("qwen25vl", 2, 3584, 18_944, 512, 3584 + 2 * 512),
    ],
)
def test_fovea_has_the_modules_that_its_paper_states(model, blocks, d, mlp, kv, biases):
    node = OmegaConf.load(CONFIG_DIR / "model" / f"{model}.yaml").architecture
    drafter = weightless_drafter("fovea", FoveaConfig(num_blocks=blocks), Architecture(**OmegaConf.to_container(node)))
    perceptrons = (2 * d * 512 + 512 + 512 * d + d) + (2 * d * 512 + 512 + 512 + 1)
    assert drafter.trainable_parameters() == {
        "fc": 2 * d * d + d,
        "blocks": blocks * (2 * d * d + 2 * d * kv + biases + 3 * d * mlp + 2 * d),
        "norm": d,
        "correction": 3 * d * d + perceptrons + 2 * 2 * d + 7 * d,
        "total": sum(weight.numel() for weight in drafter.parameters()),
    }


def test_reported_figures_are_for_targets_that_exist():
    models = {path.stem for path in (CONFIG_DIR / "model").glob("*.yaml")}
    for drafter, counts in yaml.safe_load(REPORTED.read_text(encoding="utf-8")).items():
        assert set(counts) <= models, drafter
        assert all(1e8 < float(count) < 2e9 for count in counts.values())
