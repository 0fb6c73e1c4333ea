"""The run journal: no row says ``running`` when nothing runs, on one machine or on many.

    from hangup import HangupMiddleware, current_call
    from hangup.journal import Journal

    journal = Journal("sqlite:///runs.db")
    app = HangupMiddleware(app, journal=journal)

    async def handler(request):
        run = await current_call().open_run("summarise", owner="alice")
        ...

Install ``hangup[journal]`` for SQLite, ``hangup[postgres]`` for PostgreSQL.
"""

try:
    import sqlalchemy.ext.asyncio  # noqa: F401
except ImportError as _missing:
    _remedy = "hangup.journal needs SQLAlchemy: pip install 'hangup[journal]' or 'hangup[postgres]'"
    raise ImportError(_remedy) from _missing

from ._errors import DuplicateRun, JournalError, JournalUnavailable, RunEnded, SchemaError
from ._journal import Journal
from ._records import CancelReply, CancelStatus, Page, RunRecord
from ._run import Run
from ._schema import metadata, runs

__all__ = [
    "CancelReply",
    "CancelStatus",
    "DuplicateRun",
    "Journal",
    "JournalError",
    "JournalUnavailable",
    "Page",
    "Run",
    "RunEnded",
    "RunRecord",
    "SchemaError",
    "metadata",
    "runs",
]
