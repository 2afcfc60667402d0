"""Exports with the fake target at a pace that lets a test kill it: ``export_script.py FOLDER COUNT SECONDS``."""

import sys
import time
from pathlib import Path

from conftest import FakeTarget, conversation

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.export import export
from fovea.artifacts.fingerprint import Fingerprint

if __name__ == "__main__":
    folder, count, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    target = FakeTarget(lambda batch: time.sleep(pause))
    config = ExportConfig(mid_layers=(1, 2), answers="dataset", batch_size=1, shard_bytes=8_000)
    fingerprint = Fingerprint("abc", {"max_pixels": 4}, "d", (1, 2), "bf16", "dataset")
    export(target, [conversation(f"k.{i}") for i in range(count)], folder, config, fingerprint, progress=False)
