#!/usr/bin/env python3
"""A stand-in for the CLI of a coding agent: it streams JSON until it is interrupted, and has a child of its own.

It speaks as much of the protocol as ``claude-agent-sdk`` needs, and does what such programs do when their user is gone:
a closed stdin does not stop it, and its child (a shell command, a language server) outlives it. It leaves a note of who
they are in the directory ``AGENT_PIDS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

stop = threading.Event()
session = str(uuid.uuid4())


def say(**message: Any) -> None:
    try:
        sys.stdout.write(json.dumps({"session_id": session, **message}) + "\n")
        sys.stdout.flush()
    except OSError:
        pass  # nobody reads: it works on


def answer(prompt: str) -> None:
    """Talk until interrupted, or for as many words as the prompt says, if it says a number."""
    words = int(prompt) if prompt.isdigit() else sys.maxsize
    say(type="system", subtype="init", claude_code_version="2.1.0")
    stream("message_start", message={"id": str(uuid.uuid4())})
    stream("content_block_start", index=0, content_block={"type": "text", "text": ""})
    said = 0
    while said < words and not stop.wait(0.02):
        said += 1
        stream("content_block_delta", index=0, delta={"type": "text_delta", "text": f"word {said} "})
    text = {"type": "text", "text": f"{said} words"}
    say(type="assistant", message={"role": "assistant", "model": "stand-in", "content": [text]})
    end = "error_during_execution" if stop.is_set() else "success"
    numbers = {"duration_ms": 1, "duration_api_ms": 1, "num_turns": 1, "total_cost_usd": 0.0}
    say(type="result", subtype=end, is_error=False, result=f"{said} words", **numbers)


def stream(kind: str, **event: Any) -> None:
    say(type="stream_event", uuid=str(uuid.uuid4()), event={"type": kind, **event})


def main() -> None:
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    note = Path(os.environ["AGENT_PIDS"]) / str(os.getpid())
    note.with_suffix(".new").write_text(json.dumps([os.getpid(), child.pid]))
    note.with_suffix(".new").rename(note)
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "user":
            stop.clear()
            threading.Thread(target=answer, args=(message["message"]["content"],)).start()
        elif message["type"] == "control_request":
            if message["request"]["subtype"] == "interrupt":
                note.with_suffix(".interrupted").touch()
                stop.set()
            response = {"subtype": "success", "request_id": message["request_id"], "response": {}}
            say(type="control_response", response=response)
    threading.Event().wait()  # stdin is closed: so what


if __name__ == "__main__":
    main()
