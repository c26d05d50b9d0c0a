"""The verb `chat`: a conversation on a terminal, or one turn from standard input.

Owns: the conversation so far, and what a person may type besides messages.
Must not know: chat templates; the scheduler has the model's.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_OK,
    EXIT_REFUSED,
    Door,
    Json,
    SchedulerAddress,
    UsageError,
    complain,
    connect,
    note,
    require_timeout,
    undashed,
)
from transport.commands_use import SamplingOptions, ended, print_answer, sampling_message

if TYPE_CHECKING:
    from transport.client import Client
    from transport.pb.generation_pb2 import ChatMessage, Outcome

_SAMPLING = SamplingOptions()
PROMPT = "> "
HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat(
    *,
    system: str | None = None,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
    timeout: float | None = None,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Talk with the model; without a terminal, answer the one message on standard input.

    Parameters
    ----------
    system
        A system message before the first.
    timeout
        Deadline of each answer in seconds.
    scheduler
        Address of a running scheduler.
    json
        Print JSON Lines, one message of the stream a line.
    """
    require_timeout(timeout)
    with connect(scheduler, door) as client:
        talk = Conversation(client, system=system, sampling=sampling, timeout=timeout, json=json)
        if sys.stdin.isatty():
            return _converse(talk, json=json)
        text = sys.stdin.read()
        if not text.strip():
            raise UsageError("no message: send one to standard input")
        return ended(talk.turn(text))


class Conversation:
    """Messages so far; a turn that was not answered whole is forgotten."""

    def __init__(
        self,
        client: Client,
        *,
        system: str | None,
        sampling: SamplingOptions,
        timeout: float | None,
        json: bool,
    ) -> None:
        self._client = client
        self._system = system
        self._sampling = sampling_message(sampling)
        self._timeout = timeout
        self._json = json
        self._messages: list[ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        """Begin again with the system message alone."""
        from transport.pb.generation_pb2 import ChatMessage

        self._messages.clear()
        if self._system is not None:
            self._messages.append(ChatMessage(role="system", content=undashed(self._system)))

    def turn(self, text: str) -> Outcome | None:
        """Send a message and print the answer. Raises Refused or Unreachable."""
        from transport.pb.generation_pb2 import ChatMessage, ChatMessages, GenerateRequest

        messages = [*self._messages, ChatMessage(role="user", content=text)]
        request = GenerateRequest(chat=ChatMessages(messages=messages), sampling=self._sampling)
        answer, outcome = print_answer(
            self._client, request, timeout=self._timeout, json=self._json
        )
        if outcome is not None:
            self._messages = [*messages, ChatMessage(role="assistant", content=answer)]
        return outcome


def _converse(talk: Conversation, *, json: bool) -> int:
    from transport.client import Refused

    with suppress(ImportError):
        # Lines can be edited and called back.
        import readline  # noqa: F401
    note(HELP)
    while True:
        try:
            line = _line().strip()
        except EOFError:
            note("")
            return EXIT_OK
        match line:
            case "":
                continue
            case "/quit":
                return EXIT_OK
            case "/reset":
                talk.reset()
                continue
            case _:
                pass
        try:
            outcome = talk.turn(line)
        except Refused as error:
            complain(error, code=EXIT_REFUSED, json=json)
        except KeyboardInterrupt:
            note("\nstopped; this turn is forgotten")
        else:
            if outcome is None:
                return ended(outcome)


def _line() -> str:
    """A line that a person types; the prompt is never part of the data."""
    if sys.stdout.isatty():
        return input(PROMPT)
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return input()
