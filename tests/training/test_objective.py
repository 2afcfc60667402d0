"""The objective against the golden vectors and against the formulas written out in float64 autograd."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fovea.training.objective import ObjectiveConfig, ObjectiveSums, objective, row_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "objective"
INDEX = json.loads((GOLDEN / "index.json").read_text())
CASES = [name for name in INDEX if name != "specvlm_online"]
TERMS = ("hid", "mid", "kl", "ce", "cmp")


def golden_config(name: str, **changes) -> ObjectiveConfig:
    c = INDEX[name]["coefficients"]
    return ObjectiveConfig(
        lambda_hid=c["lambda_hid"],
        lambda_kl=c["lambda_KL"],
        lambda_tok=c["lambda_tok"],
        beta_h=c["beta_h"],
        beta_mid=c["beta_mid"],
        beta_ce=c["beta_CE"],
        beta_cmp=c["beta_cmp"],
        margin=c["m"],
        candidates=c["K_c"],
        gamma_w=c["gamma_w"],
        **changes,
    )


def golden_sums(name: str, dtype: torch.dtype, rows: slice = slice(None), **changes) -> tuple[ObjectiveSums, dict]:
    """The sums of the supervised rows in ``rows``, and gradients of loss_sum / Z spread over all rows."""
    arrays = np.load(GOLDEN / f"{name}.npz")
    chosen = torch.zeros(len(arrays["n"]), dtype=torch.bool)
    chosen[rows] = torch.from_numpy(arrays["supervised"])[rows]
    tensors = {k: torch.from_numpy(arrays[k]).to(dtype) for k in ("h_hat", "h_mid", "h_raw", "f", "f_mid")}
    leaves = {k: tensors[k].requires_grad_() for k in ("h_hat", "h_mid", "h_raw")}
    sums = objective(
        tensors["h_hat"][chosen],
        tensors["h_mid"][chosen],
        torch.from_numpy(arrays["n"])[chosen],
        torch.arange(int(chosen.sum())),
        tensors["f"][chosen],
        tensors["f_mid"][chosen],
        torch.from_numpy(arrays["W_LM"]).to(dtype),
        golden_config(name, **changes),
        h_raw=tensors["h_raw"][chosen],
    )
    sums.loss_sum.backward()
    scale = 1 / sums.Z if sums.Z > 0 else torch.tensor(0.0)
    grads = {k: v.grad * scale if v.grad is not None else torch.zeros_like(v) for k, v in leaves.items()}
    return sums, grads


def assert_golden(actual, expected, dtype: torch.dtype) -> None:
    relative, absolute = (1e-9, 1e-12) if dtype == torch.float64 else (2e-5, 2e-6)
    actual = torch.as_tensor(actual).detach().double()
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("chunk_rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_golden_values_and_gradients(name: str, dtype: torch.dtype, chunk_rows: int) -> None:
    sums, grads = golden_sums(name, dtype, chunk_rows=chunk_rows)
    scalars, arrays = INDEX[name]["scalars"], np.load(GOLDEN / f"{name}.npz")
    assert_golden(sums.Z, scalars["Z"], dtype)
    for term in TERMS:
        assert_golden(getattr(sums, term), scalars[f"{term}_sum"], dtype)
    loss = sums.loss_sum / sums.Z if sums.Z > 0 else sums.loss_sum
    assert_golden(loss, scalars["L"], dtype)
    assert_golden(grads["h_hat"], arrays["grad_h_hat"], dtype)
    assert_golden(grads["h_mid"], arrays["grad_h_mid"], dtype)


@pytest.mark.parametrize("name", [n for n in CASES if "micro_batches" in INDEX[n]] + ["basic"])
def test_sums_of_micro_batches_give_the_global_loss(name: str) -> None:
    parts = INDEX[name].get("micro_batches") or [{"rows": [0, 5]}, {"rows": [5, 14]}]
    bounds = [part["rows"] for part in parts]
    sums = [golden_sums(name, torch.float64, slice(*b))[0] for b in bounds]
    total = sum(s.loss_sum for s in sums) / sum(s.Z for s in sums)
    assert_golden(total, INDEX[name]["scalars"]["L"], torch.float64)


def test_raw_alignment_uses_the_uncorrected_state() -> None:
    sums, grads = golden_sums("basic", torch.float64, align_state="raw")
    assert_golden(sums.hid / sums.Z, INDEX["basic"]["scalars"]["L_hid_final_raw"], torch.float64)
    assert grads["h_raw"].abs().min(1).values.max() > 0
    _, corrected = golden_sums("basic", torch.float64)
    assert corrected["h_raw"].abs().max() == 0


def naive(
    h_hat, h_mid, n, index, teacher, teacher_mid, weight, config: ObjectiveConfig, own_head: Tensor | None = None
) -> Tensor:
    """Eq. 10-19 and the terms of the other drafters over full logits, by autograd."""
    w = torch.exp((1 - n).double() / config.gamma_w)
    logits, teacher_logits = h_hat @ (weight if own_head is None else own_head).T, (teacher @ weight.T)[index]
    log_q, log_p = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    y = teacher_logits.argmax(-1, keepdim=True)
    others = logits.scatter(1, y, -torch.inf).sort(-1, descending=True).values[:, : weight.shape[0] - 1]
    competitor = others[:, min(config.candidates, others.shape[1]) - 1]
    ce = -log_q.gather(1, y)[:, 0]
    cmp = F.softplus(config.margin - (logits.gather(1, y)[:, 0] - competitor))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    l1 = (log_q.exp() - log_p.exp()).abs().sum(-1)
    best = teacher_logits.sort(dim=-1, descending=True, stable=True).indices[:, : config.ranked]
    places = [-logits.gather(1, best[:, i:]).log_softmax(-1)[:, 0] for i in range(best.shape[1])]
    rank = torch.stack(places).sum(0)
    distance = F.mse_loss if config.distance == "squared" else F.smooth_l1_loss
    hid = distance(h_hat, teacher[index], reduction="none").mean(-1)
    mid = distance(h_mid, teacher_mid[index], reduction="none").mean(-1)
    rows = (
        config.lambda_hid * (config.beta_h * hid + config.beta_mid * mid)
        + config.lambda_kl * kl
        + config.lambda_tok * (config.beta_ce * ce + config.beta_cmp * cmp)
        + config.lambda_l1 * l1
        + config.lambda_rank * rank
    )
    return (w * rows).sum()


def random_inputs(rows: int, positions: int, vocabulary: int, seed: int, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [
        normal(rows, width),
        normal(rows, width),
        torch.randint(1, 8, (rows,), generator=generator),
        torch.randint(positions, (rows,), generator=generator),
        normal(positions, width),
        normal(positions, width),
        normal(vocabulary, width),
    ]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 24),
    positions=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    candidates=st.integers(1, 9),
    ranked=st.integers(1, 12),
    chunk_rows=st.integers(1, 30),
    coefficients=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 5),
    distance=st.sampled_from(["squared", "smooth_l1"]),
    own_head=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_naive_formula(
    rows, positions, vocabulary, candidates, ranked, chunk_rows, coefficients, distance, own_head, seed
) -> None:
    config = ObjectiveConfig(
        **dict(zip(("lambda_hid", "lambda_kl", "lambda_tok", "lambda_l1", "lambda_rank"), coefficients, strict=True)),
        candidates=candidates,
        ranked=ranked,
        chunk_rows=chunk_rows,
        distance=distance,
    )
    h_hat, h_mid, *rest = random_inputs(rows, positions, vocabulary, seed)
    head = torch.randn(rest[-1].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trained = [h_hat, h_mid, head] if own_head else [h_hat, h_mid]
    ours, reference = ([t.clone().requires_grad_() for t in trained] for _ in range(2))
    sums = objective(*ours[:2], *rest, config, draft_head_weight=ours[2] if own_head else None)
    expected = naive(*reference[:2], *rest, config, own_head=reference[2] if own_head else None)
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-9, atol=1e-10)
    (3 * sums.loss_sum).backward()
    (3 * expected).backward()
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(torch.zeros_like(a) if a.grad is None else a.grad, b.grad, rtol=1e-8, atol=1e-11)


def test_specvlm_golden() -> None:
    """SpecVLM's Eq. 3; with heads of one, states are logits, and KL is cross-entropy less the teacher's entropy."""
    arrays, scalars = np.load(GOLDEN / "specvlm_online.npz"), INDEX["specvlm_online"]["scalars"]
    z_q, z_p, f_q, f_p = (torch.from_numpy(arrays[k]).double() for k in ("z_q", "z_p", "f_q", "f_p"))
    rows = torch.from_numpy(arrays["supervised"]).nonzero()[:, 0]
    step, index, one = torch.ones(len(rows), dtype=torch.int64), torch.arange(len(rows)), torch.eye(25).double()
    nothing = {"lambda_hid": 0.0, "lambda_kl": 0.0, "lambda_tok": 0.0}
    soft = objective(z_q[rows], z_q[rows], step, index, z_p[rows], z_p[rows], one, ObjectiveConfig(**nothing))
    entropy = -(z_p[rows].softmax(-1) * z_p[rows].log_softmax(-1)).sum()
    assert_golden((soft.kl + entropy) / soft.Z, scalars["L_CE"], torch.float64)
    config = ObjectiveConfig(distance="smooth_l1", beta_mid=0.0)
    features = objective(f_q[rows], f_q[rows], step, index, f_p[rows], f_p[rows], one[:, :12], config)
    assert_golden(features.hid / features.Z, scalars["L_SmoothL1"], torch.float64)


def test_equally_good_tokens_are_ranked_by_id() -> None:
    weight = torch.eye(6, dtype=torch.float64)
    teacher = torch.tensor([[2.0, 5.0, 2.0, 7.0, 2.0, 7.0]], dtype=torch.float64)
    draft = torch.tensor([[0.3, 0.1, -0.4, 0.9, 0.2, -0.7]], dtype=torch.float64)
    config = ObjectiveConfig(lambda_rank=1.0, ranked=6)
    one = torch.ones(1, dtype=torch.int64)
    sums = objective(draft, draft, one, one - 1, teacher, teacher, weight, config)
    order = [3, 5, 1, 0, 2, 4]
    expected = sum(-draft[0, order[i:]].log_softmax(-1)[0] for i in range(6))
    torch.testing.assert_close(sums.rank, expected)


class LogitsWatch(TorchDispatchMode):
    """Notes the rows of every product that makes logits, and the largest tensor that any operation returns."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.projected_rows, self.largest = vocabulary, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.overloadpacket is torch.ops.aten.mm and out.shape[-1] == self.vocabulary:
            self.projected_rows += out.shape[0]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_made_once_and_never_beyond_a_chunk(dtype: torch.dtype) -> None:
    h_hat, h_mid, step, index, teacher, teacher_mid, weight = random_inputs(70, 10, 500, seed=1)
    used = index.unique().numel()
    with LogitsWatch(500) as watch:
        states = [t.to(dtype).requires_grad_() for t in (h_hat, h_mid)]
        teachers = (teacher.to(dtype), teacher_mid.to(dtype), weight.to(dtype))
        sums = objective(*states, step, index, *teachers, ObjectiveConfig(chunk_rows=16))
        sums.loss_sum.backward()
    assert watch.projected_rows == 70 + used
    # The logits of a chunk and of the positions that teach it lie in one buffer.
    assert watch.largest <= 2 * 16 * 500


def test_half_precision_head_under_autocast_reduces_in_float32() -> None:
    h_hat, h_mid, step, index, teacher, teacher_mid, weight = random_inputs(40, 9, 300, seed=2, width=16)
    half = [t.bfloat16() for t in (h_hat, h_mid, teacher, teacher_mid, weight)]
    states = [t.clone().requires_grad_() for t in half[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        sums = objective(*states, step, index, *half[2:], ObjectiveConfig(chunk_rows=16))
    sums.loss_sum.backward()
    reference = [t.double().requires_grad_() for t in half[:2]]
    expected = naive(*reference, step, index, *(t.double() for t in half[2:]), ObjectiveConfig())
    expected.backward()
    assert sums.loss_sum.dtype == torch.float32
    # Logits are rounded to bfloat16, as the target's are; nothing else may add an error of that size.
    torch.testing.assert_close(sums.loss_sum.double(), expected, rtol=5e-3, atol=0)
    for a, b in zip(states, reference, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.05, atol=0.05)


def test_without_gradient_the_sums_are_the_same() -> None:
    h_hat, h_mid, *rest = random_inputs(20, 6, 30, seed=3)
    with torch.no_grad():
        plain = objective(h_hat, h_mid, *rest, ObjectiveConfig())
    tracked = objective(h_hat.requires_grad_(), h_mid, *rest, ObjectiveConfig())
    assert not plain.loss_sum.requires_grad
    torch.testing.assert_close(plain.loss_sum, tracked.loss_sum.detach())


def test_agreement_is_top_1_equality() -> None:
    h_hat, h_mid, step, index, teacher, teacher_mid, weight = random_inputs(50, 8, 12, seed=4)
    sums = objective(h_hat, h_mid, step, index, teacher, teacher_mid, weight, ObjectiveConfig(chunk_rows=7))
    expected = (h_hat @ weight.T).argmax(-1) == (teacher @ weight.T).argmax(-1)[index]
    assert torch.equal(sums.agrees, expected)
    assert 0 < expected.sum() < 50


def test_answer_position_replaces_the_step_in_the_weights() -> None:
    h_hat, h_mid, step, *rest = random_inputs(6, 6, 12, seed=5)
    place = torch.arange(1, 7)
    config = ObjectiveConfig(position="answer", gamma_w=2.0)
    sums = objective(h_hat, h_mid, step, *rest, config, answer_position=place)
    torch.testing.assert_close(sums.Z, row_weights(place, 2.0, torch.float64).sum())
    with pytest.raises(ValueError, match="answer_position"):
        objective(h_hat, h_mid, step, *rest, config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lambda_kl", -0.1),
        ("beta_ce", float("nan")),
        ("candidates", 0),
        ("chunk_rows", 0),
        ("gamma_w", 0.0),
        ("align_state", "both"),
        ("position", "token"),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value) -> None:
    with pytest.raises(ValueError, match=f"objective.{field}"):
        ObjectiveConfig(**{field: value})
