"""Memory that is counted, against the tensors that a training and a decoding really hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fovea.artifacts.size import SampleLengths
from fovea.decoding.growth import TreeConfig
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.planning.memory import Planned, evaluating, exporting, optimizer_state, training
from fovea.planning.replica import KeptBytes, Precision
from fovea.targets.architecture import read_architecture
from fovea.targets.conversation import Conversation

TREE = TreeConfig(width=3, depth=3, nodes=12)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@pytest.fixture
def drafter(small_target) -> FoveaDrafter:
    return FoveaDrafter(small_target.spec, FoveaConfig(depth=3, correction_width=16), small_target.head)


@pytest.fixture
def run(drafter, small_target_path) -> Planned:
    return Planned(
        architecture=read_architecture(small_target_path),
        target_dtype=torch.float32,
        weights=sum(weight.numel() for weight in drafter.parameters()),
        trainable=drafter.trainable_parameters()["total"],
        widest=100,
        cache_numbers=2 * drafter.cache_layers * drafter.num_kv_heads * drafter.spec.head_dim,
        kept=KeptBytes((1000.0, 5000.0, 10.0, 1.0)),
        precision=Precision.named("32-true"),
        optimizer_state=optimizer_state(ADAMW, torch.float32),
        batch=2,
        devices=1,
        chunk_rows=128,
        max_anchors=None,
        features=0,
        online=False,
        sees_again=False,
        export_batch=4,
        max_new_tokens=(30, 20),
        tree=TREE,
        on_gpu=False,
    )


def held(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_what_training_holds(run, drafter):
    optimizer = ADAMW(drafter.parameters())
    for weight in drafter.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    parts = training(run, SampleLengths(100, 40, 20)).parts
    assert parts["drafter"] == held(drafter.parameters())
    assert parts["gradients"] == held(weight.grad for weight in drafter.parameters())
    assert parts["optimizer state"] == held(state)
    head = drafter.head
    shared = {tensor.data_ptr(): tensor for tensor in (head.embedding, head.lm_head_weight, head.norm_weight)}
    assert parts["target's embedding and LM head"] == held(shared.values())


def test_what_decoding_holds(run, drafter, small_target):
    encoded = small_target.encode(Conversation("q", [{"role": "user", "content": "what is in the picture?"}], ()))
    proposer = NeuralProposer(drafter, TREE)
    state, prefill = small_target.prefill(encoded, 20, draft_rows=TREE.nodes)
    proposer.start(prefill)
    lengths = SampleLengths(len(encoded.ids) + 7, 0, 7)
    parts = evaluating(run, lengths, within_training=False).parts
    assert parts["target"] == held(small_target.model.parameters())
    assert parts["drafter's copy"] == held(drafter.parameters())
    assert parts["caches"] == state.cache.buffer.nbytes + proposer.cache.buffer.nbytes


def test_evaluation_within_training_keeps_what_is_trained(run):
    lengths = SampleLengths(100, 40, 20)
    alone = evaluating(run, lengths, within_training=False).total
    kept = ("drafter", "gradients", "optimizer state", "target's embedding and LM head")
    trained = training(run, lengths).parts
    assert evaluating(run, lengths, within_training=True).total == alone + sum(trained[name] for name in kept)


def test_several_devices_sum_gradients_in_buckets_and_mixed_precision_keeps_a_copy(run):
    lengths = SampleLengths(100, 40, 20)
    single = training(run, lengths).parts
    assert training(replace(run, devices=2), lengths).parts["gradients"] == 2 * single["gradients"]
    mixed = training(replace(run, precision=Precision.named("bf16-mixed")), lengths).parts
    assert mixed["weights for autocast"] == single["drafter"] // 2
    halves = training(replace(run, precision=Precision.named("bf16-true")), lengths).parts
    assert (halves["drafter"], "weights for autocast" in halves) == (single["drafter"] // 2, False)


def test_activations_grow_with_the_batch_and_stop_at_the_most_anchors(run):
    lengths = SampleLengths(1000, 400, 200)

    def activations(**changes) -> int:
        return training(replace(run, **changes), lengths).parts["activations"]

    logits = 5 * 128 * run.architecture.vocab_size * 4
    assert activations(batch=4) - logits == 2 * (activations() - logits)
    # 60 anchors on two samples: 30 of the 200 answer tokens.
    kept = run.kept.of(lengths) - run.kept.of(SampleLengths(1000, 400, 30))
    assert activations() - activations(max_anchors=60) == 2 * kept
    assert activations(max_anchors=10_000) == activations()


def test_export_holds_the_whole_target_and_the_caches_of_its_batch(run, small_target):
    parts = exporting(run, SampleLengths(100, 40, 20)).parts
    assert parts["target"] == held(small_target.model.parameters())
    assert parts["caches"] == 4 * (100 + 30) * run.architecture.cache_numbers * 4
    assert "driver and libraries" not in parts
    assert "driver and libraries" in exporting(replace(run, on_gpu=True), SampleLengths(100, 40, 20)).parts


def test_a_live_target_is_held_while_training_and_features_are_read(run):
    lengths = SampleLengths(100, 40, 20)
    offline, online = (training(replace(run, online=online), lengths).parts for online in (False, True))
    assert online["target"] == run.architecture.parameters * 4
    assert {name: size for name, size in online.items() if name not in ("target", "forward pass")} == offline
    wider = training(replace(run, features=3), lengths).parts["batch"] / offline["batch"]
    assert wider == (4 * 100 + 40 + 20) / (100 + 40 + 20)


@pytest.mark.parametrize(
    ("make", "bytes_per_number"),
    [
        (ADAMW, 8),
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 4),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), 12),
    ],
)
def test_state_of_optimizers(make, bytes_per_number):
    assert optimizer_state(make, torch.float32) == bytes_per_number
    assert isinstance(make([nn.Parameter(torch.zeros(2))]), torch.optim.Optimizer)
