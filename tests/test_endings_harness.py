"""Claims about the harness: it sees what is wrong, its page is what its results say, and the product
has no way to it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import grpc
import pytest

from lifecycle.events import Aborted, Admitted, Cause, Event, Finished, FinishReason, Leg
from lifecycle.ids import EngineId
from tests.faults import page
from tests.faults.asking import Asking, Told
from tests.faults.cell import all_cells
from tests.faults.kept import keep, load
from tests.faults.load import Load, Shape
from tests.faults.moments import MOMENTS
from tests.faults.relay import Relay
from tests.faults.table import FAULTS, PLANES, why_impossible
from tools import house
from transport.client import Refused, Unreachable
from transport.pb import generation_pb2
from transport.pb.generation_pb2 import GenerateRequest, GenerateResponse

ROOT = Path(__file__).resolve().parent.parent
TOKENS = (5, 6, 7)


# --- what is told, and what the log says ----------------------------------------------------------


def admitted(new_tokens: int = 3) -> Admitted:
    """An admission of so many new tokens."""
    leg = Leg(EngineId("e"), 1, 1, 4, 1, 1, 8, 8, "layout")
    return Admitted(4, b"", new_tokens, 64, leg, leg, "t", 1, 1, 4, 0)


def finished(tokens: int = 3) -> Finished:
    """An end by itself after so many tokens."""
    return Finished(FinishReason.LENGTH, tokens, 1, b"", 1, 1, 0)


def aborted(cause: Cause) -> Aborted:
    """An end for a cause."""
    return Aborted(cause, "somebody")


def told(tokens: tuple[int, ...] = TOKENS, **changes: object) -> Told:
    """A whole answer, unless changed."""
    return attrs.evolve(Told(tokens, None, whole=True, left=False), **changes)  # type: ignore[arg-type]


def refused(code: str, reason: str) -> Refused:
    """A status with a reason."""
    return Refused(code=code, reason=reason, message="", numbers={})


@pytest.mark.parametrize(
    ("known", "events"),
    [
        (told(), [admitted(), finished()]),
        # Two of three tokens came of an earlier attempt.
        (told(), [admitted(), admitted(1), finished(1)]),
        (told((5,), error=refused("UNAVAILABLE", "ENGINE_LOST")), [aborted(Cause.ENGINE_LOST)]),
        (told((5, 6), error=Unreachable("", "")), []),
        (told((), error=refused("CANCELLED", "CANCELLED"), left=True), []),
        (told((5,), error=refused("UNAVAILABLE", "LOG_UNAVAILABLE")), []),
    ],
)
def test_the_truth_is_not_doubted(known: Told, events: list[Event]) -> None:
    """An answer that the log bears out raises no doubt."""
    assert known.doubts(events, TOKENS) == []


@pytest.mark.parametrize(
    ("known", "events", "said"),
    [
        (told(), [admitted()], "success, and the log says None"),
        (told(), [admitted(), aborted(Cause.ENGINE_LOST)], "success, and the log says Aborted"),
        (told(), [admitted(), finished(2)], "3 tokens, the log counts 2"),
        (told((5, 6)), [admitted(2), finished(2)], "2 tokens, the log counts 2"),
        (told((5, 9, 7)), [admitted(), finished()], "other tokens than alone"),
        (told((9,), error=Unreachable("", "")), [], "other tokens than alone"),
        (told((5,), whole=False), [], "no answer"),
        (told((), error=refused("UNAVAILABLE", "ENGINE_LOST")), [], "and the log says None"),
        (
            told((), error=refused("CANCELLED", "CANCELLED")),
            [aborted(Cause.ISOLATION_VIOLATION)],
            "KV_ISOLATION_VIOLATION",
        ),
    ],
)
def test_an_untruth_is_doubted(known: Told, events: list[Event], said: str) -> None:
    """Success without an end, other counts, other causes, foreign tokens and silence are seen."""
    doubts = known.doubts(events, TOKENS)
    assert len(doubts) == 1
    assert said in doubts[0]


def _forgetful(_request: object, _context: object) -> Iterator[GenerateResponse]:
    """A stream whose first chunk begins with the second token."""
    yield GenerateResponse(admission=generation_pb2.Admission(request_id="r"))
    yield GenerateResponse(chunk=generation_pb2.Chunk(first_index=1, token_ids=[5]))


@pytest.fixture
def gapped() -> Iterator[str]:
    """The address of a scheduler that forgets the first token."""
    generate = grpc.unary_stream_rpc_method_handler(
        _forgetful,
        request_deserializer=GenerateRequest.FromString,
        response_serializer=GenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(
        "custody.v1.GenerationService", {"Generate": generate}
    )
    server = grpc.server(ThreadPoolExecutor(2), [service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_stream_with_a_gap_fails_whoever_waits_for_it(gapped: str) -> None:
    """What goes wrong in a call's own thread is not lost there."""
    asking = Asking(gapped, GenerateRequest())
    with pytest.raises(AssertionError, match="no gap"):
        asking.wait()
    asking.close()


def test_a_load_fails_when_one_of_its_clients_does(gapped: str) -> None:
    """A client that is gone is not a smaller load."""
    relay = Relay(gapped)
    clients = Load(relay, 2, Shape())
    with pytest.raises(AssertionError, match="no gap"), clients:
        pass
    assert clients.done == []
    relay.close()


# --- the table ------------------------------------------------------------------------------------


def test_every_pair_is_a_cell_or_says_why_not() -> None:
    """Each fault meets each moment on each of its planes, or a sentence says why it cannot."""
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    for fault in FAULTS.values():
        assert set(fault.planes) <= set(PLANES)
        for moment in MOMENTS:
            run_on = [c.plane for c in cells if (c.fault, c.moment) == (fault.name, moment)]
            why = why_impossible(fault, moment)
            assert run_on == ([] if why else list(fault.planes)), (fault.name, moment)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_say() -> None:
    """`docs/endings.md` holds every cell's kept result, and none that failed."""
    assert page.missing(load(page.RESULTS)) == []
    assert page.filled(page.PAGE.read_text(encoding="utf-8"), load(page.RESULTS)) == (
        page.PAGE.read_text(encoding="utf-8")
    )


def test_a_cell_without_a_result_is_named() -> None:
    """A result that is missing, failed, or belongs to no cell keeps the page from being made."""
    kept = load(page.RESULTS)
    first, *others = kept["matrix"]["cells"]
    assert len(page.missing({"matrix": {"cells": others, "failures": []}})) == 1
    failures = [{"cell": first["cell"], "message": ""}]
    assert len(page.missing({"matrix": {"cells": [first, *others], "failures": failures}})) == 1
    odd = {**first, "cell": {**first["cell"], "moment": "never"}}
    assert len(page.missing({"matrix": {"cells": [first, *others, odd], "failures": []}})) == 1


def test_results_are_kept_part_by_part(tmp_path: Path) -> None:
    """A run replaces its own part of the file, and what was kept comes back as it was."""
    path = tmp_path / "kept.json"
    keep(path, "matrix", {"cells": [{"a": [1, 2]}, {"b": "ü"}], "failures": []})
    keep(path, "figures", {"useful": {"ratio": 0.95}})
    keep(path, "figures", {"useful": {"ratio": 0.96}})
    assert load(path) == {
        "matrix": {"cells": [{"a": [1, 2]}, {"b": "ü"}], "failures": []},
        "figures": {"useful": {"ratio": 0.96}},
    }


# --- reach ----------------------------------------------------------------------------------------


def test_no_program_hands_hooks_over() -> None:
    """Only the shell and what begins it know the hooks; no setting, verb or other part names them."""
    naming = {
        path.name
        for layer in ("lifecycle", "kernels", "engine", "transport", "tools")
        for path in house.sources(layer)
        if "engine_hooks" in path.read_text(encoding="utf-8")
    }
    assert naming == {"engine_lives.py", "engine_shell.py"}


@pytest.mark.parametrize("broken", [False, True])
def test_a_relay_delivers_later_or_not_at_all(*, broken: bool) -> None:
    """What was on its way when a relay stalled arrives when it heals, unless it heals broken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        relay = Relay(f"127.0.0.1:{server.getsockname()[1]}")
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as near:
            near.sendall(b"a")
            far, _ = server.accept()
            with far:
                far.settimeout(20)
                assert far.recv(1) == b"a"
                relay.stall()
                near.sendall(b"b")
                relay.heal(broken=broken)
                assert _received(far.recv) == (b"" if broken else b"b")
        relay.close()
        relay.close()


def _received(receive: Callable[[int], bytes]) -> bytes:
    """What comes next; nothing from a connection that was reset."""
    try:
        return receive(1)
    except ConnectionResetError:
        return b""
