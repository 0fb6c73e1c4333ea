"""WebSockets against the reference model. See `play`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from starlette.types import Message

from hangup import AmbiguousOutcome
from hangup._watch import OVERHEAD
from hangup.testing import Quirks, WebSocketPeer

from .play import ENDINGS, Breaks, Play, check, check_for, replay
from .websocket import READ_AHEAD, Connection, Frame
from .world import TIMEOUT, Ending

QUIRKS = st.builds(
    Quirks,
    latched=st.booleans(),
    send_error=st.sampled_from([None, OSError("gone"), RuntimeError("the handler is closed")]),  # as uvloop puts it
    send_stays_blocked=st.just(True),  # else it is open whether it returns before the disconnect is known
    vanished_code=st.sampled_from([1005, 1006]),
    closed_code=st.sampled_from([None, None, None, 1006]),
)


class Server(Breaks, WebSocketPeer):
    """A peer whose `receive` can break."""

    def put(self, message: Message) -> None:
        self._queue.append(message)


class Events(Play):
    """Everything that can happen to a WebSocket."""

    peer = Server
    model: Connection

    @initialize(
        policy=st.sampled_from(["cancel", "cancel", "signal", "finish"]),
        denies=st.booleans(),
        quirks=QUIRKS,
        hooks=ENDINGS,
        finalizers=ENDINGS,
        answers=st.booleans(),
        accepts=st.sampled_from([True, True, False]),
    )
    def begin(
        self,
        policy: Any,
        denies: bool,
        quirks: Quirks,
        hooks: list[Ending],
        finalizers: list[Ending],
        answers: bool,
        accepts: bool,
    ) -> None:
        self.answers = answers  #: whether it closes in the end
        self.app: Frame | None = None  #: what it has sent, as far as it matters for what it may send now
        model = Connection(
            trio=self.on_trio,
            policy=policy,
            denies=denies,
            send_error=type(quirks.send_error).__name__ if quirks.send_error is not None else None,
            vanished_code=quirks.vanished_code,
            hooks=list(hooks),
            finalizers=list(finalizers),
        )
        extra = {} if denies else {"extensions": None}
        self.start(model, quirks, hooks, finalizers, READ_AHEAD * OVERHEAD, extra=extra)
        if accepts:  # most do
            self.it_reads()
            self.it_accepts()

    # ------------------------------------------------------------------ the client and the server

    def may_talk(self) -> bool:
        model = self.model
        return self.running() and model.client_status == 101 and not (model.gone or model.client_code)

    @precondition(lambda self: self.may_talk() and not self.model.broken and self.model.unread < 2 * READ_AHEAD)
    @rule()
    def the_client_says_something(self) -> None:
        self.model.say()
        self.happen(lambda: self.server.say("hello"))

    @precondition(may_talk)
    @rule(code=st.sampled_from([1000, 1000, 1001, 4000, 1005, 1002, 1011]))
    def the_client_closes(self, code: int) -> None:
        self.model.hang_up(self.server.quirks.closed_code or code, in_order=True)
        self.happen(lambda: self.server.close(code))

    @precondition(may_talk)
    @rule()
    def the_server_closes(self) -> None:
        self.model.hang_up(1012)
        self.happen(self.server.shut_down)

    # ------------------------------------------------------------------ what the application does

    def send(self, frame: Frame, code: int, message: Message, blocks: bool = False) -> None:
        self.app = frame if frame != "text" else self.app
        self.model.send(frame, code, blocks)
        if blocks:
            self.server.stop_reading()
        self.act(self.actor.say, message)

    def may_answer(self) -> bool:
        return self.prompted() and self.app is None

    @precondition(may_answer)
    @rule()
    def it_accepts(self) -> None:
        self.send("accept", 101, {"type": "websocket.accept", "subprotocol": "application"})

    @precondition(lambda self: self.may_answer() and self.model.denies)
    @rule(status=st.sampled_from([302, 401, 503]))
    def it_denies(self, status: int) -> None:
        headers = [(b"x-application", b"yes")]
        self.send("deny", status, {"type": "websocket.http.response.start", "status": status, "headers": headers})

    @precondition(lambda self: self.prompted() and self.app in {"deny", "chunk"})
    @rule(last=st.booleans())
    def it_says_why(self, last: bool) -> None:
        message = {"type": "websocket.http.response.body", "body": b"application", "more_body": not last}
        self.send("last" if last else "chunk", 0, message)

    @precondition(lambda self: self.prompted() and self.app in {"accept", "close"})
    @rule(blocks=st.booleans())
    def it_sends(self, blocks: bool) -> None:
        self.send("text", 0, {"type": "websocket.send", "text": "application"}, blocks)

    @precondition(lambda self: self.prompted() and self.app in {None, "accept", "close"})
    @rule(code=st.sampled_from([None, 1000, 1008, 4000, 1011, 1013]), blocks=st.booleans())
    def it_closes(self, code: int | None, blocks: bool) -> None:
        message: Message = {"type": "websocket.close", "reason": "application"}
        if code is not None:
            message["code"] = code
        self.send("close", code or 1000, message, blocks)

    @precondition(lambda self: self.prompted() and self.model.cause != TIMEOUT)
    @rule()
    def it_reads(self) -> None:
        self.model.listen()
        self.act(self.actor.listen)

    # ------------------------------------------------------------------ what holds

    def got(self) -> tuple[object, object]:
        server, model = self.server, self.model
        got = server.status, server.close_code, len(server.received)
        return got, (model.client_status, model.client_code, model.client_texts)

    def judge(self) -> None:
        super().judge()
        assert self.outcomes[0].close_code == self.model.close_code, "the close code"

    def go_on(self) -> None:
        if not self.answers or self.app in {"close", "last"}:
            self.it_returns()
        elif self.app in {"deny", "chunk"}:
            self.it_says_why(True)
        else:
            self.it_closes(1000, False)

    def stop_listening(self) -> None:
        self.the_client_leaves()


# ---------------------------------------------------------------------- the tests

pytestmark = pytest.mark.usefixtures("hurry")

#: How many calls each event loop is given.
EXAMPLES = {"asyncio": 300, "uvloop": 100, "trio": 200, **({"eager": 100} if sys.version_info >= (3, 12) else {})}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_whatever_happens_ends_as_the_model_says(backend: str, long_run: bool, minutes: float) -> None:
    check(Events, backend, EXAMPLES[backend])
    check_for(max(minutes, 1) if long_run else 0, Events, backend)


def begin(
    policy: str = "cancel", hooks: list[Ending] | None = None, finalizers: list[Ending] | None = None
) -> Callable[[Events], None]:
    quirks = Quirks(send_stays_blocked=True)
    return lambda e: e.begin(policy, True, quirks, hooks or [], finalizers or [], answers=False, accepts=True)


def unless_on_trio(event: Callable[[Events], None]) -> Callable[[Events], None]:
    return lambda e: None if e.on_trio else event(e)


#: What it has found, each cut down to what it takes.
FOUND: dict[str, list[Callable[[Events], None]]] = {
    "a child that a hook has started is waited for": [
        begin(hooks=["waits"]),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_starts_a_child(),
        lambda e: e.a_hook_ends(True),
    ],
    "a child that a hook has started which failed is interrupted": [
        begin(hooks=["waits"]),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_starts_a_child(),
        lambda e: e.a_hook_ends(False),
    ],
    "hooks come before a return that is late, too": [
        begin(hooks=["waits"]),
        lambda e: e.it_enters("protect"),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_ends(False),
    ],
    "a goodbye that the application has heard of is no success before the hooks": [
        begin(hooks=["waits"]),
        lambda e: e.the_client_closes(1000),
        lambda e: e.it_reads(),
        lambda e: e.it_raises(ValueError("it has ended")),
        lambda e: e.a_hook_ends(True),
    ],
    "nor is it if one fails": [
        begin(hooks=["waits"]),
        lambda e: e.the_client_closes(1000),
        lambda e: e.it_reads(),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_ends(False),
    ],
    "nor if there was a child": [
        begin("signal", hooks=["waits"]),
        lambda e: e.the_client_closes(1000),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_reads(),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_ends(False),
    ],
    "a shutdown interrupts who is to be signaled, although its client left during the hooks": [
        begin("signal", hooks=["waits"]),
        lambda e: e.it_closes(blocks=False, code=None),
        lambda e: e.the_client_leaves(),
        lambda e: e.a_hook_ends(True),
        lambda e: e.the_server_shuts_down(),
    ],
    "hooks that fail while the server cancels leave no finalizer out": [
        begin(hooks=["waits"], finalizers=["completed"]),
        lambda e: e.it_returns(),
        unless_on_trio(lambda e: e.the_server_cancels()),
        lambda e: e.a_hook_ends(False),
    ],
    "no hook runs after one has failed, and the client hears that it has": [
        begin(hooks=["failed", "waits"]),
        lambda e: e.it_closes(1000, False),
        lambda e: e.it_leaves_the_section_or_swallows_the_error(),
        lambda e: e.it_returns(),
    ],
    "what the server has cancelled after a goodbye was cut off": [
        begin(),
        lambda e: e.the_client_closes(1000),
        unless_on_trio(lambda e: e.the_server_cancels()),
    ],
    "a close that comes after a look at the canceled token is dropped": [
        begin(),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_looks_at_its_token(),
        lambda e: e.it_closes(1000, False),
    ],
    "a close that says failure after a look at the canceled token is no failure": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_looks_at_its_token(),
        lambda e: e.it_closes(1011, False),
    ],
    "after a close that came too late a send is refused": [
        begin(),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_closes(1000, False),
        lambda e: e.it_sends(False),
    ],
    "what nobody knows is ambiguous after the close, too": [
        begin(),
        lambda e: e.it_closes(1000, False),
        lambda e: e.it_sends(False),
        lambda e: e.it_raises(AmbiguousOutcome("who knows")),
    ],
    "a deadline changes nothing about a hook that has failed for a client that has left": [
        begin(hooks=["waits"]),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_closes(1000, False),
        lambda e: e.the_client_leaves(),
        lambda e: e.the_deadline_passes(),
        lambda e: e.a_hook_ends(False),
        lambda e: e.the_deadline_passes(),
    ],
    "a deadline does not interrupt what hooks start for a goodbye that was only signaled": [
        begin("signal", hooks=["waits"]),
        lambda e: e.the_client_closes(1000),
        lambda e: e.it_returns(),
        lambda e: e.a_hook_starts_a_child(),
        lambda e: e.the_deadline_passes(),
        lambda e: e.a_hook_ends(True),
    ],
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_it_was_found_once(backend: str, found: str) -> None:
    replay(Events, backend, FOUND[found])
