"""ViSpec's drafter against its description in plain torch, and what makes it ViSpec's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.drafters.registry import build_drafter
from fovea.drafters.vispec import ViSpecConfig, ViSpecDrafter
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from tests.drafters.reference import (
    SPEC,
    Plain,
    Row,
    check_parity,
    check_tree,
    check_unroll,
    enlarged,
    make_head,
    make_sample,
    prefill_of,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "four queries": {"num_queries": 4},
    "more queries than tokens": {"num_queries": 9},
    "grouped heads": {"multi_head": False},
    "the target's positions": {"rope": "target"},
    "two blocks": {"num_blocks": 2},
}
SAMPLES = [
    make_sample(1, "tptt" + "a" * 6 + "ttt" + "a" * 3 + "tt"),
    make_sample(2, "ttt" + "aaaa" + "t" + "aa"),
    make_sample(3, "tptqtt" + "a" * 5),
    make_sample(4, "tqtaaatptaaaa"),
    make_sample(5, "taaatptaaa"),
    make_sample(6, "ptaaat"),
]


def make_drafter(**changes: Any) -> ViSpecDrafter:
    torch.manual_seed(0)
    drafter = enlarged(ViSpecDrafter(SPEC, ViSpecConfig(**{"depth": 4, **changes}), make_head()))
    assert isinstance(drafter, ViSpecDrafter)
    return drafter


class PlainViSpec(Plain):
    """A row's ``extra`` is its picture's global vector, or None for a row that is a picture's."""

    def committed(self, prefill: Prefill) -> tuple[list[Row], int, Any]:
        positions, visual = self.plain_positions(prefill), prefill.is_visual.tolist()
        latest = torch.zeros(self.spec.hidden_size, dtype=torch.float64)
        rows: dict[int, Row] = {}
        token = 0
        while token < len(visual):
            end = token + 1
            if visual[token]:
                while end < len(visual) and visual[end]:
                    end += 1
                *shown, latest = self.adapted(prefill.embeds[token:end])
                shown = shown[: end - token]
                for place, output in zip(range(end - len(shown), end), shown, strict=True):
                    rows[place] = Row(output, output, positions[:, place].tolist(), None)
            else:
                before = prefill.hidden[token - 1] if token else prefill.hidden[0]
                rows[token] = Row(prefill.embeds[token], before, positions[:, token].tolist(), latest)
            token = end
        rows.pop(0, None)
        return list(rows.values()), int(positions.max()) + 1, latest

    def adapted(self, visual: Tensor) -> list[Tensor]:
        spec, queries = self.spec, self.weights["adaptor.queries"]
        keys, values = self.linear("adaptor.kv_proj", visual).unflatten(-1, (2, spec.num_heads, -1)).unbind(1)
        out = []
        for query in queries:
            scores = torch.stack([keys[:, head] @ query[head] for head in range(spec.num_heads)], -1)
            shares = (scores / spec.head_dim**0.5).softmax(0)
            mixed = torch.stack([shares[:, head] @ values[:, head] for head in range(spec.num_heads)])
            out.append(self.linear("adaptor.o_proj", mixed.flatten()))
        return out

    def run(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        kv_heads = self.spec.num_heads if self.drafter.config.multi_head else self.spec.num_kv_heads
        x = torch.stack([row.embed if row.extra is None else self.fused(row) for row in rows])
        x = mid = self.block("blocks.0", x, rows, input_norm=False, kv_heads=kv_heads)
        for layer in range(1, self.drafter.config.num_blocks):
            x = self.block(f"blocks.{layer}", x, rows, input_norm=True, kv_heads=kv_heads)
        return x[-1], mid[-1]

    def fused(self, row: Row) -> Tensor:
        return self.linear("fc", torch.cat((row.embed, self.linear("img_fc", torch.cat((row.state, row.extra))))))


@pytest.mark.parametrize("parts", ["tttptqtttt", "tqtp", "ttttt", "tptaaatqtt", "pt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_scores_as_a_plain_run_over_its_path(variant: str, parts: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    check_tree(drafter, PlainViSpec(drafter), make_sample(7, parts))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_taught_row_is_a_plain_run_over_its_chain(variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    check_unroll(drafter, PlainViSpec(drafter), SAMPLES, steps=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_decoding_agree(variant: str) -> None:
    check_parity(make_drafter(**VARIANTS[variant]), SAMPLES)


def test_a_picture_is_replaced_by_its_compressed_rows_on_its_last_positions() -> None:
    drafter = make_drafter(num_queries=3)
    prefill = prefill_of(make_sample(1, "tttptqtt"), drafter.head)
    context = drafter.context(prefill)
    # Tokens 3 to 8 and 10 to 13 are pictures; the first token has no row.
    assert context.positions[0].tolist() == [1, 2, 7, 8, 9, 12, 13, 14, 15]
    assert context.is_visual.tolist() == [False] * 2 + [True] * 2 + [False] + [True] * 2 + [False] * 2
    assert context.place.tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8]
    outputs = [drafter.adaptor(prefill.visual[:6]), drafter.adaptor(prefill.visual[6:])]
    torch.testing.assert_close(context.embeds[[2, 3]], outputs[0][:2])
    torch.testing.assert_close(context.embeds[[5, 6]], outputs[1][:2])
    assert torch.equal(context.embeds[[0, 1, 4, 7, 8]], prefill.embeds[[1, 2, 9, 14, 15]])
    assert context.next_position == 16


def test_the_global_vector_reaches_every_later_text_token_and_none_before() -> None:
    """As what the context carries, and as what the fusion makes of it."""
    drafter = make_drafter()
    prefill = prefill_of(make_sample(1, "tttptqtt"), drafter.head)
    context = drafter.context(prefill)
    assert context.carried is not None
    assert context.carried_next is not None
    first, second = (drafter.adaptor(v)[-1] for v in (prefill.visual[:6], prefill.visual[6:]))
    text = ~context.is_visual
    expected = torch.stack([torch.zeros_like(first)] * 2 + [first] + [second] * 2)
    torch.testing.assert_close(context.carried[text], expected)
    torch.testing.assert_close(context.carried_next, second)

    carried = context.carried

    def outputs(sees: float) -> Tensor:
        """What each row puts into the block, with the picture's share of the fusion times ``sees``."""
        with torch.no_grad():
            read: list[Tensor] = []
            handle = drafter.blocks[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
            rotation = drafter.rotary(context.positions, torch.float64)
            drafter(
                context.embeds[None],
                context.states[None],
                rotation,
                lambda layer, q, k, v: v,
                is_visual=context.is_visual[None],
                carried=sees * carried[None],
            )
            handle.remove()
        return read[0]

    reached = (outputs(1.0) != outputs(2.0)).any(-1)
    behind = torch.tensor([False, False, False, True, False, True, True])
    assert torch.equal(reached, behind)
    assert torch.equal(outputs(1.0)[~text], context.embeds[~text])


def test_an_untrained_drafter_does_not_look_at_the_global_vector() -> None:
    drafter = ViSpecDrafter(SPEC, ViSpecConfig(), make_head()).double()
    states, vectors = torch.randn(2, 5, SPEC.hidden_size, dtype=torch.float64)
    assert torch.equal(drafter.img_fc(torch.cat((states, vectors), -1)), states)


def test_text_alone_carries_zeros() -> None:
    drafter = make_drafter()
    context = drafter.context(prefill_of(make_sample(2, "ttttt"), drafter.head))
    assert context.carried is not None
    assert context.carried_next is not None
    assert context.carried.shape == (4, SPEC.hidden_size)
    assert not context.carried.any()
    assert not context.carried_next.any()


def test_gradients_reach_the_adaptor_from_both_of_its_outputs() -> None:
    drafter = make_drafter(num_queries=3)
    context = drafter.context(prefill_of(make_sample(1, "tttpt"), drafter.head))
    assert context.carried is not None
    for part, queries in ((context.embeds, [True, True, False]), (context.carried, [False, False, True])):
        (gradient,) = torch.autograd.grad(part.sum(), drafter.adaptor.queries, retain_graph=True)
        assert gradient.flatten(1).any(-1).tolist() == queries


@pytest.mark.parametrize(
    ("spec", "millions"),
    [(("llava", 4096, 11008, 32, 32, 32, False), 319.8), (("qwen2_5_vl", 3584, 18944, 28, 28, 4, True), 345.0)],
)
def test_parameters_at_the_papers_sizes(spec: tuple, millions: float) -> None:
    """About 320 million for LLaVA-7B and 345 million, with multi-head attention, for Qwen2.5-VL-7B."""
    architecture, width, mlp, layers, heads, kv_heads, biased = spec
    numbers = TargetSpec(
        architecture=architecture,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=8,
        rms_norm_eps=1e-6,
        qkv_bias=biased,
        rope=RopeSpec(10_000.0),
        max_positions=4096,
        eos_ids=(2,),
    )
    with torch.device("meta"):
        head = TargetHead(torch.empty(8, width), torch.empty(8, width), torch.empty(width))
        drafter = build_drafter("vispec", numbers, ViSpecConfig(), head)
    counts = drafter.trainable_parameters()
    assert counts["total"] / 1e6 == pytest.approx(millions, abs=0.05)
    assert set(counts) == {"adaptor", "img_fc", "fc", "blocks", "total"}


def test_too_few_queries_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"drafter\.num_queries is 1"):
        ViSpecConfig(num_queries=1)
