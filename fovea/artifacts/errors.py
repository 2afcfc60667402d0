"""Errors of the artifacts package; each message names the file or key and the remedy."""

from __future__ import annotations


class ArtifactError(ValueError):
    """Artifacts that cannot be written, read or used as asked."""


class FingerprintMismatchError(ArtifactError):
    """Artifacts that were made by another target, from other data or with other settings."""
