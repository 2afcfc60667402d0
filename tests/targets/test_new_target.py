"""An architecture that is not on the list, added as docs/new_target.md leads: Idefics3, which SmolVLM builds on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
)

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import RandomProposer
from fovea.decoding.speculative import extend_tree, generate
from fovea.decoding.tree import DraftTree
from fovea.targets.base import TargetSpec, View
from fovea.targets.conversation import Conversation
from fovea.targets.encoding import ReadImages
from fovea.targets.hf import HFTarget
from fovea.targets.load import ADAPTERS, load_head
from fovea.targets.spec import decoder_spec

PAGE = Path(__file__).parents[2] / "docs" / "new_target.md"


# The page shows what stands between these two lines.
class Idefics3(HFTarget):
    model_class = Idefics3ForConditionalGeneration
    processor_class = AutoProcessor

    def __init__(self, model: PreTrainedModel, processor: Any, spec: TargetSpec) -> None:
        config: Any = model.config
        self.image_token = processor.image_token
        self.image_token_id = config.image_token_id
        self._side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
        self._inner: Any = model.model
        super().__init__(model, processor, spec)

    @staticmethod
    def read_spec(config: Any, eos_ids: tuple[int, ...]) -> TargetSpec:
        return decoder_spec(config, config.text_config, eos_ids, placeholder_ids=(config.image_token_id,))

    def read_images(self, images: Sequence[Image.Image]) -> ReadImages:
        read = self.processor.image_processor([list(images)], return_row_col_info=True, return_tensors="pt")
        views: list[View] = []
        ids: list[list[int]] = []
        for number, (rows, columns) in enumerate(zip(read["rows"][0], read["cols"][0], strict=True)):
            views += [
                View(number, (column / columns, row / rows, (column + 1) / columns, (row + 1) / rows))
                for row in range(rows)
                for column in range(columns)
            ]
            views.append(View(number))
            ids.append(self.tokenizer(self._prompt(rows, columns), add_special_tokens=False)["input_ids"])
        # One tile per row, so that the tiles of several conversations can be joined.
        vision = {name: read[name].transpose(0, 1) for name in ("pixel_values", "pixel_attention_mask")}
        return ReadImages(vision, ((self._side, self._side),) * len(views), tuple(views), tuple(ids))

    def visual_tokens(self, vision: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(list(self._inner.get_image_features(**vision).pooler_output)).to(self.dtype)

    def _prompt(self, rows: int, columns: int) -> str:
        around, tile = self.processor.fake_image_token, self.image_token * self._side**2
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{around}<global-img>{tile}{around}"


# Up to here.


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else ' ' + p['text'] }}{% endfor %}{{ '<end_of_utterance>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TREE = DraftTree(np.array([40, 41, 42, 43]), np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2]), np.zeros(4))


@pytest.fixture(scope="module")
def one(twin_of: Any, llama_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tokenizer = llama_tokenizer()
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    ids = tokenizer.convert_tokens_to_ids
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "eos_token_id": ids("<end_of_utterance>"),
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        image_token_id=ids("<image>"),
        scale_factor=2,
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    ADAPTERS["Idefics3ForConditionalGeneration"] = Idefics3
    folder = tmp_path_factory.mktemp("idefics3")
    yield twin_of(Idefics3ForConditionalGeneration(config), folder, processor, tokenizer, eos="<end_of_utterance>")
    del ADAPTERS["Idefics3ForConditionalGeneration"]


def conversations() -> list[Conversation]:
    """A wide picture first, a tall one in the middle, two, one in a later turn, none."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    wide, tall, square = (
        Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST) for size in ((90, 30), (30, 77), (40, 40))
    )
    place, text = {"type": "image"}, {"type": "text", "text": "what is the red square"}
    said = {"role": "assistant", "content": "the blue circle"}

    def turn(*parts: dict) -> dict:
        return {"role": "user", "content": list(parts)}

    return [
        Conversation("first", [turn(place, text)], (wide,)),
        Conversation("middle", [turn(text, place, text)], (tall,)),
        Conversation("two", [turn(place, place, text)], (square, wide)),
        Conversation("turns", [turn(text), said, turn(place, text)], (tall,)),
        Conversation("none", [turn(text)]),
    ]


def test_ids_are_the_processors_and_tiles_lie_side_by_side(one: Any) -> None:
    for conversation in conversations():
        encoded = one.target.encode(conversation)
        assert encoded.ids.tolist() == one.inputs(conversation)["input_ids"][0].tolist()
        assert int(encoded.is_visual.sum()) == 4 * len(encoded.views)
    views = one.target.encode(conversations()[0]).views
    assert [view.box for view in views] == [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0)]


def test_it_decodes_what_generate_does(one: Any) -> None:
    for number, conversation in enumerate(conversations()):
        encoded, expected = one.target.encode(conversation), one.generate(conversation, 12)
        assert generate_autoregressive(one.target, encoded, max_new_tokens=12).tokens == expected
        proposer = RandomProposer(vocab_size=300, nodes=12, seed=number, answer=expected, hit_rate=0.8)
        assert generate(one.target, proposer, encoded, max_new_tokens=12).tokens == expected


def test_every_node_equals_a_plain_forward_over_its_path(one: Any) -> None:
    for conversation in conversations():
        state, _ = one.target.prefill(one.target.encode(conversation), 4, draft_rows=4)
        logits = one.target.lm_head(extend_tree(one.target, state, TREE))
        for row, path in enumerate(([40], [40, 41], [40, 42], [40, 42, 43])):
            expected = one.forward(conversation, path).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=5e-4, rtol=1e-4)


def test_it_teaches_in_batches_and_lends_its_head(one: Any) -> None:
    encoded = [one.target.encode(conversation) for conversation in conversations()]
    for read, sample in zip(encoded, one.target.teach(encoded, [1, 2]), strict=True):
        _, prefill = one.target.prefill(read, 1)
        torch.testing.assert_close(sample.last, prefill.hidden, atol=5e-4, rtol=1e-4)
        torch.testing.assert_close(sample.visual, prefill.visual, atol=5e-4, rtol=1e-4)
    head = load_head(one.folder, dtype=torch.float32)
    assert torch.equal(head.lm_head_weight, one.target.head.lm_head_weight)


def test_the_page_shows_this_adapter() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    adapter = source.split("between these two lines.\n")[1].split("\n\n\n# Up to here.")[0]
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert adapter + "\n" in blocks
    assert len(adapter.splitlines()) < 100
