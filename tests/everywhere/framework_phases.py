"""The framework matrix: the same phases for each framework, on uvicorn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from .clients import Client, Closed
from .phases import Cell, Want, judge
from .servers import Process

_numbers = itertools.count(1)

_FREE: Final = Want(state="completed", cause=None, phase="after_response", delivered=True, cleaned=None)
_BEFORE: Final = Want(phase="before_response", events=("token",), raised=True)
_DURING: Final = Want(phase="during_response", events=("token",), raised=True)


@dataclass(frozen=True)
class Phase:
    """One column."""

    name: str
    title: str
    kind: str  #: the path, or the name of the field or tool
    want: Want
    ways: tuple[str, ...] = ("FIN", "RST")
    headers: tuple[tuple[str, str], ...] = ()
    work: float = 30.0
    body: bool = False
    read_first: bytes = b""


PHASES: Final[tuple[Phase, ...]] = (
    Phase("plain", "a complete answer", "plain", _FREE, ("",)),
    Phase("idle", "an async handler", "idle", _BEFORE, ("FIN", "RST", "HALF")),
    Phase(
        "upload",
        "an upload, cut short",
        "body",
        Want(phase="before_response", events=("token",), cleaned=None, never=("body",)),
        body=True,
    ),
    Phase(
        "thread",
        "a `def` handler",
        "thread",
        Want(phase="before_response", events=("token", "thread ended"), cleaned=None, step=False),
        ("FIN",),
    ),
    Phase("stream", "an async stream", "stream", _DURING, read_first=b"data: x"),
    Phase("sse", "server-sent events", "sse", _DURING, ("FIN",), read_first=b"data: x"),
    Phase(
        "sgen",
        "a sync stream",
        "sgen",
        Want(phase="during_response", events=("token",), cleaned=None),
        ("FIN",),
        read_first=b"data: x",
    ),
    Phase(
        "closing",
        "a sync stream in `closing_stream()`",
        "closing",
        Want(phase="during_response", events=("token",)),
        ("FIN",),
        read_first=b"data: x",
    ),
    Phase(
        "background",
        "a background task",
        "background",
        replace(_FREE, events=("background ended",)),
        ("FIN",),
        read_first=b"done",
    ),
    Phase(
        "dependency",
        "a dependency with `yield`",
        "dep",
        replace(_BEFORE, events=("token", "dependency closed")),
        ("FIN",),
    ),
    Phase(
        "fails",
        "the handler raises",
        "fails",
        Want(
            "failed", None, None, delivered=None, cleaned=None, step=False, error="*"
        ),  # with the framework's own traceback, and its own way to answer
        ("",),
    ),
    Phase("keep-alive", "the last of 20 on a connection", "plain", _FREE, ("",)),
    Phase(
        "finish",
        "policy `finish`",
        "idle",
        Want("completed", None, "before_response", delivered=False),
        ("FIN",),
        (("x-policy", "finish"),),
        0.25,
    ),
    Phase(
        "signal",
        "policy `signal`: a callback of the token",
        "idle",
        Want("canceled", "client_disconnect", "before_response", delivered=False, events=("token",)),
        ("FIN",),
        (("x-policy", "signal"),),
        0.25,
    ),
    Phase(
        "timeout",
        "`timeout=`, and the client stays",
        "idle",
        Want("timed_out", "timeout", "before_response", delivered=False, events=("token",), raised=True, status=504),
        ("",),
        (("x-timeout", "0.25"),),
    ),
)
BY_NAME: Final = {phase.name: phase for phase in PHASES}


@dataclass(frozen=True)
class Own:
    """Where a framework has semantics of its own. ``want`` replaces fields of the phase's."""

    why: str
    want: Mapping[str, Any] = field(default_factory=dict)
    work: float | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Framework:
    """One row."""

    name: str
    title: str
    module: str
    packages: tuple[str, ...]
    phases: str  #: which it has
    long_tail: bool = True
    variant: str = ""
    graphql: bool = False
    mcp: bool = False
    own: Mapping[str, Own] = field(default_factory=dict)

    def installed(self) -> bool:
        """Whether all it needs is here."""
        try:
            for package in self.packages:
                version(package)
        except PackageNotFoundError:
            return False
        return True

    def versions(self) -> str:
        """What is installed, for the table."""
        return ", ".join(f"{package} {version(package)}" for package in self.packages)

    def environment(self) -> dict[str, str]:
        """What the server process is told."""
        return {"EVERYWHERE_FRAMEWORK": self.module, "EVERYWHERE_VARIANT": self.variant}

    def cells(self) -> list[tuple[Phase, str]]:
        """Every cell."""
        return [(BY_NAME[name], way) for name in self.phases.split() for way in BY_NAME[name].ways]


ALL: Final = "plain idle upload thread fails keep-alive finish signal timeout"
STARLETTE: Final = f"{ALL} stream sgen closing background"

_CUT: Final = Own(
    "a task group of its own cancels by level: cleanup that awaits is cut off, or left to the garbage collector",
    {"cleaned": None, "raised": False, "step": False},
)
_NOT_CALLED: Final = Own("the handler is entered only with the whole body", {"called": False, "events": ()})
_BLOCKS: Final = Own(
    "runs on the event loop and blocks it, so nobody can see the client leave",
    {"state": "completed", "cause": None, "phase": "after_response", "delivered": True, "events": ("thread ended",)},
)
_ANSWERS_ERRORS: Final = Own(
    "answers 200 with the error in the body", {"state": "completed", "phase": "after_response", "delivered": True}
)
_BHM: Final = {"idle": _CUT, "stream": _CUT, "timeout": _CUT}
_MCP_STREAMS: Final = {
    "upload": _NOT_CALLED,
    "fails": _ANSWERS_ERRORS,
    "finish": Own("the stream of the answer has started already", {"phase": "during_response"}),
    "thread": Own("the stream of the answer has started already", {"phase": "during_response"}),
    "timeout": Own(
        "the stream of the answer has started already: it is cut",
        {
            "phase": "during_response",
            "status": 200,
            "cleaned": None,
            "raised": False,
            "step": False,
            "noise": ("ASGI callable returned without completing response",),
        },
        kind="token",
    ),
}
_BY_TOKEN: Final = "the SDK runs the tool in a task of its own session, on purpose: it has to look at the token"
_MCP_STATEFUL: Final = {
    **_MCP_STREAMS,
    "idle": Own(
        _BY_TOKEN,
        {"phase": "during_response", "raised": False, "cleaned": None, "events": ("token", "tool ended")},
        kind="token",
    ),
    "signal": Own(
        "listens itself, and ends its stream when the client leaves; the tool goes on",
        {"phase": "during_response", "cleaned": None, "step": False},
    ),
}
_MCP_STATELESS: Final = {
    **_MCP_STREAMS,
    "idle": Own(_CUT.why, {"phase": "during_response", "cleaned": None, "step": False}),
    "signal": Own(
        "listens itself, and cancels its handler when the client leaves, whatever the policy",
        {"phase": "during_response", "cleaned": None, "step": False},
    ),
}
_MCP_JSON: Final = {
    "upload": _NOT_CALLED,
    "fails": _ANSWERS_ERRORS,
    "idle": Own(_BY_TOKEN, {"raised": False, "cleaned": None, "events": ("token", "tool ended")}, kind="token"),
    "timeout": Own(_BY_TOKEN, {"raised": False, "cleaned": None, "events": ("token", "tool ended")}, kind="token"),
    "signal": Own("logs the `OSError` that `send()` raises for a client that has gone", {"noise": ("mcp.server",)}),
}
_GRAPHQL: Final = {"upload": _NOT_CALLED, "thread": _BLOCKS, "fails": _ANSWERS_ERRORS}
_DROPS: Final = Own(
    "cancels its own task when the client leaves, and may do so inside `send()`: the generator is then left to the "
    "garbage collector",
    _CUT.want,
)
_DJANGO: Final = {"upload": _NOT_CALLED, "stream": _DROPS, "sse": _DROPS}

FRAMEWORKS: Final[tuple[Framework, ...]] = (
    Framework("plain-asgi", "plain ASGI", "plain", ("uvicorn",), f"{ALL} stream sse background", long_tail=False),
    Framework("starlette", "Starlette", "starlette_app", ("starlette",), STARLETTE, long_tail=False),
    Framework(
        "bhm-inside",
        "… `BaseHTTPMiddleware` inside",
        "bhm_inside",
        ("starlette",),
        STARLETTE,
        long_tail=False,
        own=_BHM,
    ),
    Framework(
        "bhm-outside", "… `BaseHTTPMiddleware` outside", "bhm_outside", ("starlette",), STARLETTE, long_tail=False
    ),
    Framework("twice", "… mounted twice", "twice", ("starlette",), STARLETTE, long_tail=False),
    Framework(
        "fastapi",
        "FastAPI",
        "fastapi_app",
        ("fastapi", "starlette"),
        f"{STARLETTE} sse dependency",
        long_tail=False,
        own={"sse": _CUT},
    ),
    Framework(
        "sse-starlette",
        "sse-starlette",
        "sse_starlette_app",
        ("sse-starlette", "starlette"),
        f"{ALL} stream sse background",
        own={"sse": _CUT},
    ),
    Framework(
        "litestar",
        "Litestar",
        "litestar_app",
        ("litestar",),
        f"{STARLETTE} sse dependency",
        own={"stream": _CUT, "sse": _CUT},
    ),
    Framework("quart", "Quart", "quart_app", ("quart",), f"{ALL} stream sse sgen background"),
    Framework("django", "Django", "django_app", ("django",), f"{ALL} stream sse", own=_DJANGO),
    Framework("django-sync", "… with a sync middleware", "django_sync", ("django",), f"{ALL} stream sse", own=_DJANGO),
    Framework(
        "channels",
        "Channels",
        "channels_app",
        ("channels", "django"),
        f"{ALL} stream sse",
        own={"upload": _NOT_CALLED},
    ),
    Framework("falcon", "Falcon", "falcon_app", ("falcon",), f"{ALL} stream sse background"),
    Framework(
        "blacksheep",
        "BlackSheep",
        "blacksheep_app",
        ("blacksheep",),
        f"{ALL} stream sse background",
        own={"thread": _BLOCKS},
    ),
    Framework(
        "sanic",
        "Sanic",
        "sanic_app",
        ("sanic",),
        f"{ALL} stream background",
        own={
            "thread": _BLOCKS,
            "signal": Own("logs the `OSError` that `send()` raises for a client that has gone", {"noise": ("sanic",)}),
        },
    ),
    Framework(
        "connexion",
        "Connexion",
        "connexion_app",
        ("connexion",),
        ALL,
        own={
            "upload": _NOT_CALLED,
            "keep-alive": Own(
                "leaves a coroutine behind after an error", {"noise": ("ServerErrorMiddleware.error_response",)}
            ),
        },
    ),
    Framework("strawberry", "Strawberry", "strawberry_app", ("strawberry-graphql",), ALL, graphql=True, own=_GRAPHQL),
    Framework("ariadne", "Ariadne", "ariadne_app", ("ariadne",), ALL, graphql=True, own=_GRAPHQL),
    Framework("mcp-stateful", "MCP SDK, stateful", "mcp_app", ("mcp",), ALL, mcp=True, own=_MCP_STATEFUL),
    Framework(
        "mcp-stateless",
        "MCP SDK, stateless",
        "mcp_app",
        ("mcp",),
        ALL,
        variant="stateless",
        mcp=True,
        own=_MCP_STATELESS,
    ),
    Framework("mcp-json", "MCP SDK, JSON", "mcp_app", ("mcp",), ALL, variant="json", mcp=True, own=_MCP_JSON),
    Framework("fastmcp-stateful", "FastMCP, stateful", "fastmcp_app", ("fastmcp",), ALL, mcp=True, own=_MCP_STATEFUL),
    Framework(
        "fastmcp-stateless",
        "FastMCP, stateless",
        "fastmcp_app",
        ("fastmcp",),
        ALL,
        variant="stateless",
        mcp=True,
        own=_MCP_STATELESS,
    ),
    Framework(
        "fastmcp-json", "FastMCP, JSON", "fastmcp_app", ("fastmcp",), ALL, variant="json", mcp=True, own=_MCP_JSON
    ),
)
FRAMEWORK: Final = {framework.name: framework for framework in FRAMEWORKS}


# ---------------------------------------------------------------------- playing


def play(process: Process, framework: Framework, phase: Phase, way: str) -> Cell:
    """Play one cell, and judge it."""
    cell = Cell(framework.name, phase.name, way)
    run = f"{phase.name}-{way or 'stay'}-{next(_numbers)}"
    own = framework.own.get(f"{phase.name}:{way}") or framework.own.get(phase.name)
    want = phase.want
    kind, work = phase.kind, phase.work
    if own is not None:
        cell.blind = own.why
        want = replace(want, **own.want)
        kind, work = own.kind or kind, own.work or work
    at: int | None = None
    with Client(process.port) as client:
        session = _open_session(client, run) if framework.mcp else {}
        first = len(process.look())
        try:
            at = _exchange(process, client, framework, phase, run, way, kind, work, session)
        except (OSError, AssertionError) as exc:
            cell.problems.append(f"the client got no further: {type(exc).__name__}: {exc}")
    judge(process, cell, run, want, first, at)
    return cell


def _exchange(
    process: Process,
    client: Client,
    framework: Framework,
    phase: Phase,
    run: str,
    way: str,
    kind: str,
    work: float,
    session: dict[str, str],
) -> int | None:
    repeat = 19 if phase.name == "keep-alive" else 0
    for n in range(repeat):
        _send(client, framework, phase, f"{run}-{n}", kind, work, session)
        status, _ = client.read_response()
        assert status == 200, status
    _send(client, framework, phase, run, kind, work, session)
    if not way:
        try:
            client.read_response()
        except Closed:
            assert phase.name == "timeout", "the server closed the connection"  # a stream that was cut
        process.wait_for_event(run, "left")
        return None
    if phase.read_first:
        client.read_until(phase.read_first)
    else:
        process.wait_for_event(run, "began")
    if phase.body:
        process.wait_until_quiet(run)
    else:
        assert process.wait_for_event(run, "parked"), "the handler was not reached"
        process.wait_until_quiet(run)
    return client.leave(way)


def _send(
    client: Client, framework: Framework, phase: Phase, run: str, kind: str, work: float, session: dict[str, str]
) -> None:
    headers = [*phase.headers]
    size: int | None = None
    body = b""
    if framework.mcp:
        path = f"/mcp?work={work}"
        body = _rpc("tools/call", {"name": "plain" if kind == "body" else kind, "arguments": {}}, 2)
        size = len(body)
        headers += [*session.items()]
    elif framework.graphql:
        path = f"/?work={work}&query=%7B{kind}%7D"
    else:
        path = f"/{kind}?work={work}"
    if phase.body:
        size, body = 100_000, body[:20] + b"x" * 10_000
        if not framework.mcp:
            headers.append(("content-type", "application/json" if framework.graphql else "application/octet-stream"))
    client.ask(path, run, body_size=size, body=body, headers=headers)


_MCP_HEADERS: Final = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2025-06-18",
}


def _rpc(method: str, params: dict[str, Any], number: int | None) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(message if number is None else {**message, "id": number}).encode()


def _open_session(client: Client, run: str) -> dict[str, str]:
    """Initialize, as an MCP client does. The session's identity goes into the headers, if there is one."""
    params = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "everywhere", "version": "1"},
    }
    body = _rpc("initialize", params, 1)
    client.ask("/mcp", f"{run}-open", body_size=len(body), body=body, headers=_MCP_HEADERS.items())
    client.read_until(b"\r\n\r\n")
    head = client.received.partition(b"\r\n\r\n")[0].decode()
    client.read_response()
    fields = dict(line.split(": ", 1) for line in head.lower().split("\r\n")[1:])
    headers = dict(_MCP_HEADERS)
    if "mcp-session-id" in fields:
        headers["mcp-session-id"] = fields["mcp-session-id"]
    body = _rpc("notifications/initialized", {}, None)
    client.ask("/mcp", f"{run}-opened", body_size=len(body), body=body, headers=headers.items())
    client.read_response()
    return headers
