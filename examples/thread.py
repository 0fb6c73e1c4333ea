"""A `def` handler runs in a thread, which nothing can stop from outside. It can look. Start it: uvicorn thread:app"""

import time

from fastapi import FastAPI

from hangup import HangupMiddleware, current_call

app = FastAPI()
app.add_middleware(HangupMiddleware)


@app.get("/report")
def report() -> dict[str, int]:
    token = current_call().token
    pages = 0
    while pages < 100:
        token.raise_if_canceled()  # the client has left: the call ends as canceled
        time.sleep(0.1)
        pages += 1
    return {"pages": pages}
