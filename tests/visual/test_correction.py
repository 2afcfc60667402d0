"""Memory and correction against the golden vectors, gradients included, and the controls by what defines them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fovea.visual.correction import EvidenceCorrection
from fovea.visual.prefix import kept_in_prefix
from fovea.visual.retrieval import RetrievalConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "correction"
CASES = json.loads((GOLDEN / "index.json").read_text())


def golden(name: str) -> tuple[SimpleNamespace, EvidenceCorrection]:
    """The arrays of a case and a correction that holds its weights, in float64."""
    case = SimpleNamespace(**{k: torch.from_numpy(v) for k, v in np.load(GOLDEN / f"{name}.npz").items()})
    rule = {k: v for k, v in CASES[name].items() if k not in ("note", "max_correction_depth")}
    module = EvidenceCorrection(
        16,
        12,
        depths=7,
        max_depth=CASES[name]["max_correction_depth"],
        config=RetrievalConfig(**rule),
    ).double()
    assert module.gate is not None
    weights = {
        "memory_norm.weight": case.ln_v_weight,
        "memory_norm.bias": case.ln_v_bias,
        "key.weight": case.W_K,
        "value.weight": case.W_U,
        "query_norm.weight": case.ln_h_weight,
        "query_norm.bias": case.ln_h_bias,
        "query.weight": case.W_Q,
        "depth_embedding": case.E_dep,
        "mixed.weight": torch.cat((case.corr_w1, case.gate_w1)),
        "mixed.bias": torch.cat((case.corr_b1, case.gate_b1)),
        "shift.weight": case.corr_w2,
        "shift.bias": case.corr_b2,
        "gate.weight": case.gate_w2,
        "gate.bias": case.gate_b2,
    }
    module.load_state_dict(weights)
    return case, module


def rms(case: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (16,), case.rms_weight, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_golden_vectors(name: str) -> None:
    case, module = golden(name)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    memory = module.remember(case.v, case.valid)
    normed = module.memory_norm(case.v)
    close(module.key(normed), case.k)
    close(module.value(normed), case.u)
    close(memory.values[case.valid], case.u[case.valid])
    close(module.query(module.query_norm(case.h) + case.E_dep[case.depth]), case.q)
    close(module.scores_of(case.h, case.depth, memory)[:, case.valid], case.s[:, case.valid])

    found = module.retrieve(case.h, case.depth, memory)
    assert torch.equal(found.k, case.K)
    assert torch.equal(found.selected, case.selected)
    close(found.alpha, case.alpha)
    close(found.alpha @ memory.values, case.r)
    close(module.shift_of(case.h, case.r), case.g * case.c)

    corrected, _ = module(case.h, case.depth, memory)
    close(rms(case, corrected), case.h_hat)
    close(rms(case, corrected) @ case.W_LM.T, case.z)
    module.max_depth = 6
    everywhere, _ = module(case.h, case.depth, memory)
    close(rms(case, everywhere), case.h_hat_all_depths)


WITH_GRADIENTS = [n for n in CASES if any(k.startswith("grad_") for k in np.load(GOLDEN / f"{n}.npz"))]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_golden_gradients(name: str) -> None:
    case, module = golden(name)
    inputs = {
        "h": case.h.requires_grad_(),
        "v": case.v.requires_grad_(),
        "E_dep": module.depth_embedding,
        "W_Q": module.query.weight,
        "W_K": module.key.weight,
        "W_U": module.value.weight,
    }
    given = {key: tensor for key, tensor in inputs.items() if hasattr(case, f"grad_{key}")}
    corrected, _ = module(case.h, case.depth, module.remember(case.v, case.valid))
    gradients = torch.autograd.grad((case.G * rms(case, corrected)).sum(), list(given.values()), allow_unused=True)
    for key, gradient in zip(given, gradients, strict=True):
        expected = getattr(case, f"grad_{key}")
        gradient = torch.zeros_like(expected) if gradient is None else gradient
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", [n for n in CASES if n != "empty_memory"])
def test_one_depth_without_padding_equals_mixed_depths_with_padding(name: str) -> None:
    """Decoding passes one depth per call and valid entries only."""
    case, module = golden(name)
    mixed, _ = module(case.h, case.depth, module.remember(case.v, case.valid))
    memory = module.remember(case.v[case.valid])
    for depth in case.depth.unique().tolist():
        rows = case.depth == depth
        alone, found = module(case.h[rows], depth, memory)
        torch.testing.assert_close(alone, mixed[rows], rtol=1e-12, atol=1e-12)
        assert (found is not None) == (depth <= CASES[name]["max_correction_depth"])


def test_padding_may_hold_anything() -> None:
    case, module = golden("basic")
    expected, _ = module(case.h, case.depth, module.remember(case.v, case.valid))
    dirty = case.v.clone()
    dirty[~case.valid] = torch.nan
    dirty.requires_grad_()
    h = case.h.requires_grad_()
    got, _ = module(h, case.depth, module.remember(dirty, case.valid))
    torch.testing.assert_close(got, expected)
    for gradient in torch.autograd.grad(got.sum(), [h, dirty, module.query.weight]):
        assert torch.isfinite(gradient).all()


def test_rows_of_different_requests_share_a_call() -> None:
    """``valid`` [R, N]: each row corrects as if its own entries were the memory; one without entries is skipped."""
    case, module = golden("all_depths")
    valid = torch.zeros(7, 40, dtype=torch.bool)
    valid[:3, :15], valid[3:6, 15:] = True, True
    memory = module.remember(case.v)
    got, found = module(case.h, case.depth, replace(memory, valid=valid))
    assert found is not None
    first, _ = module(case.h[:3], case.depth[:3], module.remember(case.v[:15]))
    second, _ = module(case.h[3:6], case.depth[3:6], module.remember(case.v[15:]))
    torch.testing.assert_close(got, torch.cat((first, second, case.h[6:])))


def test_an_untrained_correction_changes_nothing() -> None:
    module = EvidenceCorrection(16, 8, depths=3, max_depth=2, config=RetrievalConfig(k_min=1, k_max=4))
    h = torch.randn(5, 16)
    corrected, found = module(h, 0, module.remember(torch.randn(9, 16)))
    assert found is not None
    assert torch.equal(corrected, h)


def control(mode: str, **settings: object) -> EvidenceCorrection:
    """A correction in a control mode, with weights that matter."""
    torch.manual_seed(0)
    module = EvidenceCorrection(16, 8, depths=3, max_depth=2, config=RetrievalConfig(mode=mode, k=4, **settings))  # pyright: ignore
    torch.nn.init.normal_(module.shift.weight)
    torch.nn.init.normal_(module.get_parameter("depth_embedding"))
    return module


def test_random_draws_differ_per_node_and_repeat_per_request() -> None:
    module, h, visual = control("random"), torch.randn(6, 16), torch.randn(30, 16)
    memory = module.remember(visual)
    first, second = module.retrieve(h, 0, memory), module.retrieve(h, 0, memory)
    assert not torch.equal(first.selected, second.selected)
    assert len({tuple(row) for row in first.selected.tolist()}) > 1
    assert first.k.tolist() == [4] * 6
    assert torch.equal(module.retrieve(h, 0, module.remember(visual)).selected, first.selected)
    scores = module.scores_of(h, 0, memory)
    torch.testing.assert_close(first.alpha, scores.masked_fill(~first.selected, -torch.inf).softmax(-1))


def test_static_image_takes_the_keys_of_largest_norm() -> None:
    module, h, visual = control("static_image"), torch.randn(6, 16), torch.randn(30, 16)
    memory = module.remember(visual)
    largest = set(module.key(module.memory_norm(visual)).norm(dim=-1).topk(4).indices.tolist())
    for row in module.retrieve(h, 1, memory).selected:
        assert set(row.nonzero()[:, 0].tolist()) == largest


def test_query_agnostic_ignores_the_state_and_state_only_the_depth() -> None:
    h, other, visual = torch.randn(6, 16), torch.randn(6, 16), torch.randn(30, 16)
    module = control("query_agnostic")
    memory = module.remember(visual)
    assert torch.equal(module.retrieve(h, 0, memory).alpha, module.retrieve(other, 0, memory).alpha)
    assert not torch.equal(module.retrieve(h, 0, memory).alpha, module.retrieve(h, 1, memory).alpha)
    module = control("state_only")
    memory = module.remember(visual)
    assert torch.equal(module.retrieve(h, 0, memory).alpha, module.retrieve(h, 1, memory).alpha)
    assert not torch.equal(module.retrieve(h, 0, memory).alpha, module.retrieve(other, 0, memory).alpha)


def test_once_per_block_reuses_the_roots_selection_with_own_weights() -> None:
    module, h, visual = control("once_per_block"), torch.randn(6, 16), torch.randn(30, 16)
    memory = module.remember(visual)
    root = module.retrieve(h[:1], 0, memory)
    below = module.retrieve(h[1:], 1, memory, root.selected)
    assert torch.equal(below.selected, root.selected.expand(5, -1))
    scores = module.scores_of(h[1:], 1, memory)
    torch.testing.assert_close(below.alpha, scores.masked_fill(~below.selected, -torch.inf).softmax(-1))


def test_gate_and_depth_embedding_are_optional() -> None:
    module = EvidenceCorrection(
        16, 8, depths=3, max_depth=2, config=RetrievalConfig(), use_gate=False, use_depth_embedding=False
    )
    torch.nn.init.normal_(module.shift.weight)
    h, memory = torch.randn(5, 16), module.remember(torch.randn(9, 16))
    assert not any(name.startswith(("gate", "depth")) for name, _ in module.named_parameters())
    torch.testing.assert_close(module(h, 0, memory)[0], module(h, 2, memory)[0])
    assert not torch.equal(module(h, 0, memory)[0], h)


def test_prefix_keeps_the_share_of_largest_norm() -> None:
    visual = torch.tensor([[1.0, 0], [3, 0], [0, 3], [2, 0], [0, 0]])
    everywhere = torch.ones(5, dtype=torch.bool)
    assert kept_in_prefix(visual, everywhere, "topk", 0.3).tolist() == [False, True, True, False, False]
    assert kept_in_prefix(visual, everywhere, "topk", 0.2).tolist() == [False, True, False, False, False]
    assert kept_in_prefix(visual, everywhere, "full", 0.3).all()
    assert not kept_in_prefix(visual, everywhere, "none", 0.3).any()


def test_a_picture_keeps_the_same_tokens_whatever_follows_it() -> None:
    visual = torch.tensor([3.0, 5.0, 1.0, 9.0, 8.0])[:, None]
    seen = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    assert kept_in_prefix(visual, seen, "topk", 0.5).tolist() == [True, True, True, False, True, True, False, True]
    assert kept_in_prefix(visual[:3], seen[:5], "topk", 0.5).tolist() == [True, True, True, False, True]
    assert kept_in_prefix(visual, seen, "none", 0.5).tolist() == (~seen).tolist()
