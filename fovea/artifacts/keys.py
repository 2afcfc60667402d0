"""Sample keys as tar member names and back.

webdataset cuts a member's name at its first dot and lower-cases what follows, and a slash makes a folder; so every
character outside ``A-Z a-z 0-9 _ - ~`` is written as the %XX of its UTF-8 bytes. The mapping is injective.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from fovea.artifacts.errors import ArtifactError


def escape(key: str) -> str:
    """A member name without dots and slashes that :func:`unescape` turns back into ``key``.

    Raises:
        ArtifactError: for the empty key, which no member name can stand for.
    """
    if not key:
        raise ArtifactError("a conversation has an empty key; every key must be unique text")
    return quote(key, safe="", errors="surrogatepass").replace(".", "%2E")


def unescape(name: str) -> str:
    """The key that :func:`escape` made ``name`` of."""
    return unquote(name, errors="surrogatepass")
