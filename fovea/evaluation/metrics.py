"""Speed and acceptance of speculative decoding, from pairs of traces of the same prompt.

Numbers are pooled: sums over samples and rounds are divided at the end, never averaged sample by sample, save where a
definition says so. The state holds sums only, so that it adds up over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fovea.decoding.trace import GenerationTrace

#: What each number means; printed beside it.
DEFINITIONS = {
    "samples": "answers measured",
    "rounds": "draft-verify iterations of all answers; the first token, from the prefill, belongs to none",
    "new_tokens": "tokens of all answers, first tokens included",
    "tau": "tokens committed per round: all committed / all rounds, bonus token included, first token and whatever an "
    "end token or the cap cuts off excluded",
    "accepted_drafts_per_round": "draft tokens among the committed / all rounds",
    "reach_rate": "by depth k: rounds with k or more accepted drafts / all rounds",
    "conditional_rate": "by depth k: rounds with k or more accepted drafts / rounds with k - 1 or more whose tree was "
    "k or more deep",
    "speedup": "wall-clock of the autoregressive answers / of the speculative ones, summed over samples; prefill and "
    "vision tower included",
    "mean_of_sample_speedups": "mean over samples of the ratio of wall-clock times",
    "throughput_ratio": "speculative tokens per second / autoregressive ones, each pooled; not the speedup where "
    "answers differ in length",
    "mean_of_sample_throughput_ratios": "mean over samples of the ratio of tokens per second",
    "decode_speedup": "speedup without the prefill (prompt, vision tower, and the drafter's own prompt pass)",
    "share_faster_than_ar": "samples whose speculative answer took strictly less time",
    "ar_tokens_per_s": "autoregressive tokens / their wall-clock, prefill included",
    "spec_tokens_per_s": "speculative tokens / their wall-clock, prefill included",
    "drafts_per_round": "draft nodes in a tree, root not counted, mean over rounds",
    "draft_acceptance": "accepted drafts / draft nodes",
    "speedup_over_transformers": "wall-clock of transformers' generate / of the speculative answers, summed over the "
    "samples measured with both",
    "time_share": "parts of the speculative wall-clock: prefill, draft (all of the proposer's work between rounds), "
    "verify (the target's pass and its choices), rest (bookkeeping)",
    "round_ms": "milliseconds per round spent on draft, verify and rest",
    "peak_memory_ratio": "most device memory of a speculative answer / of an autoregressive one; both hold the weights "
    "of target and drafter, which stay on the device while either answers. It has no interval, because a largest value "
    "has no bootstrap",
    "extra_peak_gib": "most device memory of a speculative answer - of an autoregressive one, in GiB; the drafter's "
    "weights, which stay on the device, are in both and so not in the difference",
    "macro": "plain mean of the sources' values (those defined)",
}

_COUNTS = ("samples", "rounds", "tokens", "ar_tokens", "committed", "accepted", "drafts", "faster", "paced")
_SECONDS = (
    "spec",
    "spec_prefill",
    "ar",
    "ar_prefill",
    "draft",
    "verify",
    "round",
    "speedup_sum",
    "throughput_sum",
    "transformers",
    "spec_beside_transformers",
)


class SpeedMetrics(Metric):
    """Sums over (speculative, autoregressive) trace pairs, one row per source; ``compute`` gives plain numbers.

    Args:
        sources: every source that may occur, the same and in the same order on all ranks.
        max_depth: of the deepest draft in any tree.
        kwargs: of torchmetrics.
    """

    full_state_update = False
    is_differentiable = False

    counts: Tensor
    seconds: Tensor
    reached: Tensor
    tried: Tensor
    possible: Tensor
    peak_bytes: Tensor

    def __init__(self, sources: Sequence[str], max_depth: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sources = tuple(sources)
        self.max_depth = max_depth
        rows = len(self.sources)
        by_depth = torch.zeros(rows, max_depth, dtype=torch.int64)
        self.add_state("counts", torch.zeros(rows, len(_COUNTS), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros(rows, len(_SECONDS), dtype=torch.float64), dist_reduce_fx="sum")
        # Rounds by depth k (column k - 1): accepted >= k; accepted >= k - 1 in a tree of depth >= k; tree depth >= k.
        self.add_state("reached", by_depth.clone(), dist_reduce_fx="sum")
        self.add_state("tried", by_depth.clone(), dist_reduce_fx="sum")
        self.add_state("possible", by_depth.clone(), dist_reduce_fx="sum")
        # Most bytes of a speculative and of an autoregressive answer.
        self.add_state("peak_bytes", torch.zeros(rows, 2, dtype=torch.int64), dist_reduce_fx="max")

    def update(
        self,
        speculative: GenerationTrace,
        autoregressive: GenerationTrace,
        transformers: GenerationTrace | None = None,
    ) -> None:
        """Adds one prompt's answers.

        Raises:
            ValueError: the traces are of different prompts, the source is unknown, or a tree is deeper than max_depth.
        """
        others = [autoregressive] if transformers is None else [autoregressive, transformers]
        for other in others:
            if other.key != speculative.key:
                raise ValueError(f"traces of two prompts cannot be compared: '{speculative.key}' and '{other.key}'")
        if speculative.source not in self.sources:
            raise ValueError(f"unknown source '{speculative.source}' of '{speculative.key}'; known: {self.sources}")
        row = self.sources.index(speculative.source)
        rounds = speculative.rounds
        deepest = max((r.tree_depth for r in rounds), default=0)
        if deepest > self.max_depth:
            raise ValueError(
                f"'{speculative.key}' has a draft tree of depth {deepest}, beyond max_depth {self.max_depth}"
            )

        counts = {
            "samples": 1,
            "rounds": len(rounds),
            "tokens": speculative.num_tokens,
            "ar_tokens": autoregressive.num_tokens,
            "committed": sum(r.committed for r in rounds),
            "accepted": sum(r.accepted for r in rounds),
            "drafts": sum(r.draft_nodes for r in rounds),
            "faster": int(speculative.total_s < autoregressive.total_s),
            "paced": int(autoregressive.num_tokens > 0),
        }
        seconds = {
            "spec": speculative.total_s,
            "spec_prefill": speculative.prefill_s,
            "ar": autoregressive.total_s,
            "ar_prefill": autoregressive.prefill_s,
            "draft": sum(r.draft_s for r in rounds),
            "verify": sum(r.verify_s for r in rounds),
            "round": sum(r.total_s for r in rounds),
            "speedup_sum": autoregressive.total_s / speculative.total_s,
            "throughput_sum": _throughput_ratio(speculative, autoregressive) or 0.0,
            "transformers": transformers.total_s if transformers else 0.0,
            "spec_beside_transformers": speculative.total_s if transformers else 0.0,
        }
        self.counts[row] += self.counts.new_tensor([counts[name] for name in _COUNTS])
        self.seconds[row] += self.seconds.new_tensor([seconds[name] for name in _SECONDS])
        for k in range(1, deepest + 1):
            self.reached[row, k - 1] += sum(r.accepted >= k for r in rounds)
            self.tried[row, k - 1] += sum(r.accepted >= k - 1 and r.tree_depth >= k for r in rounds)
            self.possible[row, k - 1] += sum(r.tree_depth >= k for r in rounds)
        peaks = [speculative.peak_memory_bytes, autoregressive.peak_memory_bytes]
        self.peak_bytes[row] = torch.maximum(self.peak_bytes[row], self.peak_bytes.new_tensor(peaks))

    def compute(self) -> dict[str, Any]:
        """``{"all": numbers, "per_source": {source: numbers}, "macro": {"speedup", "tau"}}``.

        The names are those of :data:`DEFINITIONS`; None where undefined (a mean over nothing).
        """
        every = torch.ones(len(self.sources), dtype=torch.bool)
        present = [row for row in range(len(self.sources)) if self.counts[row, 0] > 0]
        per_source = {self.sources[row]: self._numbers(every & (torch.arange(len(every)) == row)) for row in present}
        macro = {name: _mean([numbers[name] for numbers in per_source.values()]) for name in ("speedup", "tau")}
        return {"all": self._numbers(every), "per_source": per_source, "macro": macro}

    def _numbers(self, rows: Tensor) -> dict[str, Any]:
        """The numbers of the sources ``rows`` [S] bool, pooled."""
        rows = rows.to(self.counts.device)
        n = dict(zip(_COUNTS, self.counts[rows].sum(0).tolist(), strict=True))
        s = dict(zip(_SECONDS, self.seconds[rows].sum(0).tolist(), strict=True))
        reached, tried, possible = (x[rows].sum(0).tolist() for x in (self.reached, self.tried, self.possible))
        depths = range(sum(rounds > 0 for rounds in possible))
        spec_peak, ar_peak = self.peak_bytes[rows].amax(0).tolist() if rows.any() else (0, 0)
        rest = s["round"] - s["draft"] - s["verify"]
        # What happens between the prefill and the rounds, and behind them, is bookkeeping too.
        unrounded = s["spec"] - s["spec_prefill"] - s["round"]
        return {
            "samples": n["samples"],
            "rounds": n["rounds"],
            "new_tokens": n["tokens"],
            "tau": _ratio(n["committed"], n["rounds"]),
            "accepted_drafts_per_round": _ratio(n["accepted"], n["rounds"]),
            "reach_rate": [_ratio(reached[k], n["rounds"]) for k in depths],
            "conditional_rate": [_ratio(reached[k], tried[k]) for k in depths],
            "speedup": _ratio(s["ar"], s["spec"]),
            "mean_of_sample_speedups": _ratio(s["speedup_sum"], n["samples"]),
            "throughput_ratio": _ratio(n["tokens"] * s["ar"], s["spec"] * n["ar_tokens"]),
            "mean_of_sample_throughput_ratios": _ratio(s["throughput_sum"], n["paced"]),
            "decode_speedup": _ratio(s["ar"] - s["ar_prefill"], s["spec"] - s["spec_prefill"]) if n["rounds"] else None,
            "share_faster_than_ar": _ratio(n["faster"], n["samples"]),
            "ar_tokens_per_s": _ratio(n["ar_tokens"], s["ar"]),
            "spec_tokens_per_s": _ratio(n["tokens"], s["spec"]),
            "drafts_per_round": _ratio(n["drafts"], n["rounds"]),
            "draft_acceptance": _ratio(n["accepted"], n["drafts"]),
            "speedup_over_transformers": _ratio(s["transformers"], s["spec_beside_transformers"]),
            "time_share": {
                "prefill": _ratio(s["spec_prefill"], s["spec"]),
                "draft": _ratio(s["draft"], s["spec"]),
                "verify": _ratio(s["verify"], s["spec"]),
                "rest": _ratio(rest + unrounded, s["spec"]),
            },
            "round_ms": {
                "draft": _ratio(1e3 * s["draft"], n["rounds"]),
                "verify": _ratio(1e3 * s["verify"], n["rounds"]),
                "rest": _ratio(1e3 * rest, n["rounds"]),
            },
            "peak_memory_ratio": _ratio(spec_peak, ar_peak),
            "extra_peak_gib": (spec_peak - ar_peak) / 2**30 if ar_peak else None,
        }


def _throughput_ratio(speculative: GenerationTrace, autoregressive: GenerationTrace) -> float | None:
    spec, ar = ((trace.num_tokens, trace.total_s) for trace in (speculative, autoregressive))
    return _ratio(spec[0] * ar[1], spec[1] * ar[0])


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return _ratio(sum(defined), len(defined))
