"""The verbs that use and look at a running deployment: `generate`, `cancel`, `status`, `health`.

Owns: how flags become a request, and how an answer is printed.
Must not know: tokenizers and models; the scheduler has them.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import attrs
from cyclopts import Parameter

from lifecycle.wording import counted
from transport.commands_shared import (
    CALL,
    DEFAULT_SCHEDULER,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREACHABLE,
    Door,
    Json,
    SchedulerAddress,
    Switch,
    UsageError,
    connect,
    is_standard,
    note,
    require_timeout,
    say,
    say_json,
    say_message,
    undashed,
)

if TYPE_CHECKING:
    from transport.client import Client
    from transport.pb.generation_pb2 import GenerateRequest, GenerateResponse, Outcome, Sampling

NANOSECONDS = 1e9


@attrs.frozen(kw_only=True)
class SamplingOptions:
    """How tokens are chosen; what is not given has the server's default."""

    max_new_tokens: int | None = None
    """Most new tokens."""
    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    """Least set of tokens whose probabilities sum to this."""
    top_k: int | None = None
    """Most likely tokens considered; 0 considers all."""
    seed: int | None = None
    """Each draw is a function of seed and position alone."""
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Text before which generation stops; may be repeated."""
    stop_token_id: Annotated[tuple[int, ...], Parameter(negative="")] = ()
    """Token at which generation stops; may be repeated."""
    logprobs: Switch = False
    """Ask for the chosen tokens' log probabilities."""
    ignore_eos: Switch = False
    """Treat the model's own end token like any other."""


_SAMPLING = SamplingOptions()


def sampling_message(options: SamplingOptions) -> Sampling:
    """The schema's form; a number that does not fit it is a usage error."""
    from transport.pb.generation_pb2 import Sampling

    try:
        return Sampling(
            new_tokens_max=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            stop_strings=[undashed(text) for text in options.stop],
            stop_token_ids=options.stop_token_id,
            logprobs=True if options.logprobs else None,
            ignore_eos=True if options.ignore_eos else None,
        )
    except ValueError as error:
        raise UsageError(f"sampling: {error}") from error


def _prompt(given: str | None) -> str:
    if given is not None and not is_standard(given):
        return given
    if given is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one, or send it to standard input")
    return sys.stdin.read()


def request_message(
    prompt: str, options: SamplingOptions, *, chat: bool, system: str | None, token_ids: bool
) -> GenerateRequest:
    """The request for a prompt that is text, a user's message, or token ids."""
    from transport.pb.generation_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds

    sampling = sampling_message(options)
    if token_ids:
        try:
            ids = TokenIds(ids=[int(word) for word in prompt.replace(",", " ").split()])
        except ValueError as error:
            raise UsageError(f"--token-ids: {error}") from error
        return GenerateRequest(token_ids=ids, sampling=sampling)
    if chat:
        messages = (
            [ChatMessage(role="system", content=undashed(system))] if system is not None else []
        )
        messages.append(ChatMessage(role="user", content=prompt))
        return GenerateRequest(chat=ChatMessages(messages=messages), sampling=sampling)
    return GenerateRequest(text=prompt, sampling=sampling)


def generate(
    prompt: str | None = None,
    /,
    *,
    chat: Switch = False,
    system: str | None = None,
    token_ids: Switch = False,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
    timeout: float | None = None,
    idempotency_key: str = "",
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Generate text and stream it to standard output.

    Parameters
    ----------
    prompt
        The prompt; absent or "-" reads standard input.
    chat
        Send the prompt as a user's message through the model's chat template.
    system
        With --chat: a system message before it.
    token_ids
        The prompt is a list of token ids.
    timeout
        Deadline in seconds.
    idempotency_key
        A repeated call with the same key attaches to the same request.
    scheduler
        Address of a running scheduler.
    json
        Print JSON Lines, one message of the stream a line.
    """
    if chat and token_ids:
        raise UsageError("--chat and --token-ids exclude each other")
    if system is not None and not chat:
        raise UsageError("--system needs --chat")
    require_timeout(timeout)
    request = request_message(
        _prompt(prompt), sampling, chat=chat, system=system, token_ids=token_ids
    )
    request.idempotency_key = idempotency_key
    with connect(scheduler, door) as client:
        _, outcome = print_answer(client, request, timeout=timeout, json=json)
    return ended(outcome)


def ended(outcome: Outcome | None) -> int:
    """The exit code of an answer; without an outcome it was not whole."""
    if outcome is None:
        note("custody: the stream ended before its outcome")
        return EXIT_UNREACHABLE
    return EXIT_OK


def print_answer(
    client: Client, request: GenerateRequest, *, timeout: float | None, json: bool
) -> tuple[str, Outcome | None]:
    """Print an answer as it comes; its text, and its outcome if there was one.

    However this is left, the request ends.  Raises Refused or Unreachable.
    """
    from transport.progress import Waiting, on_terminal

    texts: list[str] = []
    outcome: Outcome | None = None
    with (
        closing(client.generate(request, timeout=timeout)) as stream,
        Waiting(shown=on_terminal() and not json) as waiting,
    ):
        for response in stream:
            match response.WhichOneof("step"):
                case "admission":
                    admission = response.admission
                    tokens, engine = admission.prompt_tokens, admission.prefill_engine
                    waiting.say(f"prefill of {counted(tokens, 'token')} by {engine}")
                case "chunk":
                    waiting.stop()
                    texts.append(response.chunk.text)
                case "outcome":
                    waiting.stop()
                    outcome = response.outcome
                case None:
                    pass
            _print_step(response, json=json)
    return "".join(texts), outcome


def _print_step(response: GenerateResponse, *, json: bool) -> None:
    if json:
        say_message(response)
    elif response.HasField("chunk"):
        sys.stdout.write(response.chunk.text)
        sys.stdout.flush()
    elif response.HasField("outcome"):
        say()
        outcome = response.outcome
        if sys.stderr.isatty():
            note(
                f"{counted(outcome.usage.prompt_tokens, 'prompt token')}, "
                f"{outcome.usage.new_tokens} new, "
                f"first after {outcome.time_to_first_token_ns / NANOSECONDS:.2f} s, "
                f"{counted(outcome.attempts, 'attempt')}"
            )


def cancel(
    request: str,
    /,
    *,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """End a request as if its client had cancelled it.

    Parameters
    ----------
    request
        The request's id.
    scheduler
        Address of a running scheduler.
    json
        Print one JSON document.
    """
    with connect(scheduler, door) as client:
        cancelled = client.cancel(request)
    if json:
        say_json({"request": request, "cancelled": cancelled})
    else:
        say(f"{request} is cancelled" if cancelled else f"{request} had ended before")
    return EXIT_OK


def health(
    *,
    scheduler: SchedulerAddress = DEFAULT_SCHEDULER,
    door: Door = CALL,
    json: Json = False,
) -> int:
    """Ask whether a request would have a chance now; exits 0 if so and 1 if not.

    Parameters
    ----------
    scheduler
        Address of a running scheduler.
    json
        Print one JSON document.
    """
    with connect(scheduler, door) as client:
        serving = client.serving()
    if json:
        say_json({"serving": serving})
    else:
        say("serving" if serving else "not serving")
    return EXIT_OK if serving else EXIT_FAILED


def status(
    *, scheduler: SchedulerAddress = DEFAULT_SCHEDULER, door: Door = CALL, json: Json = False
) -> int:
    """Show engines, pages, requests and the log's position.

    Parameters
    ----------
    scheduler
        Address of a running scheduler.
    json
        Print one JSON document.
    """
    from transport.status_text import status_lines

    with connect(scheduler, door) as client:
        answer = client.status()
    if json:
        say_message(answer, zeros=True)
    else:
        for line in status_lines(answer):
            say(line)
    return EXIT_OK


def version(*, json: Json = False) -> int:
    """Print the program's version.

    Parameters
    ----------
    json
        Print one JSON document.
    """
    if json:
        python = ".".join(str(part) for part in sys.version_info[:3])
        about = {"python": python, "schema": "custody.v1", "log_format": 1}
        say_json({"version": _number(), **about})
    else:
        say(version_line())
    return EXIT_OK


def version_line() -> str:
    """What `custody version` and `custody --version` print."""
    return f"custody {_number()}"


def _number() -> str:
    from importlib.metadata import version as installed

    return installed("kv-custody")
