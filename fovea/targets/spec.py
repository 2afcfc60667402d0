"""The spec of a decoder stack, read from a transformers configuration, and what we refuse to build on."""

from __future__ import annotations

from typing import Any

from fovea.targets.base import RopeSpec, TargetSpec


class UnsupportedTargetError(ValueError):
    """A checkpoint of a kind that this project cannot decode losslessly; the message says which part of it."""


def decoder_spec(
    config: Any, text: Any, eos_ids: tuple[int, ...], *, qkv_bias: bool, placeholder_ids: tuple[int, ...] = ()
) -> TargetSpec:
    """The spec of ``config`` whose decoder stack is configured by ``text``.

    Raises:
        UnsupportedTargetError: sliding-window layers, whose cache cannot be rolled back, or rescaled rotary embedding.
    """
    architecture = config.architectures[0]
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedTargetError(
            f"{architecture} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}; rejected drafts can "
            "only be rolled back in full attention: set use_sliding_window=false in its config.json"
        )
    rope = text.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "mrope"):
        raise UnsupportedTargetError(
            f"{architecture} rescales its rotary embedding ({rope['rope_type']}); only the default kind is supported"
        )
    section = rope.get("mrope_section")
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
        qkv_bias=qkv_bias,
        rope=RopeSpec(theta=float(rope["rope_theta"]), mrope_section=tuple(section) if section else None),
        max_positions=text.max_position_embeddings,
        eos_ids=eos_ids,
        placeholder_ids=placeholder_ids,
    )
