"""The batched unroll against chains that are drafted one by one, and its attention against autograd's."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fovea.decoding.growth import TreeConfig
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample, supervised_positions
from fovea.training import chain_attention as chain_attention_module
from fovea.training.chain_attention import ChainRows, chain_attention
from fovea.training.unroll import Unrolled, unroll
from fovea.visual.prefix import kept_in_prefix
from fovea.visual.retrieval import RetrievalConfig

WIDTH, VOCABULARY, PLACEHOLDER = 24, 41, 40
SPEC = TargetSpec(
    architecture="qwen2_5_vl",
    hidden_size=WIDTH,
    intermediate_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    rope=RopeSpec(10_000.0, (1, 1, 2)),
    max_positions=512,
    eos_ids=(2,),
)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one block": {"num_blocks": 1},
    "every depth corrected": {"max_correction_depth": 4},
    "never corrected": {"max_correction_depth": -1},
    "corrected recursion": {"recursion": "corrected"},
    "cross attention": {"feature_injection": "cross_attention"},
    "no features": {"feature_injection": "none"},
    "plain positions": {"rope": "1d"},
    "prefix without pictures": {"visual_prefix": "none"},
    "prefix with some": {"visual_prefix": "topk", "visual_prefix_ratio": 0.5},
    "once per block": {"retrieval": RetrievalConfig(mode="once_per_block", k=3)},
}


def make_drafter(**changes: Any) -> FoveaDrafter:
    torch.manual_seed(0)
    embedding = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    head = TargetHead(embedding, embedding, 1 + 0.3 * torch.randn(WIDTH, dtype=torch.float64))
    rule = RetrievalConfig(rho=0.6, k_min=2, k_max=6)
    settings = {"depth": 4, "correction_width": 12, "retrieval": rule, **changes}
    drafter = FoveaDrafter(SPEC, FoveaConfig(**settings), head).double()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(("bias", "_gate", "shift.weight", "depth_embedding")):
                parameter.normal_(std=0.5)
            elif name.endswith("qkv_proj.weight"):
                parameter.mul_(2)
    return drafter


def sample(seed: int, parts: str) -> TeacherSample:
    """``parts``: t text, a answer tokens, p a picture of 2 x 3 visual tokens."""
    draw = torch.Generator().manual_seed(seed)
    columns: list[list[int]] = []
    answer: list[bool] = []
    visual: list[bool] = []
    for part in parts:
        start = max((max(c) for c in columns), default=-1) + 1
        if part == "p":
            columns += [[start, start + y, start + x] for y in range(2) for x in range(3)]
            answer += [False] * 6
            visual += [True] * 6
        else:
            columns.append([start] * 3)
            answer.append(part == "a")
            visual.append(False)
    length = len(columns)
    answer_mask, is_visual = torch.tensor(answer), torch.tensor(visual)
    ids = torch.randint(3, PLACEHOLDER, (length,), generator=draw).masked_fill(is_visual, PLACEHOLDER)

    def states(rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64)

    return TeacherSample(
        key=f"{seed}",
        ids=ids,
        positions=torch.tensor(columns).T,
        answer_mask=answer_mask,
        is_visual=is_visual,
        last=states(length),
        mid=states(int(supervised_positions(answer_mask).sum())),
        visual=states(int(is_visual.sum())),
    )


SAMPLES = [
    sample(1, "tptt" + "a" * 8 + "ttt" + "a" * 3 + "tt"),
    sample(2, "ttt" + "aaaa" + "t" + "aa"),
    sample(3, "tpptt" + "a" * 6),
    sample(4, "tpt" + "aaa" + "tpt" + "aaaa"),
    sample(5, "tt" + "aaa" + "tpt" + "aaa"),
]


def causal(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    group = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(group, 1).transpose(-1, -2) / queries.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values.repeat_interleave(group, 1)


def one_by_one(drafter: FoveaDrafter, taught: TeacherSample, steps: int) -> dict[tuple[int, int], tuple]:
    """(h_hat, h_raw, h_mid) by (anchor, step): every step of every chain is a run over the whole text before it."""
    config = drafter.config
    length = len(taught.ids)
    embeds = drafter.head.embedding[taught.ids].clone()
    embeds[taught.is_visual] = taught.visual
    positions = torch.arange(length)[None] if config.rope == "1d" else taught.positions
    kept = kept_in_prefix(taught.visual, taught.is_visual, config.visual_prefix, config.visual_prefix_ratio)
    rows = {}
    for anchor in supervised_positions(taught.answer_mask).nonzero()[:, 0].tolist():
        memory = drafter.remember(taught.visual[: int(taught.is_visual[:anchor].sum())])
        pairs = [t for t in range(anchor + 1) if kept[t + 1]] if anchor + 1 < length else []
        tokens, states, root = [t + 1 for t in pairs], [taught.last[t] for t in pairs], None
        for step in range(1, steps + 1):
            if not bool(taught.answer_mask[anchor + step + 1 :][:1].any()):
                break
            h, mid = drafter(
                embeds[tokens][None],
                torch.stack(states)[None],
                drafter.rotary(positions[:, tokens], torch.float64),
                causal,
            )
            scored = drafter.score(h[0, -1:], step - 1, memory, root)
            root = scored.retrieved.selected if step == 1 and scored.retrieved is not None else root
            rows[anchor, step] = scored.hat[0], scored.raw[0], mid[0, -1]
            tokens.append(anchor + step + 1)
            states.append(scored.passed_on[0])
    return rows


def by_pair(unrolled: Unrolled, batch: TeacherBatch) -> dict[tuple[int, int, int], tuple]:
    """(h_hat, h_raw, h_mid) by (sample, anchor, step), from what the rows themselves say."""
    length = batch.ids.shape[1]
    flat = batch.last.flatten(0, 1)
    rows = {}
    for row in range(len(unrolled.step)):
        teacher = unrolled.teacher[unrolled.teacher_index[row]]
        (position,) = (flat == teacher).all(-1).nonzero()[:, 0].tolist()
        step = int(unrolled.step[row])
        key = position // length, position % length - step, step
        rows[key] = unrolled.h_hat[row], unrolled.h_raw[row], unrolled.h_mid[row]
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_equal_those_drafted_one_by_one(variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    batch = TeacherBatch.collate(SAMPLES)
    got = by_pair(unroll(drafter, batch, steps=5), batch)
    expected = {
        (number, *key): row
        for number, taught in enumerate(SAMPLES)
        for key, row in one_by_one(drafter, taught, 5).items()
    }
    assert got.keys() == expected.keys()
    for key, row in expected.items():
        for part, other in zip(row, got[key], strict=True):
            torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("variant", ["default", "cross attention", "corrected recursion", "prefix with some"])
def test_gradients_equal_those_of_single_chains(variant: str) -> None:
    drafter = make_drafter(**VARIANTS[variant])
    parameters = dict(drafter.named_parameters())
    batch = TeacherBatch.collate(SAMPLES)
    cotangent = torch.randn(3, WIDTH, dtype=torch.float64)

    def gradients(rows: dict) -> tuple[torch.Tensor, ...]:
        # Weights that differ per row, so that a permutation would show.
        weighed = [(1 + hash(key) % 7) * (torch.stack(row) * cotangent).sum() for key, row in rows.items()]
        return torch.autograd.grad(torch.stack(weighed).sum(), list(parameters.values()))

    single = {
        (number, *key): row
        for number, taught in enumerate(SAMPLES)
        for key, row in one_by_one(drafter, taught, 4).items()
    }
    expected = gradients(single)
    got = gradients(by_pair(unroll(drafter, batch, steps=4), batch))
    for name, one, other in zip(parameters, expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_batch_gives_each_sample_what_it_gives_alone_whatever_the_padding_holds() -> None:
    drafter = make_drafter()
    batch = TeacherBatch.collate(SAMPLES)
    batch.last[~batch.valid] = 1e3
    batch.visual[~batch.visual_valid] = torch.nan
    batch.ids[~batch.valid] = 7
    batch.positions.transpose(1, 2)[~batch.valid] = 99
    together = unroll(drafter, batch, steps=5)
    alone = [unroll(drafter, TeacherBatch.collate([taught]), steps=5) for taught in SAMPLES]
    for name in ("h_hat", "h_raw", "h_mid", "step", "answer_position", "teacher", "teacher_mid"):
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(one, name) for one in alone]))
    assert together.anchors == sum(one.anchors for one in alone)
    gradient = torch.autograd.grad(together.h_hat.sum(), list(drafter.correction.parameters()))
    assert all(torch.isfinite(g).all() for g in gradient)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_decoding_give_the_same_logits(variant: str) -> None:
    """The parity gate, in float32: every anchor of the first answer, each decoded as the loop would reach it."""
    drafter = make_drafter(**VARIANTS[variant]).float()
    drafter.head = drafter.head.to("cpu", torch.float32)
    taught = SAMPLES[0]
    batch = TeacherBatch.collate([taught]).to("cpu", torch.float32)
    trained = {key[1:]: drafter.logits(row[0]) for key, row in by_pair(unroll(drafter, batch, steps=4), batch).items()}
    start = int(taught.answer_mask.nonzero()[0])
    embeds = drafter.embed(taught.ids)
    embeds[taught.is_visual] = batch.visual[0]
    proposer = NeuralProposer(drafter, TreeConfig(width=1, depth=3, nodes=5))
    proposer.start(
        Prefill(
            ids=taught.ids[:start],
            positions=taught.positions[:, :start],
            embeds=embeds[:start],
            hidden=batch.last[0, :start],
            visual=batch.visual[0],
            is_visual=taught.is_visual[:start],
            capacity=len(taught.ids),
        )
    )
    compared = 0
    for anchor in range(start - 1, start + 6):
        proposer.commit(taught.ids[anchor + 1 : anchor + 2], batch.last[0, anchor : anchor + 1])
        for step in range(1, 5):
            tokens = taught.ids[anchor + step : anchor + step + 1].numpy()
            logits = proposer.node_logits(tokens, np.array([0 if step > 1 else -1]), step - 1)
            if (anchor, step) in trained:
                torch.testing.assert_close(logits[0], trained[anchor, step], rtol=1e-4, atol=1e-4)
                compared += 1
        proposer.drop_tree()
    assert compared == 4 * 4 + 3 + 2 + 1


def test_teachers_are_the_positions_ahead_of_the_anchors() -> None:
    taught = SAMPLES[0]
    unrolled = unroll(make_drafter(), TeacherBatch.collate([taught]), steps=3)
    supervised = supervised_positions(taught.answer_mask)
    stored = supervised.cumsum(0) - 1
    # The first answer token comes from the target's prefill: no chain ever predicts it.
    positions = [p for p in supervised.nonzero()[:, 0].tolist() if supervised[p - 1]]
    assert torch.equal(unrolled.teacher, taught.last[positions])
    assert torch.equal(unrolled.teacher_mid, taught.mid[stored[positions]])
    assert unrolled.teacher_index.tolist() == sorted(unrolled.teacher_index.tolist())
    for row, index in enumerate(unrolled.teacher_index.tolist()):
        before = positions[index]
        while taught.answer_mask[before]:
            before -= 1
        assert unrolled.answer_position[row] == positions[index] + 1 - before
    # Each position is taught to as many steps as there are answer tokens before it.
    assert unrolled.step[unrolled.teacher_index == 0].tolist() == [1]
    assert sorted(unrolled.step[unrolled.teacher_index == 4].tolist()) == [1, 2, 3]


def test_a_draw_bounds_the_anchors_and_changes_nothing_else() -> None:
    drafter, batch = make_drafter(), TeacherBatch.collate(SAMPLES)
    everything = by_pair(unroll(drafter, batch, steps=4), batch)
    drawn = [
        unroll(drafter, batch, steps=4, max_anchors=5, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    rows = [by_pair(one, batch) for one in drawn]
    assert rows[0].keys() == rows[1].keys()
    assert rows[0].keys() != rows[2].keys()
    for one in rows:
        assert len({key[:2] for key in one}) == 5
        for key, row in one.items():
            torch.testing.assert_close(torch.stack(row), torch.stack(everything[key]))
    assert (drawn[0].anchors, drawn[0].anchors_found) == (5, len({key[:2] for key in everything}))
    assert unroll(drafter, batch, steps=4, max_anchors=1000).anchors == drawn[0].anchors_found


@pytest.mark.parametrize("parts", ["tptt", "tta", "a"])
def test_nothing_supervised_gives_empty_rows(parts: str) -> None:
    drafter = make_drafter()
    unrolled = unroll(drafter, TeacherBatch.collate([sample(4, parts)]), steps=3)
    assert unrolled.anchors == 0
    for rows in (unrolled.h_hat, unrolled.h_raw, unrolled.h_mid, unrolled.teacher, unrolled.teacher_mid):
        assert rows.shape == (0, WIDTH)
    assert len(unrolled.step) == len(unrolled.teacher_index) == len(unrolled.retrieval) == 0


def test_rows_without_pictures_retrieve_nothing() -> None:
    drafter = make_drafter(max_correction_depth=1)
    unrolled = unroll(drafter, TeacherBatch.collate(SAMPLES[1:]), steps=4)
    assert unroll(drafter, TeacherBatch.collate(SAMPLES[1:2]), steps=4).retrieval.shape == (0, 2)
    corrected = (unrolled.h_hat != unrolled.h_raw).any(-1)
    assert len(unrolled.retrieval) == corrected.sum() > 0
    assert int(unrolled.step[corrected].max()) == 2
    assert ((unrolled.retrieval[:, 0] >= 2) & (unrolled.retrieval[:, 1] <= 6)).all()


@pytest.mark.parametrize("steps", [0, 6])
def test_steps_beyond_the_trees_depth_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"unroll steps {steps}.*5"):
        unroll(make_drafter(), TeacherBatch.collate(SAMPLES), steps=steps)


@pytest.fixture
def attention_case() -> tuple[list[torch.Tensor], ChainRows]:
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    heads, kv_heads, rows, samples, length, past, width = 4, 2, 7, 3, 6, 2, 3
    slots = [0, 2, 5, 1, 1, 3, 4]
    tensors = [
        tensor(heads, rows, width),
        tensor(samples, kv_heads, length, width),
        tensor(samples, kv_heads, length, width),
        tensor(kv_heads, rows, past, width),
        tensor(kv_heads, rows, past, width),
    ]
    return tensors, ChainRows(torch.tensor([3, 0, 4]), torch.tensor(slots), torch.device("cpu"))


@pytest.mark.parametrize("scores", [1, 150, 10_000])
def test_chain_attention_equals_plain_attention_row_by_row(
    scores: int, attention_case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_attention_module, "SCORES_ON_CPU", scores)
    (queries, keys, values, chain_keys, chain_values), rows = attention_case
    got = chain_attention(queries, (keys, values), (chain_keys, chain_values), rows)
    for row, sample_ in enumerate([0, 0, 0, 2, 2, 2, 2]):
        seen = int(rows.slots[row]) + 1
        all_keys = torch.cat((keys[sample_, :, :seen], chain_keys[:, row]), dim=1)
        all_values = torch.cat((values[sample_, :, :seen], chain_values[:, row]), dim=1)
        expected = F.scaled_dot_product_attention(
            queries[:, row : row + 1][None], all_keys[None], all_values[None], enable_gqa=True
        )
        torch.testing.assert_close(got[:, row], expected[0, :, 0])


@pytest.mark.parametrize("scores", [150, 10_000])
def test_chain_attention_has_the_right_gradients(
    scores: int, attention_case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_attention_module, "SCORES_ON_CPU", scores)
    tensors, rows = attention_case

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ck: torch.Tensor, cv: torch.Tensor) -> torch.Tensor:
        return chain_attention(q, (k, v), (ck, cv), rows)

    assert torch.autograd.gradcheck(run, tuple(tensors))
