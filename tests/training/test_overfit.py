"""A drafter that knows one answer by heart drafts it whole, from training through artifacts to decoding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import generate
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.module import DrafterModule
from fovea.training.objective import ObjectiveConfig
from fovea.visual.retrieval import RetrievalConfig

DEPTH, STEPS, ANSWER = 3, 120, 24


def test_an_answer_known_by_heart_is_drafted_whole(small_target, small_conversations, tmp_path: Path) -> None:
    """Behind two pictures; training and decoding that differ in a position, a shift or a feature would not agree."""
    (conversation,) = (c for c in small_conversations if c.key == "two")
    prompt = small_target.encode(conversation, [])
    answer = generate_autoregressive(small_target, prompt, max_new_tokens=ANSWER, eos_ids=()).tokens
    (sample,) = small_target.teach([small_target.encode(conversation, [answer])], [1, 2])

    torch.manual_seed(0)
    settings = FoveaConfig(num_blocks=1, depth=DEPTH, correction_width=32, retrieval=RetrievalConfig(k_min=2, k_max=8))
    drafter = FoveaDrafter(small_target.spec, settings, small_target.head)
    module = DrafterModule(drafter, ObjectiveConfig(), partial(torch.optim.AdamW, lr=3e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, DataLoader([sample], batch_size=1, collate_fn=TeacherBatch.collate))

    proposer = NeuralProposer(drafter.eval(), TreeConfig(width=2, depth=DEPTH, nodes=10))
    trace = generate(small_target, proposer, prompt, max_new_tokens=ANSWER, eos_ids=())
    assert trace.tokens == answer
    accepted = [r.accepted for r in trace.rounds[:-1]]
    assert sum(accepted) / len(accepted) > DEPTH, f"of {DEPTH + 1} levels: {accepted}"
