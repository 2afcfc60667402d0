"""Which errors are the user's to mend: these end a run with a sentence, all others with their traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf.errors import OmegaConfBaseException

from fovea.app.typed import SettingError

ROOT = Path(__file__).resolve().parents[2]
#: Folders whose code says in one sentence what is wrong and how to mend it.
OWN = tuple(ROOT / name for name in ("fovea", "datamodules", "callbacks"))


def cause(error: BaseException) -> BaseException:
    """The error itself, without what Hydra wraps around the errors of constructors."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_user_error(error: BaseException) -> bool:
    """True for what our own code refuses in words, and for unusable configurations of Hydra and Lightning.

    A ValueError raised inside a library is a bug of ours until shown otherwise.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(error, SettingError | MisconfigurationException | InstantiationException | OmegaConfBaseException):
        return True
    if not isinstance(error, ValueError | OSError | RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(folder) for folder in OWN)
