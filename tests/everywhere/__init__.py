"""The matrix: the same hang-ups on every server and under every framework, judged by what the server process saw.

``python -m tests.everywhere`` plays it all and writes ``docs/servers.md`` and ``docs/frameworks.md``.
"""
