"""FoveaDrafter: what it owns, how it starts, what it refuses."""

from collections.abc import Callable

import pytest
import torch

from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.registry import build_drafter
from fovea.targets.base import TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.retrieval import RetrievalConfig


def test_head_is_neither_parameter_nor_state(make_drafter: Callable[..., FoveaDrafter]) -> None:
    drafter = make_drafter()
    owned = {p.data_ptr() for p in drafter.parameters()} | {t.data_ptr() for t in drafter.state_dict().values()}
    assert not owned & {drafter.head.embedding.data_ptr(), drafter.head.norm_weight.data_ptr()}
    assert not any(name.startswith("head") for name in drafter.state_dict())


def test_untrained_drafter_scores_alike_with_and_without_evidence(spec: TargetSpec, head: TargetHead) -> None:
    drafter = FoveaDrafter(spec, FoveaConfig(retrieval=RetrievalConfig(k_min=1, k_max=4)), head)
    h = torch.randn(4, spec.hidden_size)
    with_evidence = drafter.score(h, 0, drafter.remember(torch.randn(9, spec.hidden_size)))
    without = drafter.score(h, 0, None)
    assert with_evidence.retrieved is not None
    assert without.retrieved is None
    for states in (with_evidence.hat, with_evidence.raw, with_evidence.passed_on):
        assert torch.equal(states, without.hat)
    assert torch.equal(drafter.norm.weight, head.norm_weight)


def test_recursion_passes_on_the_state_it_is_told_to(make_drafter: Callable[..., FoveaDrafter]) -> None:
    h, visual = torch.randn(4, 32), torch.randn(9, 32)
    raw, corrected = make_drafter(), make_drafter(recursion="corrected")
    scored = raw.score(h, 1, raw.remember(visual))
    assert torch.equal(scored.passed_on, raw.norm(h))
    assert not torch.allclose(scored.hat, scored.passed_on)
    scored = corrected.score(h, 1, corrected.remember(visual))
    assert torch.equal(scored.hat, scored.passed_on)
    assert torch.equal(scored.raw, corrected.norm(h))


@pytest.mark.parametrize("injection", ["fc", "cross_attention", "none"])
def test_parameters_are_counted_by_part(injection: str, spec: TargetSpec, head: TargetHead) -> None:
    config = FoveaConfig(feature_injection=injection, correction_width=20, depth=5)  # pyright: ignore
    drafter = FoveaDrafter(spec, config, head)
    counts = drafter.trainable_parameters()
    d, heads, kv, mlp = 32, 4 * 8, 2 * 8, 3 * 32 * 48
    block = 2 * d + (d + 1) * (heads + 2 * kv) + heads * d + mlp
    cross = 2 * d + 2 * 8 + d * (heads + 2 * kv) + heads * d + mlp + 2
    correction = 4 * d + 3 * d * d + 6 * d + 2 * ((2 * d + 1) * 20) + (20 + 1) * d + 20 + 1
    assert counts["blocks"] == 2 * block
    assert counts["norm"] == d
    assert counts["correction"] == correction
    assert counts.get("fc", 0) == (2 * d * d + d if injection == "fc" else 0)
    assert counts.get("cross", 0) == (cross if injection == "cross_attention" else 0)
    assert counts["total"] == sum(p.numel() for p in drafter.parameters())
    never = FoveaDrafter(spec, FoveaConfig(max_correction_depth=-1), head)
    assert "correction" not in never.trainable_parameters()


def test_states_that_are_not_injected_do_not_matter(make_drafter: Callable[..., FoveaDrafter]) -> None:
    embeds, first, second = (torch.randn(1, 3, 32) for _ in range(3))

    def sees_itself(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, dim=1)

    for injection in ("fc", "cross_attention", "none"):
        drafter = make_drafter(feature_injection=injection)
        rotation = drafter.rotary.text(0, 3, torch.float32, torch.device("cpu"))
        outputs = [drafter(embeds, states, rotation, sees_itself) for states in (first, second)]
        assert torch.equal(outputs[0][0], outputs[1][0]) == (injection == "none")
        assert torch.equal(outputs[0][1], outputs[1][1]) == (injection == "none")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"depth": 0}, "drafter.depth"),
        ({"correction_width": 0}, "correction_width"),
        ({"max_correction_depth": 7}, "max_correction_depth"),
        ({"max_correction_depth": -2}, "max_correction_depth"),
        ({"feature_injection": "sum"}, "cross_attention"),
        ({"recursion": "both"}, "corrected"),
        ({"visual_prefix": "half"}, "topk"),
        ({"visual_prefix_ratio": 0.0}, "visual_prefix_ratio"),
        ({"rope": "2d"}, "1d"),
    ],
)
def test_bad_numbers_are_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FoveaConfig(**changes)


def test_unknown_drafters_are_refused_with_the_known_ones(spec: TargetSpec, head: TargetHead) -> None:
    with pytest.raises(ValueError, match=r"'eagle9'.*fovea"):
        build_drafter("eagle9", spec, FoveaConfig(), head)
    assert isinstance(build_drafter("fovea", spec, FoveaConfig(), head), FoveaDrafter)
