"""A log as a Perfetto trace: tracks of scheduler and engines, and flow arrows between them.

Owns: the part of Perfetto's TrackEvent schema that is written, and what becomes a track or a flow.
Must not know: which requests matter; every entry given is written.

The schema's field numbers are public and stable; the few that are needed are declared here, so
that no package of a trace viewer has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lifecycle.events import ByEngine, Entry, Finished, Transferred, Verified
from lifecycle.forensics_values import Exposures
from lifecycle.ids import FLEET
from transport.render import sentence

PACKAGE = "custody.perfetto"
SLICE_BEGIN, SLICE_END, INSTANT = 1, 2, 3
SEQUENCE = 1

_Field = descriptor_pb2.FieldDescriptorProto
_UINT64, _FIXED64, _INT32, _UINT32, _STRING = (
    *(_Field.TYPE_UINT64, _Field.TYPE_FIXED64, _Field.TYPE_INT32),
    *(_Field.TYPE_UINT32, _Field.TYPE_STRING),
)
# Message, field, number, type or message, repeated.
_SCHEMA: tuple[tuple[str, str, int, Any, bool], ...] = (
    ("Trace", "packet", 1, "TracePacket", True),
    ("TracePacket", "timestamp", 8, _UINT64, False),
    ("TracePacket", "trusted_packet_sequence_id", 10, _UINT32, False),
    ("TracePacket", "track_event", 11, "TrackEvent", False),
    ("TracePacket", "track_descriptor", 60, "TrackDescriptor", False),
    ("TrackEvent", "debug_annotations", 4, "DebugAnnotation", True),
    ("TrackEvent", "type", 9, _INT32, False),
    ("TrackEvent", "track_uuid", 11, _UINT64, False),
    ("TrackEvent", "categories", 22, _STRING, True),
    ("TrackEvent", "name", 23, _STRING, False),
    ("TrackEvent", "flow_ids", 47, _FIXED64, True),
    ("TrackEvent", "terminating_flow_ids", 48, _FIXED64, True),
    ("TrackDescriptor", "uuid", 1, _UINT64, False),
    ("TrackDescriptor", "name", 2, _STRING, False),
    ("TrackDescriptor", "parent_uuid", 5, _UINT64, False),
    ("DebugAnnotation", "string_value", 6, _STRING, False),
    ("DebugAnnotation", "name", 10, _STRING, False),
)


@cache
def trace_class() -> Any:
    """The message class of a trace."""
    file = descriptor_pb2.FileDescriptorProto(
        name="custody_perfetto.proto", package=PACKAGE, syntax="proto2"
    )
    messages = {
        name: file.message_type.add(name=name) for name in dict.fromkeys(r[0] for r in _SCHEMA)
    }
    for owner, name, number, kind, repeated in _SCHEMA:
        label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        field = messages[owner].field.add(name=name, number=number, label=label)
        if isinstance(kind, str):
            field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        else:
            field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Trace"))


class _Writer:
    """A trace that grows."""

    def __init__(self) -> None:
        self.trace = trace_class()()
        self._tracks: dict[tuple[str, str], int] = {}
        self.flows = 0

    def track(self, lane: str, request: str = "") -> int:
        """The track of a lane, or of one request in it."""
        known = self._tracks.get((lane, request))
        if known is not None:
            return known
        parent = self.track(lane) if request else 0
        uuid = self._tracks[lane, request] = len(self._tracks) + 1
        packet = self.trace.packet.add(trusted_packet_sequence_id=SEQUENCE)
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.name = request or lane
        if parent:
            packet.track_descriptor.parent_uuid = parent
        return uuid

    def event(self, time_ns: int, track: int, kind: int, name: str = "") -> Any:
        """A new track event."""
        packet = self.trace.packet.add(timestamp=time_ns, trusted_packet_sequence_id=SEQUENCE)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        return event

    def flow(self) -> int:
        """The number of a new arrow."""
        self.flows += 1
        return self.flows


def _lane(entry: Entry) -> str:
    by = entry.proposer
    return str(by.party) if isinstance(by, ByEngine) else "scheduler"


def perfetto(shown: Sequence[tuple[int, Entry]], found: Exposures) -> bytes:
    """The trace file of these entries; what was read wrongly is an arrow of its own."""
    writer = _Writer()
    spans: dict[tuple[str, str], list[int]] = {}
    for _, entry in shown:
        if entry.request != FLEET:
            span = spans.setdefault((_lane(entry), entry.request), [entry.time_ns, 0])
            span[1] = entry.time_ns
    for (lane, request), (start, _) in spans.items():
        writer.event(start, writer.track(lane, request), SLICE_BEGIN, request)
    starts, ends = _foreign(writer, found, {position for position, _ in shown})
    handed: dict[str, list[int]] = {}
    for position, entry in shown:
        lane, request = _lane(entry), "" if entry.request == FLEET else entry.request
        event = writer.event(
            entry.time_ns, writer.track(lane, request), INSTANT, type(entry.event).__name__
        )
        event.categories.append("custody")
        _annotate(event, (("position", str(position)), ("says", sentence(entry))))
        if isinstance(entry.event, Transferred):
            flow = writer.flow()
            handed.setdefault(request, []).append(flow)
            event.flow_ids.append(flow)
        elif isinstance(entry.event, Verified | Finished):
            event.terminating_flow_ids.extend(handed.pop(request, ()))
        event.flow_ids.extend(starts.get(position, ()))
        event.terminating_flow_ids.extend(ends.get(position, ()))
    for (lane, request), (_, stop) in spans.items():
        writer.event(stop, writer.track(lane, request), SLICE_END)
    data: bytes = writer.trace.SerializeToString()
    return data


def _foreign(
    writer: _Writer, found: Exposures, shown: set[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Arrows from a last write to the answer that was made from it, by positions."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for response in found.responses:
        written = {r.written_position for r in response.reads if r.written_position in shown}
        if response.position in shown:
            for position in sorted(written):
                flow = writer.flow()
                starts.setdefault(position, []).append(flow)
                ends.setdefault(response.position, []).append(flow)
    return starts, ends


def _annotate(event: Any, pairs: Iterable[tuple[str, str]]) -> None:
    for name, value in pairs:
        note = event.debug_annotations.add()
        note.name, note.string_value = name, value
