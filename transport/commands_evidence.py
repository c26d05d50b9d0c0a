"""The verbs that make evidence of a log: `slice`, `bundle`, and what judging costs.

Owns: where evidence is written, and the exit code of a check.
Must not know: what goes into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from lifecycle.wording import counted
from transport.commands_bench import bench_app
from transport.commands_forensics import From, Requests, expect_known, opened
from transport.commands_log import UnknownRequest
from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    Switch,
    UsageError,
    key_bytes,
    note,
    say,
    say_json,
)
from transport.progress import Reading, Waiting, on_terminal
from transport.replaying import taken

if TYPE_CHECKING:
    from lifecycle.forensics_slice import Slice
    from lifecycle.replay import Finding
    from transport.forensics_read import Capture

bundle_app = App(name="bundle", help="Put a log, its verdicts and their proof into one archive.")
SLICE_EVENTS_MAX = 20


def slice_log(
    log: Path,
    /,
    *,
    output: Path = Path("slices"),
    request: Requests = (),
    json: Json = False,
) -> int:
    """Write each violation as the fewest entries that show it when they are replayed alone.

    Parameters
    ----------
    log
        A folder of segments, one segment, JSON Lines or Parquet, also of another system;
        "-" reads JSON Lines from standard input.
    output
        The folder for the slices, a JSON Lines file each.
    request
        Only violations of this request; may be given several times.
    json
        Print JSON Lines, one slice a line.
    """
    from lifecycle.forensics_slice import smallest
    from lifecycle.ids import RequestId
    from lifecycle.replay import Replayer
    from transport.aside import DiskAside
    from transport.spool import Spool

    with opened(log) as capture:
        replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot, aside=DiskAside())
        entries = Spool()
        for one in capture.opening():
            entries.append(one)
        with Reading(capture, shown=not json):
            for position, entry, _ in taken(capture, replayer):
                entries.append((position, entry))
        for name in request:
            if name not in replayer.findings and replayer.state(RequestId(name)) is None:
                expect_known(name, tuple(replayer.names()))
        report = replayer.report(whole=capture.whole)
        wanted = [f for f in report.findings if not request or f.violation.request in request]
        failed = 0
        for number, finding in enumerate(wanted, start=1):
            doing = f"slicing violation {number} of {len(wanted)}"
            with Waiting(doing, shown=on_terminal() and not json):
                found = smallest(entries, finding, foreign=capture.foreign)
            failed += found is None
            _say_slice(finding, found, output, capture, json=json)
        if not json:
            say(
                f"{len(wanted) - failed} of {counted(len(wanted), 'violation')} sliced into "
                f"{output}"
            )
        if failed:
            return EXIT_FAILED
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


def _say_slice(
    finding: Finding, found: Slice | None, output: Path, capture: Capture, *, json: bool
) -> None:
    from engine.store import Stored
    from transport.jsonlines import write_jsonlines

    violation = finding.violation
    if found is None:
        note(f"position {finding.position}, {violation.rule}: nothing smaller shows it")
        return
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{finding.position:08d}-{violation.rule}.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        write_jsonlines(
            stream,
            [Stored(position, entry) for position, entry in found.entries],
            complete=True,
            source=capture.source,
            foreign=capture.foreign,
        )
    count = len(found.entries)
    if json:
        one = {
            "file": str(path),
            "position": finding.position,
            "request": violation.request,
            "rule": violation.rule,
            "guard": violation.guard,
            "entries": count,
        }
        say_json(one)
    else:
        say(f"{path}: {violation.rule} of {violation.request} in {counted(count, 'entry')}")
        if count > SLICE_EVENTS_MAX:
            note(f"{path}: {counted(count, 'entry')} are more than {SLICE_EVENTS_MAX}")


@bundle_app.default
def bundle(
    log: Path,
    /,
    *,
    output: Path = Path("bundle.zip"),
    request: Requests = (),
    first: From = None,
    to: int | None = None,
    sign: Path | None = None,
    clear: Switch = False,
    json: Json = False,
) -> int:
    """Put a log, its verdicts and their proof into one archive that others can check.

    Parameters
    ----------
    log
        A folder of segments, one segment, JSON Lines or Parquet, also of another system;
        "-" reads JSON Lines from standard input.
    output
        The archive.
    request
        Only entries of this request, and the fleet's; may be given several times.
    first
        Only entries from this position on, and the fleet's.
    to
        Only entries up to this position, and the fleet's.
    sign
        An Ed25519 private key (PEM) that signs the manifest.
    clear
        Leave tenants, reasons, messages and endpoints as they are in the log.
    json
        Print one JSON document.
    """
    from importlib.metadata import version as installed

    from transport import bundle as archive
    from transport.explain import NotInLog
    from transport.replay_text import missing_lines
    from transport.signature import NoSignature

    key = None if sign is None else key_bytes(sign, "--sign")
    with opened(log) as capture, Reading(capture, shown=not json) as reading:
        try:
            data = archive.make(
                capture,
                clear=clear,
                version=installed("kv-custody"),
                wanted=request,
                first=first or 1,
                last=to,
                key=key,
                told=reading.say,
            )
        except (NoSignature, archive.TooLarge) as error:
            raise UsageError(str(error)) from error
        except NotInLog as error:
            raise UnknownRequest(error.request, error.near) from error
        output.write_bytes(data)
        reading.stop()
        if json:
            written = {
                "output": str(output),
                "bytes": len(data),
                "signed": key is not None,
                "redacted": not clear,
                "complete": capture.whole,
            }
            say_json(written)
        else:
            say(
                f"{counted(len(data), 'byte')} written to "
                f"{output}{'' if key is None else ', signed'}"
            )
            if not clear:
                say(f"clear values are in its {archive.IDENTITIES}, which may be taken out")
        for line in () if capture.whole else missing_lines(capture):
            note(line)
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


@bundle_app.command
def verify(
    archive: Path,
    /,
    *,
    key: Annotated[Path | None, Parameter(name="--key")] = None,
    json: Json = False,
) -> int:
    """Check an archive's sums, signature and commitments, and find its verdicts anew.

    Parameters
    ----------
    archive
        The archive.
    key
        The Ed25519 public key (PEM) that it must be signed with.
    json
        Print one JSON document.
    """
    from lifecycle.forensics_values import Bounds
    from transport import bundle as archives
    from transport.forensics_text import bounds
    from transport.signature import NoSignature

    try:
        with Waiting(f"checking {archive}", shown=on_terminal() and not json):
            checked = archives.check(archive, key=None if key is None else key_bytes(key))
    except NoSignature as error:
        raise UsageError(str(error) if key is None else f"{key}: {error}") from error
    if json:
        say_json(
            {
                "intact": not checked.problems,
                "problems": list(checked.problems),
                "files": checked.files,
                "signed_by": checked.signed_by or None,
                "signature_checked": checked.signature_checked,
                "identities": checked.identities,
                "verdict": checked.verdict,
            }
        )
    else:
        for problem in checked.problems:
            say(problem)
        if checked.signed_by:
            whose = "the given key" if checked.signature_checked else "the key in the archive"
            say(f"signed by {whose}, fingerprint {checked.signed_by}")
        elif not checked.signature:
            say("not signed")
        if checked.verdict:
            affected = checked.verdict["affected"]
            say(
                f"affected answers: {bounds(Bounds(affected['least'], affected['most']))}; "
                f"requests with a violation: {checked.verdict['violations']}"
            )
            if not checked.verdict["complete"]:
                say("the log in it is incomplete: what is missing may hide more")
        say("intact" if not checked.problems else counted(len(checked.problems), "problem"))
    return EXIT_FAILED if checked.problems else EXIT_OK


@bench_app.command(name="forensics")
def bench_forensics(
    *,
    entries: int = 100_000,
    parquet: Switch = False,
    rows: int = 0,
    memory_limit: str | None = None,
    temporary: Path | None = None,
    json: Json = False,
) -> int:
    """Measure how fast a log is read, replayed under every rule, and asked who was exposed.

    Parameters
    ----------
    entries
        Entries of the synthetic log; a page event is one page named by one entry.
    parquet
        Measure the same log as Parquet too, which needs the extra `parquet`.
    rows
        Ask a longer table as well, which is made of the log again and again; a thousand
        entries take about six kilobytes of disk.
    memory_limit
        Memory that the database may use, such as 4GB.
    temporary
        Folder for the log, its tables and what does not fit into memory.
    json
        Print one JSON document.
    """
    from transport.bench_forensics import Wanted, measure

    if entries < 1:
        raise UsageError(f"--entries {entries}: at least one is needed")
    if rows < 0:
        raise UsageError(f"--rows {rows}: must not be negative")
    document = measure(Wanted(entries, parquet, rows, memory_limit, temporary))
    if json:
        say_json(document)
        return EXIT_OK
    say(
        f"{counted(document['entries'], 'entry')}, "
        f"{counted(document['page_events'], 'page event')}; an entry takes "
        f"{document['bytes_per_entry_hot']} bytes, sealed {document['bytes_per_entry_sealed']}"
    )
    for one in document["measured"]:
        say(
            f"{one['name']}: {one['entries_per_second']} entries/s, "
            f"{one['page_events_per_second']} page events/s, {one['cpu_seconds']} s of one core"
        )
    if "parquet" in document:
        say(f"as Parquet an entry takes {counted(document['bytes_per_entry_parquet'], 'byte')}")
    for one in document.get("parquet", ()):
        say(
            f"{one['name']}: {counted(one['entries'], 'entry')} in {one['wall_seconds']} s, "
            f"{one['cpu_seconds']} s of all cores"
        )
    say(f"peak memory {document['peak_memory_bytes'] / 2**20:.0f} MiB")
    return EXIT_OK
