from __future__ import annotations

import anyio
import pytest
from hangup import Cause, HangupMiddleware, State, add_finalizer, current_call, step, Phase
from hangup.testing import Peer

pytestmark = pytest.mark.anyio


async def test_finally_await_completes(outcomes, on_trio):
    log = []

    async def app(scope, receive, send):
        call = current_call()
        assert scope["extensions"]["hangup"] is call
        add_finalizer(lambda o: log.append(o.state))
        try:
            with step("work"):
                await anyio.sleep(3600)
        finally:
            log.append("cleanup began")
            if not on_trio:
                await anyio.sleep(0.01)
                log.append("cleanup ended")

    peer = Peer()
    async with peer.calling(HangupMiddleware(app, observers=[outcomes.append])):
        await peer.wait_for(lambda: peer.reading)
        peer.hang_up()
    assert peer.error is None
    [outcome] = outcomes
    assert outcome.state is State.CANCELED
    assert outcome.cause is Cause.CLIENT_DISCONNECT
    assert outcome.phase is Phase.BEFORE_RESPONSE
    assert outcome.in_flight == ("work",)
    assert log[-1] is State.CANCELED
    assert [m["type"] for m in peer.late] == ["http.response.start", "http.response.body"]
    if not on_trio:
        assert "cleanup ended" in log
