"""Pictures and questions: the same from the same seed, and no scene in both splits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fovea.targets.tiny import families
from fovea.targets.tiny.banners import Banner
from fovea.targets.tiny.drawing import CELL, Canvas
from fovea.targets.tiny.families import conversations, sample_scene, split_of
from fovea.targets.tiny.scenes import Board, Chart, Pair, Strings, Table, Text, Thing

SCENES = (Board, Chart, Strings, Table, Pair, Text, Banner)
FAMILIES = families.FAMILIES["grids"]
KNOWN = {name for choice in families.FAMILIES.values() for name in choice}


def _bytes(conversation):
    return [image.tobytes() for image in conversation.images]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_same_seed_same_bytes(split):
    first, second = (conversations(split, 30, seed=3) for _ in range(2))
    assert [(c.key, c.messages, c.answer, _bytes(c)) for c in first] == [
        (c.key, c.messages, c.answer, _bytes(c)) for c in second
    ]


def test_another_seed_gives_other_pictures():
    first, second = (conversations("train", 20, seed=seed) for seed in (0, 1))
    assert sum(_bytes(a) == _bytes(b) for a, b in zip(first, second, strict=True) if a.images) == 0


def test_splits_share_no_picture_and_no_scene():
    rng = np.random.default_rng(0)

    def seen(split, count):
        samplers = families.FAMILIES["grids"] | families.FAMILIES["banners"]
        scenes = (sample_scene(sampler, split, rng) for sampler in samplers.values() for _ in range(count))
        return {repr(part) for scene in scenes for part in scene.parts()}

    held_out, trained = seen("heldout", 40), seen("train", 200)
    assert not held_out & trained
    assert len(held_out) > 300


@given(st.integers(0, 2**32 - 1))
def test_split_depends_on_content_only(seed):
    scene, twin = (Board.sample(np.random.default_rng(seed)) for _ in range(2))
    assert scene is not twin
    assert split_of(scene) == split_of(twin)


def test_about_one_scene_in_eight_is_held_out():
    rng = np.random.default_rng(0)
    share = np.mean([split_of(Strings.sample(rng)) == "heldout" for _ in range(2000)])
    assert 0.09 < share < 0.16


def test_every_family_in_turn():
    held_out = conversations("heldout", 2 * len(FAMILIES), seed=0)
    assert [c.source for c in held_out] == [*FAMILIES, *FAMILIES]
    assert len({c.key for c in held_out}) == len(held_out)
    for conversation in held_out:
        assert [m["role"] for m in conversation.messages] == ["user"]
        assert conversation.answer
        parts = conversation.messages[0]["content"]
        assert sum(part["type"] == "image" for part in parts) == len(conversation.images)
    by_family = {c.source: c for c in held_out}
    assert len(by_family["pair"].images) == 2
    assert not by_family["text"].images


@pytest.mark.parametrize(("pictures", "sizes"), [("boards", 1), ("banners", 7)])
def test_other_pictures_have_other_shapes(pictures, sizes):
    drawn = conversations("train", 120, 0, pictures)
    assert {c.source for c in drawn} == set(families.FAMILIES[pictures])
    assert len({image.size for c in drawn for image in c.images}) == sizes


def test_training_conversations_alternate_and_start_with_their_family():
    for conversation in conversations("train", 20, seed=0):
        roles = [m["role"] for m in conversation.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert conversation.messages[1]["content"] == conversation.answer
        assert not any(p["type"] == "image" for m in conversation.messages[2::2] for p in m["content"])


def test_some_pictures_hold_64_visual_tokens():
    sizes = {c.images[0].size for c in conversations("heldout", 60, seed=0) if c.images}
    assert {(3 * CELL, 3 * CELL), (8 * CELL, 8 * CELL)} <= sizes


@given(st.sampled_from(SCENES), st.integers(0, 2**32 - 1))
def test_scenes_draw_whole_cells_and_answer(scene_type, seed):
    rng = np.random.default_rng(seed)
    scene = scene_type.sample(rng)
    images = scene.draw(rng)
    assert all(image.mode == "RGB" and image.width % CELL == image.height % CELL == 0 for image in images)
    turns = scene.turns(rng)
    assert turns
    assert all(turn.family in KNOWN and turn.question and turn.answer for turn in turns)


def test_answers_are_true():
    board = Board((Thing("red", "cross", (0, 0)), Thing("orange", "cross", (1, 1))), "K7Q")
    answers = {t.question: t.answer for seed in range(40) for t in board.turns(np.random.default_rng(seed))}
    assert answers["Describe the picture."] == (
        "The picture shows two shapes: a red cross at the top left and an orange cross at the centre. "
        "The sign says K7Q."
    )
    assert answers["How many crosses are there?"] == "There are two crosses."
    assert answers["How many stars are there?"] == "There are no stars."
    assert answers["What is at the centre?"] == "There is an orange cross."
    assert answers["What colour is the shape at the top left?"] == "It is red."
    assert answers["Where is the red cross?"] == "It is at the top left."
    chart = Chart((("red", 2), ("blue", 6), ("green", 1)))
    answers = {t.question: t.answer for seed in range(20) for t in chart.turns(np.random.default_rng(seed))}
    assert answers["Which bar is the highest?"] == "The blue bar, with 6."
    assert answers["How high is the green bar?"] == "The green bar is 1 high."
    table = Table("BK", (("01", "23", "45"), ("67", "89", "10")))
    answers = {t.question: t.answer for seed in range(40) for t in table.turns(np.random.default_rng(seed))}
    assert answers["Read row K of the table."] == "K: 67 89 10"
    assert answers["Read column 3 of the table."] == "45 10"


def test_a_shape_stays_in_its_cell():
    for seed in range(20):
        ground, drawn = (Canvas(3, 3, np.random.default_rng(seed)) for _ in range(2))
        drawn.shape((1, 1), "star", "red")
        changed = np.argwhere((np.asarray(ground.image()) != np.asarray(drawn.image())).any(-1))
        assert changed.min() >= CELL
        assert changed.max() < 2 * CELL


def test_unknown_shape_names_the_choices():
    with pytest.raises(ValueError, match="no shape is called 'blob'; there are circle"):
        Canvas(3, 3, np.random.default_rng(0)).shape((0, 0), "blob", "red")


def test_pictures_are_images():
    assert all(isinstance(i, Image.Image) for c in conversations("train", 10, seed=0) for i in c.images)
