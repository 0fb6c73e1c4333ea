"""The command line: ``hangup demo``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType
from typing import Final

#: Exit status when a command could not do its work. 1 is kept for "done, and something is not right".
CANNOT: Final = 2

_DEMO_NEEDS: Final = ("fastapi", "rich", "uvicorn")


class CannotRunError(Exception):
    """A command cannot do its work here. The text says why and what to do about it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names. Returns the exit status: 0, 1 (not right), 2 (cannot run), 130 (Ctrl-C)."""
    args = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return _run_demo(as_json=args.json)
    except CannotRunError as exc:
        print(f"hangup: {exc}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt:
        print("hangup: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hangup", description="What happens to the work when the client hangs up.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="hang up on a real server, without and with the middleware, and compare",
        description="Starts a FastAPI application on uvicorn twice, bare and with HangupMiddleware. Real sockets hang "
        "up on it in every phase. Exit status 1 if anything with the middleware is not as promised.",
    )
    demo.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _run_demo(*, as_json: bool) -> int:
    missing = [name for name in _DEMO_NEEDS if find_spec(name) is None]
    if missing:
        raise CannotRunError(f"the demo needs {', '.join(missing)}. Try: pip install 'hangup[demo]'")
    from ._demo.play import run  # not before: it needs what was looked for

    return run(as_json=as_json)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # so that every `finally` runs: no server and no file stays behind
