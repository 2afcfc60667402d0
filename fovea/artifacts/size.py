"""How many bytes artifacts take, told from lengths alone."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.artifacts.schema import StoredDtype

#: Per number of a state, and per row of one.
_BYTES: dict[str, tuple[int, int]] = {"bf16": (2, 0), "fp32": (4, 0), "fp8": (1, 4)}
#: Headers of two tar members and of the safetensors, meta.json, and padding of both to 512.
_OVERHEAD = 2_560


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of a sample in tokens: all of them, the visual ones, and those of answers."""

    tokens: int
    visual: int
    answer: int

    def __post_init__(self) -> None:
        if self.visual < 0 or self.answer < 1 or self.visual + self.answer >= self.tokens:
            raise ValueError(
                f"{self.tokens} tokens, {self.visual} of them visual and {self.answer} of answers, are no sample: "
                "there must be an answer, and something before it"
            )


def sample_bytes(
    lengths: SampleLengths,
    width: int,
    rotary_axes: int,
    dtype: StoredDtype,
    features: int = 0,
    picture_bytes: int | None = None,
) -> int:
    """Bytes of a sample in its shard, for keys and sources of a usual length.

    ``width`` is that of the target's states, ``rotary_axes`` are the numbers of a rotary position, ``features`` the
    feature layers that are stored beside. ``picture_bytes`` are those of the encoded pictures, if these are stored in
    the place of visual tokens.
    """
    per_number, per_row = _BYTES[dtype]
    rows = lengths.tokens * (1 + features) + lengths.answer
    if picture_bytes is None:
        rows, picture_bytes = rows + lengths.visual, 0
    per_token = 4 + 4 * rotary_axes + 2  # id, position, two masks
    return (
        rows * (width * per_number + per_row)
        + lengths.tokens * per_token
        + 4 * lengths.visual
        + picture_bytes
        + _OVERHEAD
    )
