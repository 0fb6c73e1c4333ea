"""The machine, as plain functions and as a property-based state machine."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hangup import Cause, Outcome, Phase, State, StepRecord, _lifecycle
from hangup._lifecycle import TRANSITIONS, Event, Lifecycle, Stage


def test_a_response_in_one_piece_is_completed_and_delivered() -> None:
    life = Lifecycle()
    life.start(200)
    life.finish()
    assert life.judge(raised=False) is State.COMPLETED
    assert life.delivered
    assert life.phase is Phase.AFTER_RESPONSE


@pytest.mark.parametrize(("status", "state"), [(200, State.COMPLETED), (404, State.COMPLETED), (500, State.FAILED)])
def test_the_status_decides_between_completed_and_failed(status: int, state: State) -> None:
    life = Lifecycle()
    life.start(status)
    life.finish()
    assert life.judge(raised=False) is state


@pytest.mark.parametrize("started", [False, True])
def test_returning_without_the_last_frame_is_a_failure_for_a_live_client(started: bool) -> None:
    life = Lifecycle()
    if started:
        life.start(200)
    assert life.judge(raised=False) is State.FAILED


@pytest.mark.parametrize(
    ("started", "phase"), [(False, Phase.BEFORE_RESPONSE), (True, Phase.DURING_RESPONSE)], ids=["before", "during"]
)
def test_a_told_application_is_canceled_in_the_phase_the_cause_arrived(started: bool, phase: Phase) -> None:
    life = Lifecycle()
    if started:
        life.start(200)
    assert life.leave()
    assert life.stop(Cause.CLIENT_DISCONNECT)
    life.tell()
    assert life.judge(raised=True) is State.CANCELED
    assert life.phase is phase
    assert not life.delivered


def test_a_timeout_has_a_state_of_its_own() -> None:
    life = Lifecycle()
    assert life.stop(Cause.TIMEOUT)
    life.tell()
    assert life.judge(raised=False) is State.TIMED_OUT


def test_frames_after_being_told_are_no_completion() -> None:
    life = Lifecycle()
    life.leave()
    life.stop(Cause.CLIENT_DISCONNECT)
    life.tell()
    life.start(200)
    life.finish()
    assert life.judge(raised=False) is State.CANCELED
    assert life.status is None


def test_work_that_ended_before_it_was_told_is_completed_but_not_delivered() -> None:
    life = Lifecycle()
    life.leave()
    life.stop(Cause.CLIENT_DISCONNECT)
    life.start(200)
    life.finish()
    life.tell()
    assert life.judge(raised=False) is State.COMPLETED
    assert not life.delivered
    assert life.cause is Cause.CLIENT_DISCONNECT


def test_an_exception_the_cause_had_no_part_in_is_a_failure() -> None:
    life = Lifecycle()
    life.leave()
    life.stop(Cause.CLIENT_DISCONNECT)
    assert life.judge(raised=True) is State.FAILED


def test_a_failure_before_the_cause_stays_a_failure() -> None:
    life = Lifecycle()
    life.start(500)
    life.leave()
    life.stop(Cause.CLIENT_DISCONNECT)
    life.tell()
    assert life.judge(raised=True) is State.FAILED


def test_a_disconnect_after_the_last_frame_is_no_disconnect() -> None:
    life = Lifecycle()
    life.start(200)
    life.finish()
    assert not life.leave()
    assert not life.stop(Cause.CLIENT_DISCONNECT)
    assert not life.stop(Cause.TIMEOUT)
    life.tell()
    assert life.judge(raised=False) is State.COMPLETED
    assert life.cause is None


def test_a_background_task_can_be_stopped_by_request() -> None:
    life = Lifecycle()
    life.start(200)
    life.finish()
    assert life.stop(Cause.SERVER_SHUTDOWN)
    life.tell()
    assert life.judge(raised=False) is State.CANCELED
    assert life.phase is Phase.AFTER_RESPONSE
    assert life.delivered


def test_an_unresolved_effect_outranks_everything() -> None:
    life = Lifecycle()
    life.stop(Cause.TIMEOUT)
    life.tell()
    life.unresolved = True
    assert life.judge(raised=True) is State.AMBIGUOUS


def test_the_client_leaving_without_a_cause_is_policy_finish() -> None:
    life = Lifecycle()
    life.leave()
    life.start(200)
    life.finish()
    assert life.judge(raised=False) is State.COMPLETED
    assert life.cause is None
    assert not life.delivered


def test_work_that_was_to_finish_and_gave_up_was_canceled_by_the_client_that_left() -> None:
    life = Lifecycle()
    life.leave()
    assert life.judge(raised=False) is State.CANCELED
    assert life.cause is Cause.CLIENT_DISCONNECT


@pytest.mark.parametrize(
    ("cause", "interrupted", "raised", "state"),
    [
        (Cause.CLIENT_DISCONNECT, False, False, State.COMPLETED),
        (Cause.CLIENT_DISCONNECT, True, False, State.CANCELED),
        (Cause.CLIENT_DISCONNECT, False, True, State.CANCELED),
        (Cause.TIMEOUT, False, False, State.TIMED_OUT),
        (Cause.SERVER_SHUTDOWN, False, False, State.CANCELED),
    ],
)
def test_a_client_that_says_goodbye_has_ended_the_conversation(
    cause: Cause, interrupted: bool, raised: bool, state: State
) -> None:
    life = Lifecycle()
    life.start(101)
    life.leave()
    life.part()
    life.stop(cause)
    life.tell()
    if interrupted:
        life.interrupt()
    assert life.judge(raised=raised) is state
    assert life.delivered


def test_a_live_client_of_a_stopped_call_may_still_be_answered() -> None:
    life = Lifecycle()
    life.stop(Cause.REQUESTED)
    life.tell()
    life.start(503)
    life.finish()
    assert life.judge(raised=False) is State.CANCELED
    assert life.status == 503
    assert life.delivered


def test_the_table_knows_every_stage_and_leads_to_the_end() -> None:
    assert set(TRANSITIONS) == set(Stage)
    for stage, row in TRANSITIONS.items():
        assert stage not in row.values(), "an event that changes nothing is left out"
        if stage is not Stage.ENDED:
            assert row[Event.END] is Stage.ENDED
    assert not TRANSITIONS[Stage.ENDED]


def test_the_machine_imports_the_standard_library_only() -> None:
    tree = ast.parse(inspect.getsource(_lifecycle))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        else:
            continue
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names - {"asyncio", "threading"}


def test_an_outcome_names_the_steps_in_flight() -> None:
    steps = (
        StepRecord(name="done", state=State.COMPLETED, started=0, duration=1),
        StepRecord(name="cut", state=State.CANCELED, started=1, duration=1),
    )
    outcome = Outcome(state=State.CANCELED, steps=steps)
    assert outcome.in_flight == ("cut",)
    with pytest.raises(AttributeError):
        outcome.state = State.COMPLETED  # type: ignore[misc]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whichever order, nothing is illegal, the first cause stays, and there is one state."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle()
        self.first: Cause | None = None
        self.phase: Phase | None = None
        self.state: State | None = None
        self.finished_before_leaving = False

    @rule(status=st.sampled_from([200, 204, 404, 500, 503]))
    def start(self, status: int) -> None:
        self.life.start(status)

    @rule()
    def finish(self) -> None:
        self.life.finish()

    @rule()
    def leave(self) -> None:
        complete = self.life.finished
        new = self.life.leave()
        assert not (new and complete)

    @rule()
    def say_goodbye(self) -> None:
        if self.life.leave():
            self.life.part()

    @rule()
    def interrupt(self) -> None:
        self.life.interrupt()

    @rule(cause=st.sampled_from(Cause))
    def stop(self, cause: Cause) -> None:
        if self.life.stop(cause):
            assert self.first is None
            assert self.state is None
            self.first = cause

    @rule()
    def tell(self) -> None:
        self.life.tell()

    @rule()
    def undeliver(self) -> None:
        self.life.undeliver()

    @precondition(lambda self: self.state is None)
    @rule(raised=st.booleans())
    def judge(self, raised: bool) -> None:
        told = self.life.stage is Stage.TOLD
        failed, finished = self.life.failed, self.life.finished
        state = self.state = self.life.judge(raised=raised)
        goodbye = self.life.parted and not self.life.interrupted
        if state is State.CANCELED and self.first is None:
            self.first = Cause.CLIENT_DISCONNECT  # it was to finish, and gave up
        if failed:
            assert state is State.FAILED
        elif goodbye and not raised and self.first in {None, Cause.CLIENT_DISCONNECT}:
            assert state is State.COMPLETED
        elif told:
            assert state is (State.TIMED_OUT if self.first is Cause.TIMEOUT else State.CANCELED)
        elif raised:
            assert state is State.FAILED
        elif finished:
            assert state is State.COMPLETED
        else:
            assert state is not State.COMPLETED

    @invariant()
    def first_cause_stays(self) -> None:
        assert self.life.cause is self.first

    @invariant()
    def phase_stays_and_fits(self) -> None:
        if self.phase is not None:
            assert self.life.phase is self.phase
        self.phase = self.life.phase

    @invariant()
    def nothing_is_delivered_to_a_client_that_left_before(self) -> None:
        if self.life.delivered:
            assert self.life.finished or self.life.parted
            assert not self.life.left or self.life.parted

    @invariant()
    def the_end_is_the_end(self) -> None:
        assert (self.life.stage is Stage.ENDED) == (self.state is not None)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=12, deadline=None)


@given(st.lists(st.sampled_from(Event), max_size=20))
def test_no_order_of_events_leaves_the_table(events: list[Event]) -> None:
    stage = Stage.WAITING
    for event in [*events, Event.END]:
        stage = TRANSITIONS[stage].get(event, stage)
    assert stage is Stage.ENDED
