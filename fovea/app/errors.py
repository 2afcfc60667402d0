"""Which errors are the user's to mend: these end a run with a sentence, all others with their traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf.errors import OmegaConfBaseException

from fovea.app.typed import SettingError
from fovea.files import DiskFullError, is_full, no_room

ROOT = Path(__file__).resolve().parents[2]
#: Folders whose code says in one sentence what is wrong and how to mend it.
OWN = tuple(ROOT / name for name in ("fovea", "datamodules", "callbacks"))


#: What gloo and NCCL say when the other end of a connection is gone, or does not come.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
    "failed to recv",
)


def cause(error: BaseException) -> BaseException:
    """The error itself, without what Hydra wraps around the errors of constructors."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def sentence(error: BaseException, folder: Path) -> str:
    """What is said of ``error``, which ended the job in ``folder``."""
    if full := _full(error):
        return str(full) if isinstance(full, DiskFullError) else no_room(_file_of(full, folder), folder, full)
    if is_lost_rank(error):
        return gone(f"it was killed, failed or cannot be reached ({str(error).strip().splitlines()[0]})", folder)
    return str(error)


def gone(how: str, folder: Path) -> str:
    """What is said of a rank that has left the job in ``folder``; ``how`` says what is known of it."""
    return f"another rank is gone: {how}; its own output says why. {going_on(folder) or 'Start the same command anew'}"


def going_on(folder: Path) -> str:
    """How to go on with the job in ``folder``; empty if it has left nothing to go on with."""
    from fovea.app.runs import LAST_CHECKPOINT
    from fovea.evaluation.history import EVALUATIONS, FINAL
    from fovea.evaluation.unfinished import JOURNALS

    if (folder / LAST_CHECKPOINT).exists():
        return f"Go on from the last checkpoint with: python train.py resume={folder}"
    if any((folder / EVALUATIONS / FINAL).glob(JOURNALS)):
        return f"Go on behind the last answer with: python evaluate.py resume={folder}"
    return ""


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective operation failed because another process did not take part in it."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST)


def _full(error: BaseException) -> BaseException | None:
    """The error in the chain that says that a disk is full."""
    link: BaseException | None = error
    while link is not None and not is_full(link):
        link = link.__cause__ or link.__context__
    return link


def _file_of(error: BaseException, folder: Path) -> str:
    return str(getattr(error, "filename", None) or f"a file of the job in {folder}")


def is_user_error(error: BaseException) -> bool:
    """True for what our own code refuses in words, for unusable configurations of Hydra and Lightning, for a full disk
    and for a rank that is gone.

    A ValueError raised inside a library is a bug of ours until shown otherwise.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(error, SettingError | MisconfigurationException | InstantiationException | OmegaConfBaseException):
        return True
    if _full(error) or is_lost_rank(error):
        return True
    if not isinstance(error, ValueError | OSError | RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(folder) for folder in OWN)
