"""The spec of a decoder stack, read from a transformers configuration, and what we refuse to build on."""

from __future__ import annotations

from typing import Any

from fovea.targets.base import RopeSpec, TargetSpec

#: Language models whose queries, keys and values have biases that no field of the configuration mentions.
_ALWAYS_BIASED = frozenset({"qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"})


class UnsupportedTargetError(ValueError):
    """A checkpoint of a kind that this project cannot decode losslessly; the message says which part of it."""


def decoder_spec(
    config: Any, text: Any, eos_ids: tuple[int, ...], *, placeholder_ids: tuple[int, ...] = ()
) -> TargetSpec:
    """The spec of ``config`` whose decoder stack is configured by ``text``.

    Raises:
        UnsupportedTargetError: no rotary embedding or RMS norm, a rescaled rotary embedding, or layers whose cache
            cannot be rolled back.
    """
    architecture = config.architectures[0]
    rope = getattr(text, "rope_parameters", None)
    if not rope or not hasattr(text, "rms_norm_eps"):
        missing = "RMS norm" if rope else "rotary embedding"
        raise UnsupportedTargetError(f"{architecture} has no {missing}; only decoders with both are supported")
    _refuse_partial_attention(architecture, text)
    if rope.get("rope_type", "default") not in ("default", "mrope"):
        raise UnsupportedTargetError(
            f"{architecture} rescales its rotary embedding ({rope['rope_type']}); only the default kind is supported"
        )
    section = rope.get("mrope_section")
    biased = text.model_type in _ALWAYS_BIASED or getattr(text, "attention_bias", False)
    return TargetSpec(
        architecture=architecture,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        qkv_bias=bool(biased),
        rope=RopeSpec(theta=float(rope["rope_theta"]), mrope_section=tuple(section) if section else None),
        max_positions=text.max_position_embeddings,
        eos_ids=eos_ids,
        placeholder_ids=placeholder_ids,
    )


def _refuse_partial_attention(architecture: str, text: Any) -> None:
    """Refuses layers that do not see the whole text: their cache cannot give back what a rejected draft pushed out."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        # Such as Mistral's: one window for all layers. One as wide as the context never closes.
        window = getattr(text, "sliding_window", None)
        narrow = window is not None and window < text.max_position_embeddings
        kinds = ["sliding_attention" if narrow else "full_attention"]
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        raise UnsupportedTargetError(
            f"{architecture} has layers of kind {', '.join(others)}; rejected drafts can only be rolled back in full "
            "attention: set use_sliding_window=false in its config.json, or sliding_window=null where there is no such "
            "field, and keep the context within the window"
        )
