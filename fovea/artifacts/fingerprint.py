"""What artifacts depend on: two sets with equal fingerprints hold the same numbers up to rounding."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import FingerprintMismatchError

logger = logging.getLogger(__name__)

#: Fields that say where things came from. Others may differ in them and still fit.
PROVENANCE = ("target", "revision", "versions")
_LIBRARIES = ("torch", "transformers", "tokenizers", "torchvision", "pillow")
#: Settings files of a checkpoint's processor, stored value by value.
_SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Files of a checkpoint that decide what ids a conversation becomes, stored as hashes.
_HASHED = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja")
#: What tokenizer_config.json may say about the ids of a conversation; the rest of it is names and habits of saving.
_TOKENIZER = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "bos_token", "eos_token", "unk_token")
#: Fields of config.json and of its parts that change states or visual tokens and are not in a target's spec.
_NUMBERS = {
    "": ("vision_feature_layer", "vision_feature_select_strategy", "image_grid_pinpoints"),
    "text": ("hidden_act",),
    "vision": ("hidden_act", "layer_norm_eps", "patch_size", "image_size", "window_size", "fullatt_block_indexes"),
}
#: Parts of a spec that change no number.
_SILENT = ("max_positions",)


@dataclass(frozen=True)
class Fingerprint:
    """Everything that the numbers in artifacts depend on.

    Attributes:
        weights: hash of the target's weights.
        processor: settings of image processor and tokenizer by dotted name.
        data: hash of the conversations.
        mid_layers: layers that the mid state is chosen from.
        feature_layers: layers whose outputs are stored; more than are wanted do no harm.
        dtype: stored dtype of the states.
        visual: "stored", or "recomputed" where pictures stand for the visual tokens.
        answers: "dataset" or "target".
        max_new_tokens: cap of the target's answers; None if the data set's are used.
        max_tokens: conversations longer than this were left out; None if none were.
        model: what configuration and tokenizer settings say about prompts and states, by dotted name; where it is
            empty, as in older artifacts, it is not compared.
        target, revision: name of the checkpoint folder and revision of its repository, for people.
        versions: of the libraries that computed the numbers; a difference is reported, not refused.
    """

    weights: str
    processor: dict[str, Any]
    data: str
    mid_layers: tuple[int, ...]
    dtype: str
    answers: str
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    feature_layers: tuple[int, ...] = ()
    visual: str = "stored"
    model: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Fingerprint:
        """The fingerprint of its JSON object.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(values, dict):
            raise TypeError(f"no fingerprint: {str(values)[:200]}")
        layers = {name: tuple(values.get(name, ())) for name in ("mid_layers", "feature_layers")}
        found = Fingerprint(**{**values, **layers})
        if not all(isinstance(part, dict) for part in (found.processor, found.model, found.versions)):
            raise TypeError("no fingerprint: processor, model and versions must hold named values")
        caps = [cap for cap in (found.max_new_tokens, found.max_tokens) if cap is not None]
        if not all(type(number) is int for number in (*found.mid_layers, *found.feature_layers, *caps)):
            raise TypeError("no fingerprint: layers and caps must be whole numbers")
        names = ("weights", "data", "dtype", "answers", "visual", "target")
        texts = (*(getattr(found, name) for name in names), found.revision or "", *found.versions.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("no fingerprint: hashes, names and versions must be texts")
        return found

    def digest(self) -> str:
        """16 hex digits over all that must agree; names a folder in the cache."""
        binding = {name: value for name, value in asdict(self).items() if name not in PROVENANCE}
        # As it was before there were any others.
        for name in ("feature_layers", "visual"):
            if getattr(self, name) == getattr(Fingerprint, name):
                del binding[name]
        if not self.model:
            del binding["model"]
        return hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Values here and in ``other`` of every field that must agree and does not, by dotted name.

        Feature layers agree if those of ``other`` are among them.
        """
        mine, theirs = flat(asdict(self)), flat(asdict(other))
        apart = PROVENANCE
        if set(other.feature_layers) <= set(self.feature_layers):
            apart = (*apart, "feature_layers")
        if not self.model or not other.model:
            apart = (*apart, "model")
        names = [name for name in mine | theirs if name.split(".")[0] not in apart]
        return {n: (mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)}

    def require(self, expected: Fingerprint, where: str, fields: Collection[str] | None = None) -> None:
        """Refuses artifacts with this fingerprint, found at ``where``, unless they are the ``expected`` ones.

        ``fields`` are those that must agree; None means all. ``weights`` stands for the target, and so for ``model``.

        Raises:
            FingerprintMismatchError: naming each field that differs, with both values.
        """
        different = self.differences(expected)
        if fields is not None:
            fields = {*fields, "model"} if "weights" in fields else fields
            different = {name: values for name, values in different.items() if name.split(".")[0] in fields}
        if different:
            lines = [f"{name} is {found!r} there, {wanted!r} here" for name, (found, wanted) in different.items()]
            raise FingerprintMismatchError(
                f"the artifacts in {where} do not fit: {'; '.join(lines)}. Use the settings they were made with, "
                "or export into another folder"
            )
        for name, here in expected.versions.items():
            if (there := self.versions.get(name)) != here:
                logger.warning("the artifacts in %s were made with %s %s, this is %s", where, name, there, here)


def fingerprint_checkpoint(
    checkpoint: Path, config: ExportConfig, data: str, revision: str | None = None
) -> Fingerprint:
    """The fingerprint of an export from a ``checkpoint`` folder; reads files, loads no model.

    ``data`` is a hash of the conversations, ``revision`` that of the checkpoint's repository, if known.
    """
    from fovea.targets.checkpoint import weights_fingerprint  # brings transformers, which a writer process spares

    return Fingerprint(
        weights=weights_fingerprint(checkpoint),
        processor=processor_settings(checkpoint),
        model=model_settings(checkpoint),
        data=data,
        mid_layers=config.mid_layers,
        feature_layers=config.feature_layers,
        dtype=config.dtype,
        visual=config.visual,
        answers=config.answers,
        max_new_tokens=config.max_new_tokens if config.answers == "target" else None,
        max_tokens=config.max_tokens,
        target=checkpoint.name,
        revision=revision,
        versions={name: version(name) for name in _LIBRARIES},
    )


def processor_settings(checkpoint: Path) -> dict[str, Any]:
    """Image-processor settings by dotted name and hashes of the tokenizer's files, from a checkpoint folder."""
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if (path := checkpoint / name).is_file():
            settings |= flat(json.loads(path.read_text(encoding="utf-8")))
    for name in _HASHED:
        if (path := checkpoint / name).is_file():
            settings[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return settings


def model_settings(checkpoint: Path) -> dict[str, Any]:
    """What configuration and tokenizer settings say about prompts and states, in plain JSON types by dotted name.

    It is what transformers makes of the files, so another layout of the same settings gives the same values.

    Raises:
        CheckpointError, UnsupportedTargetError: as :func:`fovea.targets.load.load_spec`.
    """
    from fovea.targets.load import load_spec, read_config

    config, _ = read_config(checkpoint)
    settings = {name: value for name, value in asdict(load_spec(checkpoint)).items() if name not in _SILENT}
    settings["eos_ids"] = sorted(settings["eos_ids"])
    parts = {"": config, "text": config.get_text_config(), "vision": getattr(config, "vision_config", None)}
    for part, names in _NUMBERS.items():
        settings |= {".".join(filter(None, (part, name))): getattr(parts[part], name, None) for name in names}
    settings |= {f"tokenizer.{name}": value for name, value in _tokenizer_settings(checkpoint).items()}
    known = {name: value for name, value in flat(settings).items() if value is not None}
    return json.loads(json.dumps(known, sort_keys=True))


def _tokenizer_settings(checkpoint: Path) -> dict[str, Any]:
    """Settings that change ids, and a hash of the chat template unless a file of its own takes its place."""
    path = checkpoint / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    # A token is a string, or an object that holds one.
    settings = {
        name: value["content"] if isinstance(value, dict) else value
        for name in _TOKENIZER
        if (value := values.get(name)) is not None
    }
    template = values.get("chat_template")
    if template is not None and not (checkpoint / "chat_template.jinja").is_file():
        text = json.dumps(template, sort_keys=True)
        settings["chat_template"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return settings


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by dotted name."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result
