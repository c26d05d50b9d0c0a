"""One client's call, and whether what it was told is what the log says.

Owns: the stream, its times, the judgement of an answer.
Must not know: faults and moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import attrs
import grpc

from lifecycle.events import Aborted, Admitted, Event, Finished, Rejected
from transport.client import Refused, Unreachable, refusal
from transport.pb import generation_pb2_grpc
from transport.pb.generation_pb2 import GenerateRequest, Outcome
from transport.refusals import ABORTS, REJECTIONS

OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0))
CALL_SECONDS = 90.0


class Asking:
    """A call that runs in a thread of its own until it is answered, left, or broken."""

    def __init__(
        self, address: str, request: GenerateRequest, *, seconds: float = CALL_SECONDS
    ) -> None:
        self.request = ""
        self.tokens: list[int] = []
        self.text = ""
        self.outcome: Outcome | None = None
        self.error: Refused | Unreachable | None = None
        self._fault: BaseException | None = None
        self.answered_ns = 0
        self.left = False
        self.legs: dict[str, str] = {}
        self._address = address
        self._changed = threading.Condition()
        self._channel = grpc.insecure_channel(address, OPTIONS)
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._call = stub.Generate(request, timeout=seconds)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    match response.WhichOneof("step"):
                        case "admission":
                            self.request = response.admission.request_id
                            self.legs = {
                                "prefill": response.admission.prefill_engine,
                                "decode": response.admission.decode_engine,
                            }
                        case "chunk":
                            assert response.chunk.first_index == len(self.tokens), "no gap"
                            self.tokens += response.chunk.token_ids
                            self.text += response.chunk.text
                        case "outcome":
                            self.outcome = response.outcome
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.error = refusal(error, self._address)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            self._fault = error
        finally:
            with self._changed:
                self.answered_ns = time.monotonic_ns()
                self._changed.notify_all()

    @property
    def answered(self) -> bool:
        """Whether the call has ended."""
        return bool(self.answered_ns)

    def wait_admitted(self, seconds: float = CALL_SECONDS) -> None:
        """The scheduler has let it in, or the call has ended."""
        with self._changed:
            said = self._changed.wait_for(lambda: self.request or self.answered, seconds)
        assert said, "no admission came"

    def wait_tokens(self, count: int, seconds: float = CALL_SECONDS) -> None:
        """So many tokens have come, or the call has ended."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: len(self.tokens) >= count or self.answered, seconds
            )
        assert enough, f"{len(self.tokens)} tokens came, not {count}"

    def waited(self, seconds: float) -> bool:
        """Wait so long for the end of the call; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """The client does not want it any more."""
        self.left = True
        self._call.cancel()

    def wait(self, seconds: float = CALL_SECONDS) -> None:
        """The call ends.  Raises AssertionError for a stream with a gap, too."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no answer in {seconds:.0f} s"
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Let go of the channel."""
        self._channel.close()

    @property
    def status(self) -> str:
        """What the client was told, in one word or two."""
        return self.told.status

    @property
    def told(self) -> Told:
        """All that the client knows."""
        return Told(tuple(self.tokens), self.error, self.outcome is not None, self.left)


@attrs.frozen
class Told:
    """What a client knows at the end of its call."""

    tokens: tuple[int, ...]
    error: Refused | Unreachable | None
    whole: bool
    """Whether an outcome came."""
    left: bool
    """Whether the client went away by itself, and was owed nothing."""

    @property
    def status(self) -> str:
        """In one word or two."""
        match self.error:
            case Refused(code=code, reason=reason):
                return f"{code} {reason}".strip()
            case Unreachable():
                return "UNAVAILABLE"
            case _:
                return "OK" if self.whole else "nothing"

    def doubts(self, events: Sequence[Event], wanted: Sequence[int]) -> list[str]:
        """Where this is not what the log says, or not what the prompt gives alone (`wanted`)."""
        found: list[str] = []
        ends = [e for e in events if isinstance(e, Finished | Aborted | Rejected)]
        end = ends[0] if ends else None
        if self.tokens != tuple(wanted)[: len(self.tokens)]:
            found.append(f"other tokens than alone: {self.tokens} instead of {tuple(wanted)}")
        if self.status == "OK":
            if not isinstance(end, Finished):
                found.append(f"success, and the log says {end}")
            elif not _counted(events, end) == len(self.tokens) == len(wanted):
                found.append(f"{len(self.tokens)} tokens, the log counts {_counted(events, end)}")
        elif not self.left and isinstance(self.error, Refused):
            found += _refusal_doubts(self.error, end)
        elif not self.left and not isinstance(self.error, Unreachable):
            found.append("no answer")
        return found


def _refusal_doubts(refused: Refused, end: Finished | Aborted | Rejected | None) -> list[str]:
    told = (refused.code, refused.reason)
    if refused.reason == "LOG_UNAVAILABLE" or told == ("DEADLINE_EXCEEDED", ""):
        # Nothing is claimed of the end, only that it cannot be told, or was not waited for.
        return []
    match end:
        case Aborted(cause=cause):
            code, reason = ABORTS[cause]
            known = (code.name, reason)
        case Rejected(code=code):
            known = (REJECTIONS[code].name, code.name)
        case _:
            return [f"{told}, and the log says {end}"]
    return [] if told == known else [f"{told}, and the log says {known}"]


def _counted(events: Sequence[Event], end: Finished) -> int:
    """The tokens of all attempts: what the last was not admitted for had been relayed before."""
    admitted = [event for event in events if isinstance(event, Admitted)]
    return admitted[0].new_tokens_max - admitted[-1].new_tokens_max + end.tokens
