"""A chat bot on the Claude Agent SDK: every answer is streamed by a process. Start it: python bot.py [port]

``POST /ask`` uses ``claude-agent-sdk`` itself, ``POST /agui`` its AG-UI adapter, ``ag-ui-claude-sdk``, which keeps one
session, and so one process, for each thread. Browsers leave in the middle of an answer: somebody presses stop, reloads
the page, or the server goes down. ``BARE=1`` serves the same as one writes it first.

Nothing of the SDKs is patched or replaced.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import uvicorn
from ag_ui.core import RunAgentInput
from ag_ui.encoder import EventEncoder
from ag_ui_claude_sdk import ClaudeAgentAdapter, add_claude_fastapi_endpoint
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient
from claude_agent_sdk.types import StreamEvent
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from hangup import HangupMiddleware, add_finalizer, step

HERE = Path(__file__).parent

#: Seconds in which a session has ended, whatever its processes think of it: what the cleanup of a call may take.
BOUND = 8.0
#: Seconds that the CLI may take to obey an interrupt, before it is ended all the same.
INTERRUPT = 1.0


def words(message: object) -> str | None:
    if isinstance(message, StreamEvent) and message.event["type"] == "content_block_delta":
        return f"data: {message.event['delta']['text']}\n\n"
    return None


def bare_app() -> FastAPI:
    """As one writes it first. The AG-UI endpoint is the SDK's own."""
    options = ClaudeAgentOptions(cli_path=HERE / "cli.py", include_partial_messages=True)
    app = FastAPI()
    add_claude_fastapi_endpoint(app, ClaudeAgentAdapter("bot", options), "/agui")

    @app.post("/ask")
    async def ask(request: Request) -> StreamingResponse:
        prompt = (await request.body()).decode()

        async def answer() -> AsyncIterator[str]:
            async with ClaudeSDKClient(options) as client:
                await client.query(prompt)
                async for message in client.receive_response():
                    if text := words(message):
                        yield text

        return StreamingResponse(answer(), media_type="text/event-stream")

    return app


def mended_app() -> FastAPI:
    """With hangup: a session that nobody listens to is interrupted, disconnected, stopped and reaped."""
    options = ClaudeAgentOptions(
        cli_path=HERE / "leash.py", env={"AGENT_CLI": str(HERE / "cli.py")}, include_partial_messages=True
    )
    adapter = ClaudeAgentAdapter("bot", options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await adapter.shutdown()  # the sessions of answers that were finished

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(HangupMiddleware, finalizer_timeout=BOUND, finalizer_budget=2 * BOUND)

    @app.post("/ask")
    async def ask(request: Request) -> StreamingResponse:
        prompt = (await request.body()).decode()

        async def answer() -> AsyncIterator[str]:
            client = ClaudeSDKClient(options)
            add_finalizer(client.disconnect)
            await client.connect()
            async with step("agent turn", cancel=lambda: interrupt(client)):
                await client.query(prompt)
                async for message in client.receive_response():
                    if text := words(message):
                        yield text

        return StreamingResponse(answer(), media_type="text/event-stream")

    # Semaphores, for a generator may be closed by another task than it ran in, and locks mind.
    threads: defaultdict[str, anyio.Semaphore] = defaultdict(lambda: anyio.Semaphore(1))

    @app.post("/agui")
    async def agui(run: RunAgentInput, request: Request) -> StreamingResponse:
        encoder = EventEncoder(accept=request.headers.get("accept", ""))

        async def answer() -> AsyncIterator[str]:
            started = False

            async def end_session() -> None:
                # The adapter takes an interrupt of a thread it does not know for one of all threads.
                with anyio.move_on_after(INTERRUPT if started else 0):
                    await adapter.interrupt(run.thread_id)
                await adapter.clear_session(run.thread_id)

            # The adapter gives a thread free before its session has ended: a reloaded page waits here.
            async with threads[run.thread_id]:
                async with step("agent run", cancel=end_session), aclosing(adapter.run(run)) as events:
                    async for event in events:
                        started = True
                        yield encoder.encode(event)

        return StreamingResponse(answer(), media_type=encoder.get_content_type())

    return app


async def interrupt(client: ClaudeSDKClient) -> None:
    """Ask the CLI to stop. One that does not is ended by the disconnect that follows."""
    with anyio.move_on_after(INTERRUPT):
        await client.interrupt()


if __name__ == "__main__":
    app = bare_app() if os.environ.get("BARE") else mended_app()
    with socket.create_server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])
