"""What the journal says of a run, and what it accepts: records, pages, cursors, and the checks of every argument."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from ._schema import ID_LENGTH, NAME_LENGTH, OWNER_LENGTH, TEXT_LENGTH

#: Bytes of JSON that ``attributes`` and ``result`` may take.
JSON_LIMIT: Final = 65536
RESULT_LIMIT: Final = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One row, as it was when it was read. Times are the database's, in UTC.

    ``state`` is ``running`` or one of `hangup.State`; ``cause`` is one of `hangup.Cause`, or ``instance_lost`` when
    the process that ran it went away. ``delivered`` says whether the client was still there when the row was closed.
    A result beside another state than ``completed`` is partial: the last `Run.checkpoint`.
    """

    id: str
    name: str
    owner: str | None
    state: str
    cause: str | None
    phase: str | None
    reason: str | None
    opened_at: datetime
    closed_at: datetime | None
    lease_until: datetime | None
    instance: str
    effects: tuple[str, ...]
    http_status: int | None
    delivered: bool | None
    error: str | None
    trace_id: str | None
    attributes: dict[str, Any] | None
    result: Any
    cancel_at: datetime | None
    cancel_reason: str | None
    cancel_seen_at: datetime | None

    @property
    def ended(self) -> bool:
        """Whether the row is final."""
        return self.state != "running"

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON has it: times in ISO 8601."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["effects"] = list(self.effects)
        return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in values.items()}


#: The columns that make a record, in its order.
COLUMNS: Final = tuple(field.name for field in fields(RunRecord))


def record_of(row: Any) -> RunRecord:
    """The record of a row that has the `COLUMNS`."""
    values = {name: row[name] for name in COLUMNS}
    values["effects"] = tuple(json.loads(values["effects"])) if values["effects"] else ()
    return RunRecord(**values)


class CancelStatus(StrEnum):
    """What became of a request to cancel."""

    DELIVERED = "delivered"  #: the run has been told to stop. It may complete all the same, if it was about to
    PENDING = "pending"  #: it is written down, the instance that runs it has not answered yet
    ENDED = "ended"  #: the run had ended
    UNKNOWN = "unknown"  #: there is no such run


@dataclass(frozen=True, slots=True)
class CancelReply:
    """The answer of `Journal.cancel`, with the row as it was then: None if there is none."""

    status: CancelStatus
    run: RunRecord | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some runs, newest first, and where to go on: the ``after`` of the next page, None on the last."""

    runs: tuple[RunRecord, ...]
    next: str | None


# ---------------------------------------------------------------------- arguments


def checked_id(value: object) -> str:
    """An id of a run: 1 to 128 printable characters, without what parts the path of a URL."""
    return _checked("id", value, ID_LENGTH, without=" /")


def checked_name(value: object) -> str:
    """The name of a run."""
    return _checked("name", value, NAME_LENGTH)


def checked_owner(value: object) -> str | None:
    """The key of whose run it is."""
    return None if value is None else _checked("owner", value, OWNER_LENGTH)


def checked_number(option: str, value: object) -> None:
    """A number of things: 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option} takes a whole number, 1 or more, not {value!r}")


def checked_moment(option: str, value: datetime) -> None:
    """A point in time that can be told in UTC."""
    if not isinstance(value, datetime):
        raise TypeError(f"{option} takes a datetime with a time zone, not {value!r}")
    try:
        if value.tzinfo is not None:
            value.astimezone(UTC)
            return
    except OverflowError:
        pass
    raise ValueError(f"{option} takes a time with a time zone, not {value.isoformat()!r}")


def _checked(option: str, value: object, limit: int, *, without: str = "") -> str:
    if not isinstance(value, str):
        raise TypeError(f"{option} takes a text, not {value!r}")
    if not value or len(value) > limit:
        raise ValueError(f"{option} takes 1 to {limit} characters, not {len(value)}")
    # `isprintable` is false for control characters, NUL and lone surrogates: nothing a database can object to
    if not value.isprintable() or any(character in value for character in without):
        but = f" but {' and '.join(map(repr, without))}" if without else ""
        raise ValueError(f"{option} takes printable characters{but}, not {value!r}")
    return value


def checked_json(option: str, value: Any, limit: int = JSON_LIMIT) -> Any:
    """``value`` as JSON would give it back: a copy, so that what is changed later is not written by accident."""
    try:
        encoded = json.dumps(value, allow_nan=False)
    except TypeError as exc:
        raise TypeError(f"{option} takes what JSON can hold: {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{option} takes what JSON can hold: {exc}") from None
    if len(encoded) > limit:
        raise ValueError(f"{option} takes up to {limit} bytes of JSON, not {len(encoded)}")
    return json.loads(encoded)


def checked_attributes(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What else is to be known of a run: an object of JSON."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"attributes takes a mapping, not {value!r}")
    attributes: dict[str, Any] = checked_json("attributes", dict(value))
    return attributes


def cut_text(value: object) -> str | None:
    """Free text as any database takes it: cut, and without what some refuse. Whatever it is made of, it never raises:
    a row that says less is better than one that is not written.
    """
    if value is None:
        return None
    try:
        text = str(value)
    except Exception as exc:
        text = f"({type(value).__name__}, whose text raised {type(exc).__name__})"
    return text[:TEXT_LENGTH].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def names_as_text(names: Sequence[str]) -> str | None:
    """The names of effects, as the row has them."""
    return json.dumps(names, default=str) if names else None


# ---------------------------------------------------------------------- cursors


def cursor_of(record: RunRecord) -> str:
    """Where a page that ends with ``record`` ends."""
    return cursor_at(record.opened_at, record.id)


def cursor_at(moment: datetime, id: str) -> str:
    """The cursor of that place."""
    raw = f"{moment.isoformat()}|{id}".encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def place_of(cursor: object) -> tuple[datetime, str]:
    """What a cursor says. ValueError if it is none."""
    if not isinstance(cursor, str):
        raise TypeError(f"after takes the next of a page, not {cursor!r}")
    try:
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        moment, _, id = raw.decode().partition("|")
        return datetime.fromisoformat(moment).astimezone(UTC), checked_id(id)
    except (ValueError, OverflowError):
        raise ValueError(f"after takes the next of a page, not {cursor[:80]!r}") from None
