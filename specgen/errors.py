"""What can go wrong, by exit code: every error that a user sees is one of these."""

from __future__ import annotations


class CaptureError(Exception):
    """Why the eager loop has to serve, in one line."""


class SpecgenError(Exception):
    """A run that failed: one or two lines that say what is wrong, where, and what to do. Exit code 1."""

    exit_code = 1


class RunError(SpecgenError):
    """The run itself failed: non-finite logits, out of memory, a cache that lost count. Exit code 1."""


class UsageError(SpecgenError):
    """The command, the profile or the pair is wrong; nothing was run. Exit code 2."""

    exit_code = 2
