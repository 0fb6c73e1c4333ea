"""An agent run whose row is always closed. Start it: uvicorn run:app"""

import asyncio

from fastapi import FastAPI

from hangup import HangupMiddleware, Outcome, add_finalizer, step

app = FastAPI()
app.add_middleware(HangupMiddleware)  # last, so that it is outermost

rows: dict[str, str] = {}


@app.post("/runs/{run}")
async def agent(run: str) -> dict[str, str]:
    rows[run] = "running"

    @add_finalizer  # runs once, when the call has ended, however it ended
    async def close(outcome: Outcome) -> None:
        rows[run] = outcome.state

    with step("plan"):
        await asyncio.sleep(1)
    with step("call tool"):  # the client hangs up here: this is interrupted within a millisecond or two
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)  # and this runs to its end
    return {"run": "done"}
