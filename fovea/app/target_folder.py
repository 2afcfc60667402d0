"""Where the checkpoint of a target in ``conf/model`` lies, for commands that take a folder:

    python -m fovea.app.target_folder model=smollm2

It is built or fetched first if it is not there, as a job would do it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from fovea.app import errors, targets
from fovea.app.launch import composed, unknown_names
from fovea.app.settings import build_named


def target_folder(overrides: Sequence[str]) -> Path:
    """Checkpoint folder of the target that a job with these Hydra overrides works on.

    Raises:
        CheckpointError: it is neither here nor can it be built or fetched.
        SettingError: a setting of the target is wrong.
    """
    cfg = composed("train", overrides)
    targets.require_target(cfg.model)
    return targets.find_target(cfg, build_named(cfg, "model.build"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the folder alone, so that a shell can take it; what is said on the way goes to standard error."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            folder = target_folder(overrides)
    except HydraException as error:
        sys.exit("\n".join([f"error: {error}", *unknown_names(overrides, "train")]))
    except Exception as error:
        if not errors.is_user_error(error):
            raise
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
