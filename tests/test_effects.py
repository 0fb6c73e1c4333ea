"""Effects and ambiguity, `before_success`, child processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from hangup import (
    AmbiguousOutcome,
    Canceled,
    Cause,
    HangupMiddleware,
    HookFailure,
    Outcome,
    State,
    Step,
    add_finalizer,
    before_success,
    current_call,
    step,
)
from hangup.testing import Peer

from .helpers import END, START, Watch, answer, chunk, types, until, watched

pytestmark = pytest.mark.anyio


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


async def leave(app: Any, **options: Any) -> Outcome:
    peer = Peer()
    watch = Watch(app, **options)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    return watch.outcome


# ---------------------------------------------------------------------- effects


@pytest.mark.parametrize("form", ["with", "async with", "decorator", "left open"])
async def test_cancel_is_awaited_exactly_once_and_before_the_state_is_written(form: str) -> None:
    log: list[str] = []

    async def tell_upstream() -> None:
        await anyio.sleep(0.01)
        log.append("upstream told")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda outcome: log.append(str(outcome.state)))
        if form == "with":
            with step("ask", cancel=tell_upstream, effect=True):
                await anyio.sleep(60)
        elif form == "async with":
            async with step("ask", cancel=tell_upstream, effect=True):
                await anyio.sleep(60)
        elif form == "decorator":
            await step("ask", cancel=tell_upstream, effect=True)(anyio.sleep)(60)
        else:
            step("ask", cancel=tell_upstream, effect=True).__enter__()
            await anyio.sleep(60)

    outcome = await leave(app)
    assert log == ["upstream told", "canceled"]
    assert outcome.state is State.CANCELED
    assert [(s.name, s.state, s.effect) for s in outcome.steps] == [("ask", State.CANCELED, True)]
    assert outcome.retry_safe


async def test_an_effect_in_flight_is_ambiguous() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("charge the card", effect=True):
            await anyio.sleep(60)

    outcome = await leave(app)
    assert outcome.state is State.AMBIGUOUS
    assert outcome.in_flight == ("charge the card",)
    assert not outcome.retry_safe


async def test_a_completed_effect_is_no_reason_for_ambiguity_and_one_against_a_retry() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("charge the card", effect=True):
            pass
        await anyio.sleep(60)

    outcome = await leave(app)
    assert outcome.state is State.CANCELED
    assert not outcome.retry_safe


@pytest.mark.parametrize("when", ["inside", "after"])
async def test_confirm_resolves_an_effect(when: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        charge = step("charge the card", effect=True)
        try:
            with charge:
                if when == "inside":
                    charge.confirm()
                await anyio.sleep(60)
        finally:
            if when == "after":
                assert charge.state is State.AMBIGUOUS
                charge.confirm()
                charge.confirm()

    outcome = await leave(app)
    assert outcome.state is State.CANCELED
    assert [s.state for s in outcome.steps] == [State.CANCELED]


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_cancel_that_fails_makes_the_step_ambiguous(how: str, caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []

    async def tell_upstream() -> None:
        called.append(1)
        if how == "raises":
            raise ConnectionError("worker gone")
        await anyio.sleep(60)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with step("ask", cancel=tell_upstream):
            await anyio.sleep(60)

    outcome = await leave(app, finalizer_timeout=0.05)
    assert called == [1]
    assert outcome.state is State.AMBIGUOUS
    assert len(errors(caplog)) == 1
    assert "what became of the step is ambiguous" in errors(caplog)[0]


async def test_cancel_is_not_called_for_a_step_that_ended_otherwise() -> None:
    called: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("fine", cancel=lambda: called.append(1)):
            pass
        with pytest.raises(ValueError, match="own"), step("fails", cancel=lambda: called.append(2), effect=True):
            raise ValueError("own")
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert called == []
    assert [s.state for s in watch.outcome.steps] == [State.COMPLETED, State.FAILED]
    assert watch.outcome.state is State.COMPLETED


async def test_ambiguous_outcome_can_be_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("ask"):
            raise AmbiguousOutcome("the link was lost after submit")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert watch.outcome.state is State.AMBIGUOUS
    assert [s.state for s in watch.outcome.steps] == [State.AMBIGUOUS]
    assert isinstance(peer.error, AmbiguousOutcome)


async def test_an_effect_in_a_thread_that_ran_on_and_succeeded_is_completed() -> None:
    gone = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def work() -> None:
            with current_call().step("charge", effect=True):
                assert gone.wait(5)

        await anyio.to_thread.run_sync(work)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.reading == 0)
        gone.set()
    assert watch.outcome.state is State.COMPLETED
    assert not watch.outcome.delivered


async def test_what_a_finalizer_confirms_comes_too_late() -> None:
    charges: list[Step] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: charges[0].confirm())
        async with step("charge", effect=True) as charge:
            charges.append(charge)
            await anyio.sleep(60)

    outcome = await leave(app)
    assert outcome.state is State.AMBIGUOUS
    assert [s.state for s in outcome.steps] == [charges[0].state] == [State.AMBIGUOUS]


async def test_a_lost_effect_in_a_task_group_is_ambiguous_although_somebody_handles_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def submit() -> None:
            raise AmbiguousOutcome("the link was lost after submit")

        try:
            async with step("ask"), anyio.create_task_group() as tasks:
                tasks.start_soon(submit)
        except ExceptionGroup:
            await answer(send, 502)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert watch.outcome.state is State.AMBIGUOUS
    assert [s.state for s in watch.outcome.steps] == [State.AMBIGUOUS]


@pytest.mark.parametrize(("more", "state"), [([], State.CANCELED), ([ValueError()], State.FAILED)])
async def test_a_step_left_by_a_group_is_canceled_if_that_is_nothing_else(more: list[Exception], state: State) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ExceptionGroup), step("ask"):
            raise ExceptionGroup("of a task group", [Canceled(Cause.REQUESTED), *more])
        await answer(send)

    watch = Watch(app)
    await Peer().run(watch)
    assert [s.state for s in watch.outcome.steps] == [state]


async def test_a_step_whose_effect_could_not_be_noted_is_left_too() -> None:
    told: list[str] = []

    class Mark:
        def leave(self) -> None:
            told.append("left")

        def end(self, step: Step, error: BaseException | None) -> None:
            told.append(f"{step.state}: {error}")

    async def guard() -> None:
        raise ConnectionError("no journal")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        call.hooks = replace(call.hooks, step_started=lambda step: Mark())
        call.effect_guards.append(guard)
        with pytest.raises(ConnectionError):
            async with step("charge", effect=True):
                told.append("begun")
        await answer(send)

    await Peer().run(Watch(app))
    assert told == ["left", "failed: no journal"]


async def test_a_cancel_that_has_no_event_loop_to_run_on_masks_nothing(
    on_trio: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with step("ask", cancel=anyio.lowlevel.checkpoint):
            raise Canceled(Cause.REQUESTED)

    with pytest.raises(Canceled):
        await anyio.to_thread.run_sync(work)
    if not on_trio:
        with pytest.raises(Canceled):
            await asyncio.to_thread(work)
    assert set(errors(caplog)) == {"cancel= of step 'ask' cannot run here: what became of the step is ambiguous"}


async def test_a_step_with_cancel_outside_a_call_runs_it_too() -> None:
    called: list[int] = []

    async def cancel() -> None:
        called.append(1)

    with anyio.move_on_after(0.01):
        async with step("ask", cancel=cancel):
            await anyio.sleep(60)
    assert called == [1]
    with pytest.raises(TypeError, match=r"step\(cancel=\)"):
        step("x", cancel=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- before_success


@pytest.fixture
def outcomes() -> list[Outcome]:
    return []


async def test_hooks_run_before_the_client_can_see_success() -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            log.append(("first", types(peer.sent)))

        before_success(lambda: log.append(("second", types(peer.sent))))
        await answer(send, body=b"hello")
        log.append("sent")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert log == [("first", []), ("second", []), "sent"]
    assert (peer.status, peer.body, peer.complete) == (200, b"hello", True)
    assert watch.outcome.state is State.COMPLETED


async def test_for_a_stream_only_the_last_frame_is_held() -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: log.append((peer.body, peer.complete)))
        await send(START)
        await send(chunk(b"a"))
        assert peer.body == b"a"
        await send(chunk(b"b"))
        await send(END)

    peer = Peer()
    await peer.run(Watch(app))
    assert peer.error is None
    assert log == [(b"ab", False)]
    assert peer.complete


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_an_answer_that_is_no_success_runs_no_hook(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0)
        await answer(send, status)

    peer = Peer()
    await peer.run(Watch(app))
    assert peer.status == status
    assert peer.error is None


@pytest.mark.parametrize(
    ("accept", "kind", "body"),
    [
        ("*/*", b"text/plain; charset=utf-8", b"Internal Server Error"),
        ("application/json", b"application/json", b'{"detail": "Internal Server Error"}'),
    ],
)
@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_hook_that_fails_is_a_500_and_never_a_phantom_success(
    how: str, accept: str, kind: bytes, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def write_row() -> None:
            if how == "raises":
                raise ConnectionError("secret: the database at 10.0.0.1")
            await anyio.sleep(60)

        before_success(write_row)
        before_success(lambda: log.append("the next hook"))
        await answer(send, body=b"saved")
        log.append("background")

    peer = Peer(headers=[("Accept", accept)])
    watch = Watch(app, finalizer_timeout=0.05)
    await peer.run(watch)
    assert (peer.status, peer.body, peer.complete) == (500, body, True)
    assert dict(peer.sent[0]["headers"])[b"content-type"] == kind
    assert log == []
    assert peer.error is None
    assert watch.outcome.state is State.FAILED
    assert isinstance(watch.outcome.error, ConnectionError if how == "raises" else TimeoutError)
    assert watch.outcome.status_code == 500
    assert errors(caplog) == ["before_success hook write_row of GET '/' failed: the client is not told of success"]


async def test_the_answer_of_a_failed_hook_is_not_taken_for_a_client_that_left() -> None:
    """Servers say disconnect once a response is complete. This one is, though the application's own never was."""
    peer = Peer()
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0)
        await receive()
        await peer.wait_for(lambda: peer.reading)  # the watcher
        try:
            await answer(send)
        finally:
            heard.append((await receive())["type"])

    watch = Watch(app)
    await peer.run(watch)
    assert peer.status == 500
    assert heard == ["http.disconnect"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.FAILED, None)


@pytest.mark.parametrize("policy", ["finish", "signal"])
@pytest.mark.parametrize("status", [200, 500])
async def test_a_status_that_hooks_held_back_counts_although_the_client_left(policy: str, status: int) -> None:
    peer = Peer()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: None)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await watched(peer)
        peer.hang_up()
        call = current_call()
        await until(lambda: call.life.left)
        await send(END)

    watch = Watch(app, policy=policy)
    await peer.run(watch)
    assert watch.outcome.state is (State.COMPLETED if status == 200 else State.FAILED)
    assert watch.outcome.status_code == status
    assert not watch.outcome.delivered


async def test_a_hook_chooses_what_the_client_is_told() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            raise HookFailure("try again", status=503, headers={"Retry-After": "5"})

        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert (peer.status, peer.body) == (503, b"try again")
    assert dict(peer.sent[0]["headers"])[b"retry-after"] == b"5"
    assert watch.outcome.state is State.FAILED


async def test_a_stream_whose_hook_fails_is_cut_without_a_clean_end() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0)
        await send(START)
        await send(chunk(b"a"))
        await send(END)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.body == b"a"
    assert not peer.complete
    assert peer.error is None
    assert watch.outcome.state is State.FAILED


async def test_starlette_does_not_answer_on_top_of_a_failed_hook(outcomes: list[Outcome]) -> None:
    ran: list[str] = []

    async def save(request: Request) -> Response:
        before_success(lambda: 1 / 0)
        return JSONResponse({}, background=BackgroundTask(ran.append, "background"))

    app = Starlette(routes=[Route("/", save)], middleware=[Middleware(HangupMiddleware, observers=[outcomes.append])])
    peer = Peer()
    await peer.run(app)
    assert peer.status == 500
    assert peer.complete
    assert peer.error is None
    assert ran == []
    assert [o.state for o in outcomes] == [State.FAILED]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_disconnect_or_deadline_while_hooks_run_does_not_change_what_they_decide(fails: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            peer.hang_up()
            await until(lambda: current_call().life.left)
            await anyio.sleep(0.03)
            if fails:
                raise ValueError

        await watched(peer)
        await answer(send)

    peer = Peer()
    watch = Watch(app, timeout=0.15)
    async with peer.calling(watch):
        pass
    assert watch.outcome.state is (State.FAILED if fails else State.COMPLETED)
    assert not watch.outcome.delivered
    assert peer.sent == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "http.response.start", "status": 204, "headers": []}, END],
        [START, {"type": "http.response.pathsend", "path": "/x"}],
        [
            {**START, "trailers": True},
            {"type": "http.response.body", "body": b"x"},
            {"type": "http.response.trailers", "headers": []},
        ],
    ],
    ids=["204", "pathsend", "trailers"],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_every_way_to_end_a_response_is_held(messages: list[Message], fails: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0 if fails else None)
        for message in messages:
            await send(message)

    sent: list[Message] = []

    async def take(message: Message) -> None:
        sent.append(message)

    watch = Watch(app)
    await watch(Peer().scope, Peer().receive, take)
    if not fails:
        assert sent == messages
    else:
        assert messages[-1] not in sent
        assert watch.outcome.state is State.FAILED


async def test_misuse_of_hooks_is_named() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(TypeError, match="before_success"):
            before_success(1)  # type: ignore[type-var]
        with pytest.raises(
            TypeError, match=r"before_success\(\) takes a function without arguments, not .* requires 1"
        ):
            before_success(lambda outcome: None)
        await answer(send)
        with pytest.raises(RuntimeError, match="too late, the response is complete"):
            before_success(lambda: None)

    peer = Peer()
    await peer.run(Watch(app))
    assert peer.error is None
    with pytest.raises(ValueError, match="400 to 599"):
        HookFailure(status=200)
    wrong: Any
    for wrong in ("503", 503.0, True):
        with pytest.raises(TypeError, match=r"HookFailure\(status=\) takes a number, 400 to 599"):
            HookFailure(status=wrong)
    for wrong in (503, None, b"no"):
        with pytest.raises(TypeError, match=r"takes a text for the client, .* the status is status="):
            HookFailure(wrong)
    for wrong in ("Retry-After", [("Retry-After", "5")], {b"a": "b"}, {"a": None}):
        with pytest.raises(TypeError, match=r"HookFailure\(headers=\) takes texts by name"):
            HookFailure(headers=wrong)


# ---------------------------------------------------------------------- child processes

# A CLI that spawns a grandchild, ignores SIGTERM and a closed stdin, and says who they are: on stdout, or in a file.
DEAF = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
text = json.dumps([os.getpid(), child.pid])
if len(sys.argv) > 1:
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(text)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
else:
    print(text, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STDIN_WAIT", "TERM_WAIT"):
        monkeypatch.setattr(f"hangup._process.{name}", 0.1)


async def test_a_deaf_process_and_its_child_end_with_the_call(quick: None) -> None:
    pids: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        process = await current_call().open_process([sys.executable, "-c", DEAF])
        assert process.stdout is not None
        pids.extend(json.loads(await process.stdout.receive()))
        assert all(alive(pid) for pid in pids)
        assert os.getpgid(pids[0]) != os.getpgrp()
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reading)
        await until(lambda: pids, timeout=10)
        peer.hang_up()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert [f.state for f in watch.outcome.finalizers] == [State.COMPLETED]


async def test_run_process_gives_the_output_and_ends_the_group_when_interrupted(quick: None, tmp_path: Path) -> None:
    said = tmp_path / "pids"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        done = await call.run_process([sys.executable, "-c", "print(input()[::-1])"], input=b"hello\n")
        assert done.stdout.strip() == b"olleh"
        assert done.returncode == 0
        failed = await call.run_process([sys.executable, "-c", "raise SystemExit(3)"], check=False)
        assert failed.returncode == 3
        with pytest.raises(CalledProcessError, match="returned non-zero exit status 3"):
            await call.run_process([sys.executable, "-c", "raise SystemExit(3)"])
        await call.run_process([sys.executable, "-c", DEAF, str(said)])

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: peer.ended or said.exists(), timeout=10)
        peer.hang_up()
    assert peer.error is None
    assert not any(alive(pid) for pid in json.loads(said.read_text()))
    assert watch.outcome.state is State.CANCELED


async def test_a_process_may_leave_its_input_unread() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        much = b"x" * 1_000_000
        done = await call.run_process([sys.executable, "-c", "print('done')"], input=much)
        assert done.stdout.strip() == b"done"
        done = await call.run_process([sys.executable, "-c", "import os; os.close(0); print(len('done'))"], input=much)
        assert done.stdout.strip() == b"4"
        with pytest.raises(TypeError, match=r"run_process\(input=\) takes bytes, not 'x'"):
            await call.run_process([sys.executable, "-c", ""], input="x")
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert watch.outcome.finalizers == (), "what has ended is not ended again: its number may be somebody else's"


async def test_processes_are_killed_although_the_time_of_their_finalizers_is_over(tmp_path: Path) -> None:
    said = [tmp_path / name for name in "ab"]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for path in said:
            await current_call().open_process([sys.executable, "-c", DEAF, str(path)])
        await until(lambda: all(path.exists() for path in said), timeout=10)
        await answer(send)

    peer = Peer()
    watch = Watch(app, finalizer_budget=0.05)
    await peer.run(watch)
    assert peer.error is None
    assert [(f.name, f.state) for f in watch.outcome.finalizers] == [("process", State.TIMED_OUT)] * 2
    pids = [pid for path in said for pid in json.loads(path.read_text())]
    assert len(pids) == 4
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_a_process_whose_output_nobody_reads_leaves_no_pipe_behind(quick: None) -> None:
    def pipes() -> int:
        # The list has a descriptor of its own, which is none any more.
        found = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(path.is_symlink() and os.readlink(path).startswith(("pipe:", "socket:")) for path in found)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        talk = "import sys; sys.stdout.write('x' * 1_000_000)"
        if talking:
            for _ in range(4):
                await current_call().open_process([sys.executable, "-c", talk])
        else:
            await current_call().run_process(["true"])
        await answer(send)

    talking = False  # what a loop opens for its first process it keeps
    await Peer().run(Watch(app))
    before, talking = pipes(), True
    await Peer().run(Watch(app))
    await until(lambda: pipes() <= before)


#: Takes in orphans, as the first process of a container does, and shows the children it is left with.
FIRST_OF_A_CONTAINER = """
import ctypes, os, pathlib, sys
import anyio
from hangup import HangupMiddleware, current_call
from hangup.testing import Peer

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"

async def app(scope, receive, send):
    process = await current_call().open_process([sys.executable, "-c", leave])
    await process.wait()

async def main():
    await Peer().run(HangupMiddleware(app))
    print(pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others have no subreapers")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_orphans_that_come_to_us_are_reaped(backend: str) -> None:
    command = [sys.executable, "-c", FIRST_OF_A_CONTAINER, backend]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


async def test_a_process_that_cannot_be_started_is_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(OSError, match="No such file"):
            await current_call().open_process(["no-such-program"])
        wrong: Any
        for wrong in ([], "", 3, None):
            with pytest.raises(TypeError, match=r"take a command, .* not"):
                await current_call().open_process(wrong)
            with pytest.raises(TypeError, match=r"take a command, .* not"):
                await current_call().run_process(wrong)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert watch.outcome.finalizers == ()


async def test_a_process_that_ended_by_itself_is_left_alone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        process = await current_call().open_process([sys.executable, "-c", "pass"], stdin=None)
        assert await process.wait() == 0
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert [f.state for f in watch.outcome.finalizers] == [State.COMPLETED]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
@pytest.mark.parametrize("ended", [False, True])
async def test_who_has_got_the_number_of_a_process_that_was_waited_for_is_left_alone(
    ended: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "input(); raise SystemExit(3)"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert other.stdin is not None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        process = await current_call().open_process([sys.executable, "-c", "pass"])
        await process.wait()
        monkeypatch.setattr(type(process), "pid", other.pid)
        await answer(send)

    with other:
        if ended:
            other.stdin.write(b"\n")
            other.stdin.flush()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch = Watch(app)
        await Peer().run(watch)
        other.communicate(b"\n")
    assert other.returncode == 3
    assert [f.state for f in watch.outcome.finalizers] == [State.COMPLETED]


async def test_a_step_left_by_raise_if_canceled_in_a_thread_is_canceled() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def work() -> None:
            token = current_call().token
            with current_call().step("crunch"):
                assert token.wait_sync(5)
                token.raise_if_canceled()

        await anyio.to_thread.run_sync(work)

    outcome = await leave(app)
    assert outcome.state is State.CANCELED
    assert [(step.name, step.state) for step in outcome.steps] == [("crunch", State.CANCELED)]
