"""Fixtures of the tests of benchmarks in tables."""

from __future__ import annotations

import pytest


@pytest.fixture
def own_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets library keeps its tables in a folder of the test's, and has no network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("tables"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
