"""How much a drafter's context is compressed: branch by branch for given pictures, and as it happened in a run.

``python -m fovea.evaluation.compression 576 2880`` prints what each branch of SpecVLM's compressor makes of pictures of
so many visual tokens, at the settings of the paper's Table 4.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fovea.decoding.trace import GenerationTrace
from fovea.evaluation.results import ALL
from fovea.evaluation.table import markdown_table
from fovea.visual.compression import CompressionConfig

#: Settings of the isolated branches of the paper's Table 4.
RATIOS, QUERIES = (2, 3, 5, 10, 20), (1, 2, 4, 8, 10)
_GATE = "gate_"


def branch_table(counts: Sequence[int]) -> list[list[str]]:
    """Heading and a row per branch and setting: rows and compression ratio of pictures of ``counts`` visual tokens.

    ``concat`` follows at its defaults; ``weight`` is as short as its branches, and ``select`` as the one it takes. A
    picture that would become longer stays as it is.
    """
    settings = [
        (f"{name} {ratio}x", CompressionConfig(**{"mode": name, f"{name}_ratio": ratio}))
        for name in ("prune", "pool", "conv")
        for ratio in RATIOS
    ]
    settings += [(f"resampler {queries}", CompressionConfig(mode="resampler", queries=queries)) for queries in QUERIES]
    settings += [("text_only", CompressionConfig(mode="text_only")), ("concat", CompressionConfig(mode="concat"))]
    table = [["branch", *(f"{count} tokens" for count in counts)]]
    for name, config in settings:
        rows = [config.length(count, config.branches) for count in counts]
        table.append([name, *(f"{row} ({_times(count, row)})" for count, row in zip(counts, rows, strict=True))])
    return table


def compression_figures(traces: Sequence[GenerationTrace]) -> dict[str, dict[str, Any]]:
    """By source and over all: visual tokens, rows in their place, their ratio, and how often the gate took each branch.

    Empty where no drafter compressed anything. ``gate`` holds the share of each branch in the pictures, by name; for a
    gate that blends, its mean weight. A ratio without rows is None.
    """
    noted = [trace for trace in traces if "visual_rows" in trace.notes]
    if not noted:
        return {}
    sources = sorted({trace.source for trace in noted})
    groups = {source or "(no source)": [t for t in noted if t.source == source] for source in sources}
    return {name: _pooled([trace.notes for trace in own]) for name, own in (groups | {ALL: noted}).items()}


def usage_table(figures: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Heading and one row per source of :func:`compression_figures`."""
    branches = list(figures[ALL]["gate"])
    table = [["question family", "visual tokens", "rows", "ratio", *branches]]
    for name, own in figures.items():
        tokens, rows = own["visual_tokens"], own["visual_rows"]
        shares = [f"{own['gate'][branch]:.1%}" for branch in branches]
        table.append([name, str(tokens), str(rows), _times(tokens, rows), *shares])
    return table


def _pooled(notes: Sequence[dict[str, float]]) -> dict[str, Any]:
    total = {name: sum(own[name] for own in notes) for name in notes[0]}
    shares = {name.removeprefix(_GATE): value for name, value in total.items() if name.startswith(_GATE)}
    tokens, rows = round(total["visual_tokens"]), round(total["visual_rows"])
    return {
        "visual_tokens": tokens,
        "visual_rows": rows,
        "ratio": tokens / rows if rows else None,
        "gate": {branch: value / sum(shares.values()) for branch, value in shares.items()},
    }


def _times(tokens: int, rows: int) -> str:
    return f"{tokens / rows:.1f}x" if rows else "all dropped" if tokens else "-"


def main() -> None:
    """Prints :func:`branch_table` for the counts on the command line."""
    if not sys.argv[1:] or not all(word.isdigit() for word in sys.argv[1:]):
        raise SystemExit("usage: python -m fovea.evaluation.compression <visual tokens of a picture> ...")
    print(markdown_table(branch_table([int(word) for word in sys.argv[1:]])))


if __name__ == "__main__":
    main()
