"""Leases: every instance renews its own in one statement, and any instance closes the rows of those that do not.

The database's clock decides, so clocks that differ between machines do no harm. An instance that could not renew for a
while does not sweep until everybody else has had the time to renew: after an outage of the database all leases are
old, and the runs are alive. So they are after a machine has slept, or that clock was put forward.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from ._errors import JournalError
from ._run import Run, Superseded, are_written

if TYPE_CHECKING:
    from ._journal import Journal

logger: Final = logging.getLogger("hangup")


class Keeper:
    """Renews, settles what is left to be settled, and sweeps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._away = False
        self._sweep_from = 0.0
        self._swept = True
        self._looked: datetime | None = None
        # After a longer one, whyever, the lease of a run that is alive may have expired.
        self._longest_gap = max(journal.lease - journal.renew_every, 1.5 * journal.renew_every)

    async def keep_on(self) -> None:
        """Do so until the journal stops."""
        self._looked = None
        while not await self._journal.rest(self._journal.renew_every):
            try:
                await self.tick()
            except Exception:
                logger.exception("journal: the renewal of leases failed")

    async def tick(self) -> None:
        """Once."""
        try:
            await self._journal.prepare()
            await self._renew()
            gap = self._gap(await self._journal.store.now())
            if self._away:
                self._came_back()
            elif gap > self._longest_gap and self._swept:  # not twice in a row: who is always late must sweep at last
                self._hold_off()
                text = "journal: %.0f s since the last renewal, by the database's clock; others get the time to renew"
                logger.warning(text, gap)
            try:
                await self.settle_late()
            except JournalError as exc:  # one row that cannot be written must not keep others from being swept
                logger.info("journal: %d runs are not closed yet: %s", len(self._journal.unsettled), exc)
            self._swept = time.monotonic() >= self._sweep_from
            if self._swept:
                await self.sweep()
        except JournalError as exc:
            if not self._away:
                self._away = True
                text = "journal: the database is away (%s); %d runs go on, and their leases are not renewed"
                logger.warning(text, exc, len(self._journal.live))

    def _came_back(self) -> None:
        self._away = False
        self._hold_off()
        logger.warning("journal: the database is back")

    def _gap(self, now: datetime) -> float:
        """Seconds since the last look, by the clock of the database."""
        before, self._looked = self._looked or now, now
        return (now - before).total_seconds()

    def _hold_off(self) -> None:
        self._sweep_from = time.monotonic() + 1.5 * self._journal.renew_every

    async def _renew(self) -> None:
        # Those too whose row is still being written, or closed: that may take as long as a lease.
        ids = list(self._journal.live)
        known = {id: run for id, run in self._journal.live.items() if run.opened and not run.closing}
        if not ids:
            return
        renewed = await self._journal.store.renew(ids, self._journal.lease)
        if renewed < len(ids) and known:
            still = await self._journal.store.still_running(list(known))
            for id, run in known.items():
                if id not in still and not run.closing and self._journal.live.get(id) is run:
                    self._lose(run)

    def _lose(self, run: Run) -> None:
        """Another has closed the row of a run that goes on here. It is final; so the run has to stop."""
        run.lost = True
        del self._journal.live[run.id]
        logger.error("run %s was closed by another while it was running here: it is told to stop", run.id)
        run.call.cancel("the journal closed this run: its lease had ended")

    async def settle_late(self) -> None:
        """Write the terminal rows that could not be written when their runs ended, if nobody else has meanwhile.

        Each is tried, as long as there is time before the next renewal.

        :raises JournalUnavailable: if some still cannot.
        """
        failed: JournalError | None = None
        deadline = time.monotonic() + self._journal.renew_every / 2
        for run, closing in list(self._journal.unsettled.items()):
            at_work = run.finishing or run.opening
            if run.closing and run.state is None and not at_work and time.monotonic() < deadline:
                try:
                    [written] = await self._journal.store.close(closing)
                    if written or await are_written(self._journal, [run], [closing]):
                        run.has_ended(closing["new_state"])
                        logger.warning("run %s is closed after all: %s", run.id, run.state)
                    else:
                        continue  # it was opened after all, just now
                except Superseded as exc:
                    run.report_superseded(exc, closing["new_state"])
                except JournalError as exc:
                    failed = exc
                    continue
                self._journal.unsettled.pop(run, None)
        if failed is not None:
            raise failed

    async def sweep(self) -> None:
        """Close the rows whose lease has expired."""
        swept = await self._journal.store.sweep(self._journal.instance)
        if swept:
            names = ", ".join(row["id"] for row in swept[:10])
            more = f" and {len(swept) - 10} more" if len(swept) > 10 else ""
            logger.warning("journal: %d runs lost their instance and are closed: %s%s", len(swept), names, more)
