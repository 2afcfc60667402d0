"""``benchmarks/decode.py``: both kinds of targets are timed, and what a round is worth is told from its time."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from fovea.visual.retrieval import RetrievalConfig

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
LLAVA = {
    "text": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    },
    "vision": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    },
}


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import decode

    yield decode
    for name in ("decode", "untrained_target"):
        sys.modules.pop(name, None)


def test_a_llava_is_timed(decode: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """In fp32 the measurement itself compares every answer with the autoregressive one."""
    size = decode.SIZES["small"].__class__(
        **LLAVA, grid=(4, 4), text_tokens=12, retrieval=RetrievalConfig(k_min=2, k_max=8)
    )
    monkeypatch.setitem(decode.SIZES, "llava", size)
    wanted = {"trees": ["2/3/6"], "accept": 2, "new_tokens": 8, "repeats": 1}
    decode.measure(Namespace(size="llava", device="cpu", dtype="fp32", **wanted))
    lines = capsys.readouterr().out.splitlines()
    (heading,) = [line for line in lines if "x, tau 2" in line]
    assert "peak GiB" not in heading  # a CPU keeps no count
    assert len([line for line in lines if line.split()[:2] in (["2/3/6", "fovea"], ["2/3/6", "fixed_prefix"])]) == 2


def test_speedups_and_peaks_are_told(decode: Any, capsys: pytest.CaptureFixture) -> None:
    """A round of 25 ms beside 20 ms per token: 2 tokens a round are worth 1.6."""
    args = Namespace(size="qwen25vl-7b", device="cuda", dtype="bf16", repeats=1, trees=["6/6/40"])
    figures = ("nodes", "accepted", "draft", "verify", "draft_passes", "verify_passes", "rest")
    row = {name: [1.0] for name in figures} | {"round": [25.0], "peak": [30.5]}
    samples = {("6/6/40", name): row for name in ("fovea", "fixed_prefix")}
    tokens = {"autoregressive": [20.0], "transformers": [22.0]}
    decode.report(args, samples, tokens, {"autoregressive": 16 << 30, "transformers": 17 << 30})
    out = capsys.readouterr().out
    assert "20.00 ms per token, at most 16.00 GiB" in out
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["6/6/40", "fovea"]]
    assert line.split()[-4:] == ["1.60", "2.40", "3.20", "30.50"]


def test_the_large_sizes_are_those_of_the_papers_targets(decode: Any) -> None:
    from omegaconf import OmegaConf

    for name, conf in (("qwen25vl-7b", "qwen25vl"), ("llava15-7b", "llava15_7b")):
        text, stated = decode.SIZES[name].text, OmegaConf.load(FOLDER.parent / "conf/model" / f"{conf}.yaml")
        known = stated.architecture
        ours = (text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"], text["vocab_size"])
        assert ours == (known.hidden_size, known.intermediate_size, known.num_layers, known.vocab_size)
        assert (text["num_attention_heads"], text["num_key_value_heads"]) == (known.num_heads, known.num_kv_heads)
