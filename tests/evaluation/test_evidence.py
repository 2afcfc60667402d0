"""Evidence pictures: weights land on the right cells of the right image, for the tokens they were retrieved for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops

from fovea.decoding.growth import TreeConfig
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.evaluation.evidence import EvidenceStep, draw_evidence, evidence_steps, heat_maps, spread
from fovea.evaluation.style import save
from fovea.evaluation.trajectory import collect_trajectory
from fovea.targets.base import View
from fovea.visual.retrieval import RetrievalConfig

MAX_NEW_TOKENS = 10


def seeded_drafter(target, **retrieval) -> FoveaDrafter:
    torch.manual_seed(0)
    config = FoveaConfig(num_blocks=1, depth=2, correction_width=16, retrieval=RetrievalConfig(**retrieval))
    return FoveaDrafter(target.spec, config, target.head).eval()


def step(weights: np.ndarray, position: int = 1) -> EvidenceStep:
    return EvidenceStep(position, weights, proposed=1, chosen=1)


def test_heat_maps_put_each_entry_on_its_cell():
    weights = np.zeros(2 * 3 + 3 * 1)
    weights[4], weights[6 + 2] = 0.75, 0.25  # image 1: row 1, column 1; image 2: row 2
    first, second = heat_maps(weights, [(2, 3), (3, 1)])
    assert first.shape == (2, 3)
    assert second.shape == (3, 1)
    assert np.argwhere(first).tolist() == [[1, 1]]
    assert np.argwhere(second).tolist() == [[2, 0]]
    assert (first[1, 1], second[2, 0]) == (0.75, 0.25)
    with pytest.raises(ValueError, match="8 memory entries"):
        heat_maps(weights[:8], [(2, 3), (3, 1)])


def test_drawn_heat_lies_where_the_evidence_is(tmp_path):
    picture = Image.new("RGB", (60, 40), "white")
    weights = np.zeros(6)
    weights[2] = 1.0  # of 2 x 3 cells: row 0, column 2, the upper right corner
    figure = draw_evidence([picture], [(2, 3)], [5, 6], [step(weights)], str)
    axes = figure.axes[1]
    image = Image.open(save(figure, tmp_path / "evidence.png")).convert("RGB")
    box = axes.get_window_extent().transformed(figure.transFigure.inverted()).bounds
    left, width = box[0] * image.width, box[2] * image.width
    top, height = (1 - box[1] - box[3]) * image.height, box[3] * image.height

    def colour(row: int, column: int) -> tuple[int, ...]:
        return image.getpixel((int(left + (column + 0.5) / 3 * width), int(top + (row + 0.5) / 2 * height)))

    red, _, blue = colour(0, 2)
    assert red - blue > 80
    for row, column in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]:
        assert max(colour(row, column)) - min(colour(row, column)) < 5


def test_captions_tell_what_was_proposed_and_what_was_right(tmp_path):
    words = ["<s>", "$5", " red", " square", " circle"]
    steps = [EvidenceStep(1, np.array([0.5, 0.0, 0.5]), 2, 2), EvidenceStep(2, np.array([0.0, 1.0, 0.0]), 4, 3)]
    figure = draw_evidence(
        [Image.new("RGB", (30, 10))],
        [(1, 3)],
        [1, 2, 3],
        steps,
        lambda ids: "".join(words[i] for i in ids),
        question="which $ shape?",
    )
    titles = [axes.get_title(loc="left") for axes in figure.axes[1:3]]
    assert titles[0] == "token 1 · 2 of 3 cells\nafter “$5”\nproposes “ red”, accepted"
    assert titles[1] == "token 2 · 1 of 3 cells\nafter “$5 red”\nproposes “ circle”, target: “ square”"
    assert Image.open(save(figure, tmp_path / "evidence.png")).width > 400


@pytest.mark.parametrize(("count", "picked"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (20, list(range(10)))])
def test_spread_keeps_first_and_last(count, picked):
    steps = [step(np.ones(1), position) for position in range(10)]
    assert [s.position for s in spread(steps, count)] == picked
    assert spread([], 4) == []


def test_collected_weights_are_those_of_the_roots(small_target, small_conversations):
    conversation = next(c for c in small_conversations if c.key == "two")
    encoded = small_target.encode(conversation, [])
    proposer = NeuralProposer(seeded_drafter(small_target, k_min=2, k_max=5), TreeConfig(width=2, depth=2, nodes=6))
    trajectory = collect_trajectory(small_target, proposer, encoded, max_new_tokens=MAX_NEW_TOKENS)
    answer, steps = trajectory.trace.tokens, evidence_steps(trajectory)
    entries = sum(rows * columns for rows, columns in encoded.grids)
    assert steps[0].position == 1
    assert [s.position for s in steps] == sorted({s.position for s in steps})
    for s in steps:
        assert s.weights.shape == (entries,)
        assert 2 <= (s.weights > 0).sum() <= 5
        assert s.weights.sum() == pytest.approx(1, abs=1e-5)
        assert s.chosen == answer[s.position]

    # An independent look at the first round: prefill, first token, one tree.
    _, prefill = small_target.prefill(encoded, MAX_NEW_TOKENS, proposer.max_drafts)
    proposer.start(prefill)
    proposer.commit(torch.tensor(answer[:1]), prefill.hidden[-1:])
    tree = proposer.propose()
    children = [row for row in range(1, len(tree)) if tree.parents[row] == 0]
    assert steps[0].proposed == tree.tokens[max(children, key=lambda row: tree.log_probs[row])]
    np.testing.assert_allclose(steps[0].weights, proposer.evidence[0].alpha[0].detach(), rtol=1e-5)


def test_no_evidence_without_a_picture(small_target, small_conversations):
    conversation = next(c for c in small_conversations if c.key == "text")
    proposer = NeuralProposer(seeded_drafter(small_target), TreeConfig(width=2, depth=2, nodes=6))
    encoded = small_target.encode(conversation, [])
    assert evidence_steps(collect_trajectory(small_target, proposer, encoded, max_new_tokens=MAX_NEW_TOKENS)) == []


def test_two_images_get_a_row_each(tmp_path):
    pictures = [Image.new("RGB", (40, 20), "white"), Image.new("RGB", (20, 40), "white")]
    weights = np.full(8 + 2, 0.1)
    figure = draw_evidence(pictures, [(2, 4), (2, 1)], [5, 6], [step(weights)], str)
    assert len(figure.axes) == 2 * 2 + 1
    picture = Image.open(save(figure, tmp_path / "evidence.png")).convert("RGB")
    assert ImageChops.difference(picture, Image.new("RGB", picture.size, "white")).getbbox() is not None


def test_several_grids_over_one_picture(tmp_path):
    """The whole picture, its middle with line ends, a padded square, a grid that lost its rows."""
    middle, padded_box = (0.25, 0.0, 0.75, 1.0), (0.0, -0.5, 1.0, 1.5)
    views = [View(0), View(0, middle, line_ends=1), View(0, padded_box), View(0, line_ends=1)]
    grids = [(1, 1), (2, 3), (2, 1), (0, 3)]
    weights = np.array([0.0, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.25, 0.0])
    figure = draw_evidence([Image.new("RGB", (40, 20))], grids, [5, 6], [step(weights)], str, views=views)
    assert len(figure.axes) == 4 * 2 + 1
    overlays = [axes for axes in figure.axes[:8] if axes.get_subplotspec().colspan.start == 1]
    for axes in overlays:
        assert (axes.get_xlim(), axes.get_ylim()) == ((0, 40), (20, 0))
    (cell,), (padded,) = (axes.patches for axes in overlays[1:3])
    assert cell.get_bbox().bounds == (20, 0, 10, 10)
    assert padded.get_bbox().bounds == (0, -10, 40, 20)
    assert not overlays[3].patches
    save(figure, tmp_path / "evidence.png")
