"""A reduced vocabulary: which tokens it holds, what it is taught, and that it drafts no other."""

from __future__ import annotations

import dataclasses

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from fovea.decoding.growth import TreeConfig
from fovea.drafters.checkpoint import CheckpointError, adopt_weights, load_drafter, save_drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.draft_vocabulary import answer_token_counts, within_vocabulary
from fovea.training.gates import parity_gate
from fovea.training.module import DrafterModule
from fovea.training.objective import ObjectiveConfig
from fovea.training.unroll import committed_text, unroll


@pytest.fixture
def samples(make_sample):
    return [make_sample(seed, "tptt" + "a" * 6 + "tt" + "a" * 3) for seed in range(3)]


@pytest.fixture
def reduced(make_drafter, samples):
    drafter = make_drafter(draft_vocabulary=9)
    drafter.choose_vocabulary(answer_token_counts(samples, drafter.spec.vocab_size))
    return drafter


def test_the_most_frequent_answer_tokens_and_what_ends_an_answer(make_drafter) -> None:
    drafter = make_drafter(draft_vocabulary=4)
    counts = torch.zeros(41, dtype=torch.int64)
    counts[[30, 7, 12, 9]] = torch.tensor([5, 3, 3, 1])
    drafter.choose_vocabulary(counts)
    assert drafter.token_ids.tolist() == [2, 7, 12, 30]


def test_more_room_than_tokens_seen_is_filled_with_others(make_drafter) -> None:
    """Each once, by lower id; the end token belongs to it although no answer holds it."""
    for size, expected in ((4, [0, 2, 12, 30]), (9, [0, 1, 2, 3, 4, 5, 6, 12, 30]), (41, list(range(41)))):
        drafter = make_drafter(draft_vocabulary=size)
        counts = torch.zeros(41, dtype=torch.int64)
        counts[[30, 12]] = torch.tensor([5, 3])
        drafter.choose_vocabulary(counts)
        assert drafter.token_ids.tolist() == expected
        assert drafter.logits(torch.randn(2, 32)).shape == (2, size)


def test_a_checkpoint_of_another_size_is_refused(tmp_path, make_drafter, reduced) -> None:
    """The same folder again, with fewer tokens: what lay there is neither taken nor left."""
    save_drafter(tmp_path, reduced)
    smaller = make_drafter(draft_vocabulary=5)
    with pytest.raises(CheckpointError, match=r"token_ids \(9,\) instead of \(5,\)"):
        load_drafter(tmp_path, reduced.head, reduced.spec, {"draft_vocabulary": 5})
    with pytest.raises(CheckpointError, match=r"token_ids \(9,\) instead of \(5,\)"):
        adopt_weights(smaller, tmp_path)
    smaller.choose_vocabulary(torch.arange(41))
    save_drafter(tmp_path, smaller)
    assert load_drafter(tmp_path, reduced.head, reduced.spec).token_ids.tolist() == [2, 37, 38, 39, 40]


def test_counts_are_those_of_answers_alone(samples) -> None:
    counts = answer_token_counts(samples, 41)
    expected = torch.cat([sample.ids[sample.answer_mask] for sample in samples])
    assert counts.sum() == len(expected)
    assert all(int(counts[token]) == int((expected == token).sum()) for token in range(41))


def test_logits_are_the_target_heads_rows(reduced) -> None:
    states = torch.randn(5, 32)
    torch.testing.assert_close(reduced.logits(states), reduced.head.logits(states)[:, reduced.token_ids])


@pytest.mark.parametrize("size", [1, 42])
def test_a_size_that_cannot_be_is_refused(make_drafter, size: int) -> None:
    with pytest.raises(ValueError, match="draft_vocabulary is"):
        make_drafter(draft_vocabulary=size)


def test_an_unchosen_vocabulary_is_refused(make_drafter) -> None:
    with pytest.raises(ValueError, match="has not been chosen"):
        make_drafter(draft_vocabulary=9).logits(torch.randn(1, 32))


def test_rows_whose_teacher_leaves_the_vocabulary_are_dropped(reduced, samples) -> None:
    batch = TeacherBatch.collate(samples)
    whole = unroll(reduced, batch, steps=3)
    kept = within_vocabulary(whole, reduced)
    choice = reduced.head.logits(whole.teacher).argmax(-1)[whole.teacher_index]
    expected = torch.tensor([int(token) in reduced.token_ids.tolist() for token in choice])
    assert 0 < int(expected.sum()) < len(expected)
    torch.testing.assert_close(kept.h_hat, whole.h_hat[expected])
    assert kept.teacher_index.tolist() == whole.teacher_index[expected].tolist()
    assert kept.step.tolist() == whole.step[expected].tolist()
    assert kept.h_hat.requires_grad


def test_both_paths_agree(reduced, samples) -> None:
    assert parity_gate(reduced, TeacherBatch.collate(samples)) < 1e-4


def test_only_its_tokens_are_drafted_and_by_their_probability_within(reduced, samples) -> None:
    batch = TeacherBatch.collate(samples[:1])
    text = committed_text(reduced, batch, 0, batch.visual[0], 9)
    proposer = NeuralProposer(reduced.eval(), TreeConfig(width=3, depth=2, nodes=12))
    proposer.start(dataclasses.replace(text, capacity=40))
    proposer.commit(batch.ids[0, 9:10], batch.last[0, 8:9])
    tree = proposer.propose()
    assert set(tree.tokens[1:].tolist()) <= set(reduced.token_ids.tolist())
    logits = proposer_root_logits(reduced, text, batch)
    best = logits[reduced.token_ids].log_softmax(-1).sort(descending=True)
    children = tree.tokens[1:][tree.parents[1:] == 0]
    assert children.tolist() == reduced.token_ids[best.indices[: len(children)]].tolist()
    log_probs = torch.tensor(tree.log_probs[1:][tree.parents[1:] == 0]).float()
    torch.testing.assert_close(log_probs, best.values[: len(children)])


def proposer_root_logits(drafter, text, batch) -> torch.Tensor:
    """Whole-vocabulary logits [V] of the root, from a run of all pairs at once."""
    embeds = torch.cat((text.embeds[1:], drafter.embed(batch.ids[0, 9:10])))[None]
    rotation = drafter.rotary(batch.positions[0, :, 1:10], torch.float32)

    def causal(layer, queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        h, _ = drafter(embeds, batch.last[:, :9], rotation, causal)
        return drafter.head.logits(drafter.score(h[0, -1:], 0, drafter.remember(text.visual)).hat)[0]


class Artifacts(L.LightningDataModule):
    def __init__(self, samples) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=3, collate_fn=TeacherBatch.collate)

    def answer_token_counts(self, vocab_size: int) -> torch.Tensor:
        return answer_token_counts(self.samples, vocab_size)


def test_training_chooses_it_and_checkpoints_keep_it(tmp_path, make_drafter, samples) -> None:
    drafter = make_drafter(draft_vocabulary=9)
    module = DrafterModule(drafter, ObjectiveConfig(), lambda p: torch.optim.AdamW(p, lr=1e-3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, Artifacts(samples))
    expected = make_drafter(draft_vocabulary=9)
    expected.choose_vocabulary(answer_token_counts(samples, 41))
    assert drafter.token_ids.tolist() == expected.token_ids.tolist()
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, drafter.head, drafter.spec)
    assert loaded.token_ids.tolist() == drafter.token_ids.tolist()
    states = torch.randn(2, 32)
    torch.testing.assert_close(loaded.logits(states), drafter.logits(states))
