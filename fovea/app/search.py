"""What a search by Optuna draws, where the settings of one trial depend on each other."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

K_MIN, K_MAX = "drafter.retrieval.k_min", "drafter.retrieval.k_max"


def k_max_above_k_min(cfg: DictConfig, trial: Any) -> None:
    """Draws K_max of ``trial`` between its K_min and ``cfg.search.k_max``, on a logarithmic scale.

    A rule with K_min above K_max is refused, so a search that draws both alone would waste trials on it.
    """
    if K_MAX in trial.user_attrs:  # typed
        return
    k_min = int(trial.params.get(K_MIN, trial.user_attrs.get(K_MIN, cfg.drafter.retrieval.k_min)))
    trial.suggest_int(K_MAX, k_min, max(k_min, int(cfg.search.k_max)), log=True)
