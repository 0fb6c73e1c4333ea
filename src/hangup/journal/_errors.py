"""What can go wrong, by name."""

from __future__ import annotations


class JournalError(Exception):
    """Any error of the journal."""


class JournalUnavailable(JournalError):
    """The database cannot be reached, or did not answer in time. What was asked for may or may not have happened."""


class SchemaError(JournalError):
    """The table is missing, or is of another version. The message says what to do."""


class DuplicateRun(JournalError):
    """There is a run of that id."""


class RunEnded(JournalError):
    """The run has ended; its row is final."""
