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
    monkeypatch.setattr(generate_docs, "DOCUMENTS", {path: generate_docs.filled})
    return path


@pytest.mark.parametrize("path", generate_docs.DOCUMENTS, ids=lambda path: path.name)
def test_the_committed_documents_are_up_to_date(path: Path) -> None:
    """Each document in this repository says what the code says."""
    text = path.read_text()
    assert generate_docs.DOCUMENTS[path](text) == text


def test_a_document_that_is_generated_whole_is_made_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--check` refuses a missing document as it does a stale one; without it the page is made."""
    path = tmp_path / "cli-reference.md"
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(generate_docs, "DOCUMENTS", {path: generate_docs.reference})
    assert generate_docs.main(["--check"]) == 1
    assert not path.exists()
    assert generate_docs.main([]) == 0
    assert generate_docs.main(["--check"]) == 0


def test_one_stale_document_of_several_is_enough(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails wherever the stale document stands in the list."""
    fresh = document.with_name("fresh.md")
    fresh.write_text("x")
    makers = {document: generate_docs.filled, fresh: lambda text: text}
    for order in (makers, dict(reversed(makers.items()))):
        monkeypatch.setattr(generate_docs, "DOCUMENTS", order)
        assert generate_docs.main(["--check"]) == 1


def test_the_reference_has_every_verb_with_flags_variables_and_defaults() -> None:
    """A verb of a group stands under its group; a setting names its variable and its default."""
    page = generate_docs.reference()
    for verb in ("serve", "chat", "log tail", "config show", "completion", "bench serve"):
        assert f"# custody {verb}\n" in page
    assert "CUSTODY_KV_MEMORY" in page
    assert "50551" in page
    assert "supervised-by" not in page


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
