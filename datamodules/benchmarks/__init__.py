"""Benchmarks as their authors publish them, as sources of conversations.

``catalog`` says in a few lines per benchmark where its files lie and what their fields mean; ``entry`` makes a prompt
of a record by them, with the ``options`` that it offers; ``files`` and ``tables`` give the records of what is
published; ``source`` finds the files.
"""

from datamodules.benchmarks.source import BenchmarkConversations

__all__ = ["BenchmarkConversations"]
