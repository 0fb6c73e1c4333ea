"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import hangup
from hangup._lifecycle import TRANSITIONS, Event, Stage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def diagram() -> str:
    """The transition table as a state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Stage.WAITING.name}"]
    for stage, row in TRANSITIONS.items():
        for event in Event:
            if event in row:
                lines.append(f"    {stage.name} --> {row[event].name}: {event.name.lower()}")
    return "\n".join([*lines, f"    {Stage.ENDED.name} --> [*]"])


def test_the_diagram_is_the_table() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    [shown] = re.findall(r"```mermaid\n(.*?)\n```", page, re.DOTALL)
    assert shown == diagram(), f"docs/lifecycle.md should show:\n{diagram()}"


def test_every_public_name_is_in_the_documents() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in hangup.__all__ if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What a link into ``page`` may end with."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            there = page.parent / link if link else page
            assert there.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(there), f"{page.name} links to {link}#{anchor}"


def test_each_line_of_what_changes_has_its_test() -> None:
    page = (ROOT / "docs" / "what-changes.md").read_text()
    tests = (ROOT / "tests" / "test_what_changes.py").read_text()
    rows = re.findall(r"^\| ([^|\s].*?) \|", page, re.MULTILINE)
    assert len(rows) > 10
    names = {re.sub(r"\W+", "_", re.sub(r"[^\w ]", "", row)).lower() for row in rows}
    assert {name for name in names if f"def test_{name}(" not in tests} == set()


def test_the_samples_are_python() -> None:
    for page in PAGES:
        for sample in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(sample, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
