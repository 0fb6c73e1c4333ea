"""Requests against the reference model. See `play`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from starlette.types import Message

from hangup._watch import OVERHEAD
from hangup.testing import Peer, Quirks

from .play import ENDINGS, Breaks, Play, check, check_for, replay
from .request import READ_AHEAD, Frame, Request
from .world import TIMEOUT, Ending

PIECE, BODY = b"12345678", b"application"
QUIRKS = st.builds(
    Quirks,
    latched=st.booleans(),
    disconnect_on_complete=st.booleans(),
    disconnect_before_final_returns=st.booleans(),
    send_error=st.sampled_from([None, OSError("gone"), RuntimeError("the handler is closed")]),  # as uvloop puts it
    send_stays_blocked=st.just(True),  # else it is open whether it returns before the disconnect is known
    body_lost=st.booleans(),
)


class Server(Breaks, Peer):
    """A peer whose client sends its body when it is told to, and whose `receive` can break."""

    def say(self, whole: bool) -> None:
        self._pieces.append(PIECE)
        self._body_ends = whole
        self.touch()

    def break_receive(self) -> None:
        self.quirks = replace(self.quirks, body_lost=False)
        super().break_receive()

    def put(self, message: Message) -> None:
        self._pieces.append(message["body"])


class Events(Play):
    """Everything that can happen to a request."""

    peer = Server
    model: Request

    @initialize(
        policy=st.sampled_from(["cancel", "cancel", "signal", "finish"]),
        upload=st.booleans(),
        quirks=QUIRKS,
        hooks=ENDINGS,
        finalizers=ENDINGS,
        answers=st.booleans(),
        sized=st.booleans(),
    )
    def begin(
        self,
        policy: Any,
        upload: bool,
        quirks: Quirks,
        hooks: list[Ending],
        finalizers: list[Ending],
        answers: bool,
        sized: bool = False,
    ) -> None:
        self.answers = answers  #: whether it sends the rest of its response in the end
        error = type(quirks.send_error).__name__ if quirks.send_error is not None else None
        self.app_started = self.app_done = self.app_spoke = False
        model = Request(
            trio=self.on_trio,
            policy=policy,
            upload=upload,
            send_error=error,
            body_lost=quirks.body_lost,
            sized=sized,
            hooks=list(hooks),
            finalizers=list(finalizers),
        )
        method, body = ("POST", []) if upload else ("GET", [b""])
        peer: Any = {"method": method, "body": body, "body_ends": not upload}
        self.start(model, quirks, hooks, finalizers, READ_AHEAD * (len(PIECE) + OVERHEAD), **peer)

    # ------------------------------------------------------------------ the client and the server

    def uploads(self) -> bool:
        model = self.model
        over = model.whole or model.gone or model.broken or model.complete or model.cut
        return self.running() and model.upload and not over

    @precondition(uploads)
    @rule(whole=st.booleans())
    def the_client_sends_of_its_body(self, whole: bool) -> None:
        self.model.say(whole)
        self.happen(lambda: self.server.say(whole))

    def may_send(self, frame: str) -> bool:
        whole = frame == "chunk" and self.model.sized and self.app_spoke
        return self.prompted() and not self.app_done and self.app_started == (frame != "start") and not whole

    def send(self, frame: Frame, status: int, blocks: bool) -> None:
        blocks = blocks and {"failed", "waits"}.isdisjoint(self.model.hooks)  # else it would be our 500 that does
        rest = b"" if self.model.sized and self.app_spoke else BODY
        self.app_started, self.app_done = True, self.app_done or frame == "last"
        self.app_spoke = self.app_spoke or frame == "chunk"
        self.model.send(frame, status, blocks)
        if blocks:
            self.server.stop_reading()
        headers = [(b"x-application", b"yes"), *([(b"content-length", b"%d" % len(BODY))] if self.model.sized else ())]
        messages: dict[str, Message] = {
            "start": {"type": "http.response.start", "status": status, "headers": headers},
            "chunk": {"type": "http.response.body", "body": BODY, "more_body": True},
            "last": {"type": "http.response.body", "body": rest, "more_body": False},
        }
        self.act(self.actor.say, messages[frame])

    @precondition(lambda self: self.may_send("start"))
    @rule(status=st.sampled_from([200, 200, 404, 500]), blocks=st.booleans())
    def it_starts_its_response(self, status: int, blocks: bool) -> None:
        self.send("start", status, blocks)

    @precondition(lambda self: self.may_send("chunk"))
    @rule(blocks=st.booleans())
    def it_sends_a_chunk(self, blocks: bool) -> None:
        self.send("chunk", 0, blocks)

    @precondition(lambda self: self.may_send("last"))
    @rule(blocks=st.booleans())
    def it_sends_the_last_frame(self, blocks: bool) -> None:
        self.send("last", 0, blocks)

    def may_listen(self) -> bool:
        model = self.model
        over = model.complete or model.cut  # then servers differ in what they make of the rest of the body
        hears = model.unread or not (model.policy == "finish" and model.whole)  # else it would listen for ever
        silent = model.cause == TIMEOUT or (model.refused and not model.unread) or (over and model.blind)
        return self.prompted() and bool(hears) and not silent

    @precondition(may_listen)
    @rule()
    def it_reads(self) -> None:
        self.model.listen()
        self.act(self.actor.listen)

    # ------------------------------------------------------------------ what holds

    def got(self) -> tuple[object, object]:
        server, model = self.server, self.model
        if model.hooked and not model.committed and (server.status or 400) < 400:
            assert not model.sized or server.body != BODY, "a client that counts has seen success"
        return (server.status, server.complete), (model.client_status, model.client_complete)

    def go_on(self) -> None:
        if self.app_done or not self.answers:
            self.it_returns()
        elif self.app_started:
            self.it_sends_the_last_frame(False)
        else:
            self.it_starts_its_response(200, False)

    def stop_listening(self) -> None:
        self.somebody_cancels(False) if self.model.gone or self.model.blind else self.the_client_leaves()


# ---------------------------------------------------------------------- the tests

pytestmark = pytest.mark.usefixtures("hurry")

#: How many calls each event loop is given.
EXAMPLES = {"asyncio": 700, "uvloop": 200, "trio": 500, **({"eager": 200} if sys.version_info >= (3, 12) else {})}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_whatever_happens_ends_as_the_model_says(backend: str, long_run: bool, minutes: float) -> None:
    check(Events, backend, EXAMPLES[backend])
    check_for(max(minutes, 1) if long_run else 0, Events, backend)


def begin(
    policy: str = "cancel", hooks: list[Ending] | None = None, error: Exception | None = None
) -> Callable[[Events], None]:
    quirks = Quirks(send_error=error, send_stays_blocked=True)
    return lambda e: e.begin(policy, upload=False, quirks=quirks, hooks=hooks or [], finalizers=[], answers=False)


SLOW = Quirks(disconnect_before_final_returns=True, send_stays_blocked=True)

#: What it has found, each cut down to what it takes.
FOUND: dict[str, list[Callable[[Events], None]]] = {
    "a held start refused is no cause": [
        begin(hooks=["completed"], error=OSError("gone")),
        lambda e: e.the_servers_receive_raises(),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
    ],
    "a held start blocked is released, and so is the last frame": [
        begin(hooks=["completed"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(True),
        lambda e: e.the_client_leaves(),
    ],
    "a chunk behind a held start does not go out after the deadline": [
        begin(hooks=["completed"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_enters("protect"),
        lambda e: e.it_sends_a_chunk(True),
        lambda e: e.the_deadline_passes(),
    ],
    "a held start that the server cancels is the end of the response": [
        begin(hooks=["completed"]),
        lambda e: e.it_reads(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(True),
        lambda e: e.the_server_cancels() if not e.on_trio else e.the_client_reads_on(),
        lambda e: e.it_reads(),
    ],
    "a failed hook is a 500 also for a client that has left": [
        begin(hooks=["waits"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
        lambda e: e.the_client_leaves(),
        lambda e: e.a_hook_ends(False),
    ],
    "the answer of a failed hook is not cut off by an interruption": [
        lambda e: e.begin("cancel", False, SLOW, ["waits"], [], answers=False),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
        lambda e: e.the_server_shuts_down(),
        lambda e: e.a_hook_ends(False),
    ],
    "what it answers after a look at its canceled token is no completion": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_looks_at_its_token(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
    ],
    "a child that was started in cleanup is interrupted": [
        begin(),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_passes_the_error_on(),
    ],
    "a child that was started before it was told is interrupted when it is": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_leaves_the_section_or_swallows_the_error(),
    ],
    "the same by a message": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_reads(),
        lambda e: e.it_reads(),
    ],
    "the same in a section within another": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.it_enters("protect"),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_leaves_the_section_or_swallows_the_error(),
    ],
    "a send that is refused in cleanup ends a child on trio": [
        begin(error=OSError("gone")),
        lambda e: e.the_server_shuts_down(),
        lambda e: e.it_starts_a_child(),
        lambda e: e.the_servers_receive_raises(),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_starts_its_response(200, False),
    ],
    "a deadline changes nothing about a hook that has failed for a client that has left": [
        begin("finish", hooks=["failed"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_sends_the_last_frame(False),
        lambda e: e.the_deadline_passes(),
    ],
    "the deadline ends a child that was only signaled": [
        begin("signal"),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_returns(),
        lambda e: e.the_client_leaves(),
        lambda e: e.the_deadline_passes(),
    ],
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_it_was_found_once(backend: str, found: str) -> None:
    replay(Events, backend, FOUND[found])
