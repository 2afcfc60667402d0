"""What all adapters of transformers models share: the forward pass, the cache, the tree mask, teaching.

The base class is complete for a text-only model; an adapter of a VLM says how it reads pictures and where their
tokens stand on the rotary axes. The model's decoder layers are called one after the other with everything they need
(embeddings, rotary embedding, mask, cache), so one path serves prefill, verification, the autoregressive step and
teaching, and nothing about a request is left on the module.

Legend: ``B`` conversations, ``T`` tokens, ``n`` new tokens, ``A`` rotary axes, ``N`` visual tokens, ``D`` hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from fovea.targets.answers import answer_greedily
from fovea.targets.attention import AttentionProbe
from fovea.targets.base import Encoded, Prefill, TargetSpec, TargetState
from fovea.targets.conversation import Conversation
from fovea.targets.encoding import Grid, ReadImages, encode
from fovea.targets.feature_layers import FeatureTap, tap
from fovea.targets.head import TargetHead
from fovea.targets.importance import ImportanceProbe
from fovea.targets.kv_cache import KVCache
from fovea.targets.mid_states import MidSide, MidStateSelector
from fovea.targets.prompting import ChatPrompt
from fovea.targets.spec import decoder_spec
from fovea.targets.teacher_batch import TeacherSample, supervised_positions
from fovea.targets.teaching import teach


class _LayerCache(Cache):
    """A request's :class:`KVCache` in the shape that transformers' attention layers write to."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._cache.append(layer_idx, key_states, value_states)


class HFTarget:
    """A frozen transformers model behind the Target contract; as it stands, a text-only causal model.

    Args:
        model: the whole model, with :func:`fovea.targets.attention.probed_sdpa` as its text attention; its decoder
            stack has ``embed_tokens``, ``layers``, ``rotary_emb`` and ``norm``.
        processor: processor of the checkpoint, or its tokenizer for a text-only model.
        spec: the numbers of the target.
    """

    #: What loads the model and what reads its inputs; ``from_pretrained`` of both takes a checkpoint folder.
    model_class: Any = AutoModelForCausalLM
    processor_class: Any = AutoTokenizer
    #: Text that the chat template writes for an image, and the id it gets; None for a text-only model.
    image_token: str | None = None
    image_token_id: int | None = None

    def __init__(self, model: PreTrainedModel, processor: Any, spec: TargetSpec) -> None:
        self.model = model.eval().requires_grad_(False)
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.spec = spec
        self.prompt = ChatPrompt(processor, self.tokenizer, image_token=self.image_token, eos_ids=spec.eos_ids)
        self._text: Any = model.get_decoder()
        # transformers renames the argument: `past_key_values` up to some 5.x, `cache` after it.
        arguments = {name for layer in self._text.layers[:1] for name in inspect.signature(layer.forward).parameters}
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @property
    def device(self) -> torch.device:
        """See :attr:`fovea.targets.base.Target.device`."""
        return self._text.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """See :attr:`fovea.targets.base.Target.dtype`."""
        return self._text.norm.weight.dtype

    @property
    def head(self) -> TargetHead:
        """See :attr:`fovea.targets.base.Target.head`."""
        return TargetHead(self._text.embed_tokens.weight, self._lm_head_weight, self._text.norm.weight)

    @property
    def _lm_head_weight(self) -> Tensor:
        output: Any = self.model.get_output_embeddings()
        return output.weight

    def to(self, device: torch.device | str) -> HFTarget:
        """Moves the target itself; states of requests in progress stay where they are."""
        self.model.to(device)  # type: ignore[arg-type]
        return self

    # -- what an adapter of a VLM replaces ----------------------------------------------------------------------

    @staticmethod
    def read_spec(config: Any, eos_ids: tuple[int, ...]) -> TargetSpec:
        """The spec of a checkpoint, from its configuration alone."""
        return decoder_spec(config, config, eos_ids)

    def read_images(self, images: Sequence[Image.Image]) -> ReadImages:
        """What the vision tower takes, and where its visual tokens go; never called for no image."""
        raise NotImplementedError(f"{type(self).__name__} reads text only")

    def visual_tokens(self, vision: Mapping[str, Tensor]) -> Tensor:
        """[N, D] projected visual tokens of all images behind ``vision``, in order; never called for no image."""
        raise NotImplementedError(f"{type(self).__name__} reads text only")

    def rotary_positions(self, is_visual_T: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, int]:
        """[A, T] rotary positions and that of the token that would follow."""
        tokens = is_visual_T.shape[0]
        return torch.arange(tokens).expand(self.spec.rope.axes, -1), tokens

    def generation_inputs(self, batch: Sequence[Encoded], is_visual_BT: Tensor) -> dict[str, Tensor]:
        """What transformers' ``generate`` needs beside ids and attention mask."""
        return joined_vision(batch)

    # -- encoding -----------------------------------------------------------------------------------------------

    def encode(self, conversation: Conversation, answers: Sequence[Sequence[int]] | None = None) -> Encoded:
        """See :meth:`fovea.targets.base.Target.encode`; raises what :func:`fovea.targets.encoding.encode` does."""
        return encode(self, conversation, answers)

    # -- decoding -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, encoded: Encoded, max_new_tokens: int, draft_rows: int = 0, feature_layers: Sequence[int] = ()
    ) -> tuple[TargetState, Prefill]:
        """See :meth:`fovea.targets.base.Target.prefill`.

        Raises:
            ValueError: prompt and new tokens reach beyond the positions that the target knows, or it has no such
                layers.
        """
        if encoded.next_position + max_new_tokens > self.spec.max_positions:
            raise ValueError(
                f"conversation '{encoded.key}' reaches position {encoded.next_position}, {max_new_tokens} new tokens "
                f"follow, and the target has {self.spec.max_positions} positions; shorten the prompt or the answer"
            )
        tokens = encoded.ids.shape[0]
        capacity = tokens + max_new_tokens + draft_rows
        spec, device = self.spec, self.device
        cache = KVCache(spec.num_layers, spec.num_kv_heads, spec.head_dim, capacity, dtype=self.dtype, device=device)
        ids, positions, is_visual = encoded.ids.to(device), encoded.positions.to(device), encoded.is_visual.to(device)
        visual = self.read_visual([encoded])
        embeds = self.merge(ids, is_visual, visual)
        answer_mask = encoded.answer_mask.to(device)
        probe = ImportanceProbe(is_visual[None], supervised_positions(answer_mask)[None], [tokens])
        features = tap(feature_layers, spec.num_layers)
        watched = {"last_probe": probe, "features": features}
        hidden = self.run_layers(embeds[None], positions[:, None], None, cache=_LayerCache(cache), **watched)[0]
        cache.advance(tokens)
        cache.keep(range(tokens))
        rope_delta = encoded.next_position - tokens
        state = TargetState(cache, rope_delta, axes=spec.rope.axes, feature_layers=tuple(feature_layers))
        return state, Prefill(
            ids=ids,
            positions=positions,
            embeds=embeds,
            hidden=hidden,
            visual=visual,
            is_visual=is_visual,
            capacity=capacity,
            answer_mask=answer_mask,
            importance=probe.importance,
            visual_attention=probe.visual_attention,
            features=None if features is None else features.states()[0],
        )

    @torch.no_grad()
    def extend(self, state: TargetState, ids: Tensor, positions: Tensor, tree_mask: Tensor | None = None) -> Tensor:
        """See :meth:`fovea.targets.base.Target.extend`; rows that are still pending are dropped first.

        Raises:
            ValueError: the cache was allocated for fewer rows.
        """
        cache = state.cache
        cache.keep(())
        embeds = F.embedding(ids, self._text.embed_tokens.weight)
        mask = self._mask(cache.length, ids.shape[0], tree_mask)
        features = tap(state.feature_layers, self.spec.num_layers)
        hidden = self.run_layers(embeds[None], positions[:, None], mask, cache=_LayerCache(cache), features=features)[0]
        state.features = None if features is None else features.states()[0]
        cache.advance(ids.shape[0])
        return hidden

    def commit(self, state: TargetState, rows: Sequence[int]) -> None:
        """See :meth:`fovea.targets.base.Target.commit`."""
        state.cache.keep(rows)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of text ids."""
        return F.embedding(ids, self._text.embed_tokens.weight)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states f."""
        return F.linear(hidden, self._lm_head_weight)

    # -- teaching -----------------------------------------------------------------------------------------------

    def teach(
        self,
        batch: Sequence[Encoded],
        mid_layers: Sequence[int],
        mid_side: MidSide = "output",
        *,
        feature_layers: Sequence[int] = (),
    ) -> list[TeacherSample]:
        """See :meth:`fovea.targets.base.Target.teach`; tensors with a width are on the target's device.

        ``mid_side`` says which side of the chosen layer is the mid state; "input" is what DREAM's code takes.
        """
        return teach(self, batch, mid_layers, mid_side, feature_layers)

    def answer(
        self, conversations: Sequence[Conversation], max_new_tokens: int, batch_size: int
    ) -> list[list[list[int]]]:
        """See :meth:`fovea.targets.base.Target.answer`."""
        return answer_greedily(self, conversations, max_new_tokens, batch_size)

    # -- the forward pass ---------------------------------------------------------------------------------------

    def run_layers(
        self,
        hidden_BTD: Tensor,
        positions_ABT: Tensor,
        mask: Tensor | None,
        *,
        cache: Cache | None = None,
        selector: MidStateSelector | None = None,
        last_probe: AttentionProbe | None = None,
        features: FeatureTap | None = None,
    ) -> Tensor:
        """States f [B, T, D] of embeddings [B, T, D].

        ``mask`` is additive, [B or 1, 1, T, rows]; None is causal for an empty cache, and all rows for a single token.
        ``last_probe`` sees the attention of the last layer.
        """
        text = self._text
        rotary = text.rotary_emb(hidden_BTD, positions_ABT if self.spec.rope.mrope_section else positions_ABT[0])
        shared = {"attention_mask": mask, "position_embeddings": rotary, self._cache_argument: cache}
        for number, layer in enumerate(text.layers, 1):
            watcher = selector if selector is not None and number in selector.layers else None
            probes: list[AttentionProbe] = [] if watcher is None else [watcher.attention_probe]
            if last_probe is not None and number == len(text.layers):
                probes.append(last_probe)
            before_BTD = hidden_BTD
            hidden_BTD = layer(before_BTD, **shared, **({"attention_probe": _all_of(probes)} if probes else {}))
            if watcher is not None:
                watcher.after_layer(before_BTD, hidden_BTD)
            if features is not None:
                features.after_layer(number, hidden_BTD)
        return text.norm(hidden_BTD)

    def read_visual(self, batch: Sequence[Encoded]) -> Tensor:
        """[N, D] visual tokens of all images of ``batch``, in order; N = 0 without images.

        Raises:
            ValueError: the vision tower makes more or fewer of them than the prompts have places.
        """
        vision = joined_vision(batch)
        if not vision:
            return torch.zeros(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        visual_ND = self.visual_tokens({name: tensor.to(self.device) for name, tensor in vision.items()})
        places = sum(int(encoded.is_visual.sum()) for encoded in batch)
        if visual_ND.shape[0] != places:
            raise ValueError(
                f"the images of conversation '{batch[0].key}' make {visual_ND.shape[0]} visual tokens, and the prompt "
                f"has {places} places for them; are the processor's files those of this checkpoint?"
            )
        return visual_ND

    def merge(self, ids: Tensor, is_visual: Tensor, visual_ND: Tensor) -> Tensor:
        """[..., D] input embeddings of ``ids`` [...], visual tokens where ``is_visual`` [...]."""
        embeds = self.embed(ids)
        if visual_ND.shape[0]:
            embeds[is_visual] = visual_ND
        return embeds

    def _mask(self, past: int, new: int, tree_mask: Tensor | None) -> Tensor | None:
        """Additive mask [1, 1, n, past + n]; None where a single token sees everything."""
        if tree_mask is None:
            if new == 1:
                return None
            tree_mask = torch.ones(new, new, dtype=torch.bool, device=self.device).tril()
        mask = torch.zeros(1, 1, new, past + new, dtype=self.dtype, device=self.device)
        mask[..., past:].masked_fill_(~tree_mask, torch.finfo(self.dtype).min)
        return mask


def _all_of(probes: Sequence[AttentionProbe]) -> AttentionProbe:
    """A probe that shows what it sees to each of ``probes``."""

    def show(query: Tensor, key: Tensor, scale: float) -> None:
        for probe in probes:
            probe(query, key, scale)

    return show


def joined_vision(batch: Sequence[Encoded]) -> dict[str, Tensor]:
    """Inputs of the vision tower for all images of ``batch``, in order; empty without images."""
    visions = [encoded.vision for encoded in batch if encoded.vision]
    return {name: torch.cat([vision[name] for vision in visions]) for name in visions[0]} if visions else {}
