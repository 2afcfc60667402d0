"""Exports with the fake target at a pace that lets a test kill it: ``export_script.py FOLDER COUNT SECONDS WRITER``.

Its rank is that of the environment.
"""

import os
import sys
import time
from pathlib import Path

from conftest import FakeTarget, conversation

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.export import export
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.ranks import rank_in

if __name__ == "__main__":
    folder, count, pause, writer = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    target = FakeTarget(lambda batch: time.sleep(pause))
    config = ExportConfig((1, 2), answers="dataset", batch_size=1, shard_bytes=8_000, writer=writer)
    fingerprint = Fingerprint("abc", {"max_pixels": 4}, "d", (1, 2), "bf16", "dataset")
    rank, world_size, _ = rank_in(os.environ)
    conversations = [conversation(f"k.{i}") for i in range(count)]
    ranks = {"rank": rank, "world_size": world_size}
    export(target, conversations, folder, config, fingerprint, progress=False, **ranks)
