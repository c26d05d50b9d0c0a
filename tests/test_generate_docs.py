"""Generated parts of documents say what the code says, and a stale one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.guards import GUARDS
from lifecycle.phases import TABLE
from lifecycle.rules import RULES
from tools import generate_docs


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A document of its own, with empty generated parts."""
    path = tmp_path / "lifecycle.md"
    names = generate_docs.PARTS
    parts = [f"{generate_docs.begin(name)}\n{generate_docs.end(name)}\n" for name in names]
    path.write_text("Before.\n" + "Between.\n".join(parts) + "Behind.\n")
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(generate_docs, "DOCUMENT", path)
    return path


def test_the_committed_document_is_up_to_date() -> None:
    """The document in this repository says what the code says."""
    text = generate_docs.DOCUMENT.read_text()
    assert generate_docs.filled(text) == text


def test_check_refuses_a_stale_document_and_says_how_to_make_it_anew(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` fails, writes nothing, and names the command; without it the document is made."""
    stale = document.read_text()
    assert generate_docs.main(["--check"]) == 1
    assert generate_docs.COMMAND in capsys.readouterr().err
    assert document.read_text() == stale
    assert generate_docs.main([]) == 0
    assert document.read_text() != stale
    assert generate_docs.main(["--check"]) == 0


def test_prose_around_the_generated_parts_stays(document: Path) -> None:
    """Only what stands between the markers is replaced."""
    generate_docs.main([])
    text = document.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("Behind.\n")
    assert text.count("Between.\n") == len(generate_docs.PARTS) - 1


def test_a_missing_marker_is_an_error_that_names_it(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its markers a part cannot be placed."""
    document.write_text("Nothing here.\n")
    assert generate_docs.main([]) == 1
    assert generate_docs.begin("diagram") in capsys.readouterr().err


def test_every_phase_event_rule_and_guard_is_shown() -> None:
    """Diagram, table and rules leave nothing out."""
    diagram, table, rules = (make() for make in generate_docs.PARTS.values())
    for phase, row in TABLE.items():
        assert phase.name in diagram
        assert f"**{phase.name}**" in table
        for kind in row:
            assert f"`{kind.__name__}`" in table
    for rule in RULES.values():
        assert f"| `{rule.name}` | {rule.sentence} |" in rules
    for guard in (*GUARDS, *CROSS_GUARDS):
        assert f"`{guard.name.split('/')[1]}`" in rules
