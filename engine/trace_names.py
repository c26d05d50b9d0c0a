"""Names of actions: what a trace file, a minimiser and a reader call them.

Owns: the names, finding the action that a name means in a world, and one sentence for each.
Must not know: files, and who chooses.

A name says whom an action concerns, never where something stands in a list: a request is `r2`, the
second that was asked, whatever its id; a rank is `d0` in its present life; a write is its rank,
request, attempt and first token. So a name means the same thing after other actions are gone.
"""

from __future__ import annotations

from typing import Any

from engine.effects import Answer, Publish, Synced
from engine.world_options import Options
from engine.world_values import Action, Tokens
from lifecycle.events import Proposal
from lifecycle.ids import GrantId, Party, RequestId
from lifecycle.wording import counted

WRITES = frozenset({"land", "reland", "lie", "done", "failed", "fail", "doubt", "hang"})
ENGINES = frozenset({"restart", "declare-lost", "rejoin"})


def label(party: Party) -> str:
    """A rank without its life: `d0`."""
    return f"{party.engine}{party.rank}"


def request_label(world: Options, request: RequestId) -> str:
    """A request by its number in the order of asking: `r2`."""
    for number, known in enumerate(world.clients, start=1):
        if known == request:
            return f"r{number}"
    return str(request)


def _attempt(world: Options, request: RequestId, attempt: int) -> str:
    return f"{request_label(world, request)}/{attempt}"


def _of_grant(world: Options, party: Party, grant: GrantId) -> str:
    holding = world.cores[party].holdings.get(grant)
    return f"grant-{grant.serial}" if holding is None else _attempt(world, *_whose(holding))


def _whose(holding: Any) -> tuple[RequestId, int]:
    return holding.request, holding.attempt


def _plain(world: Options, action: Action) -> str:
    kind, *whom = action
    if kind == "submit":
        return f"submit r{world.asked + 1}"
    if kind == "cancel":
        return f"cancel {request_label(world, whom[0])}"  # type: ignore[arg-type]
    if kind == "verify":
        party, asked = world.verifies[whom[0]]  # type: ignore[call-overload]
        return f"verify {label(party)} {_attempt(world, asked.request, asked.attempt)}"
    if kind == "fenced":
        party, fence = world.fences[whom[0]]  # type: ignore[call-overload]
        return f"fenced {label(party)} {label(fence.party)} {_of_grant(world, party, fence.grant)}"
    if kind in WRITES:
        post = world.writes[(whom[0], whom[1])].post  # type: ignore[index]
        whose = _attempt(world, post.request, post.attempt)
        return f"{kind} {label(whom[0])} {whose} t{post.tokens.start}"  # type: ignore[arg-type]
    if kind == "forge":
        return f"forge {label(whom[0])} {request_label(world, whom[1])}"  # type: ignore[arg-type]
    if kind in ENGINES:
        return f"{kind} {whom[0]}"
    return " ".join([kind, *(label(p) if isinstance(p, Party) else str(p) for p in whom)])


def name_action(world: Any, action: Action) -> str:
    """The action's name in this world, before it happens; alike ones are counted: `#2`."""
    if not isinstance(world, Options):
        return action[0]
    plain = _plain(world, action)
    if action[0] not in WRITES and action[0] not in {"verify", "fenced"}:
        return plain
    alike = [a for a in world.enabled() if a[0] == action[0] and _plain(world, a) == plain]
    at = alike.index(action) if action in alike else 0
    return plain if at == 0 else f"{plain} #{at + 1}"


def find_action(world: Any, name: str) -> Action | None:
    """The enabled action that the name means; None when nothing of that name can happen now."""
    if not isinstance(world, Options):
        return (name,) if (name,) in world.enabled() else None
    plain, _, count = name.partition(" #")
    kind = plain.partition(" ")[0]
    left = int(count) if count.isdecimal() else 1
    for action in world.enabled():
        if action[0] == kind and _plain(world, action) == plain:
            left -= 1
            if not left:
                return action
    return None


# --- what it says -----------------------------------------------------------------------------


def _message(world: Options, message: object) -> tuple[str, RequestId | None]:
    match message:
        case Proposal(request=request, attempt=attempt, body=body):
            return f"{type(body).__name__} of {_attempt(world, request, attempt)}", request
        case Tokens(request=request, attempt=attempt):
            return f"tokens of {_attempt(world, request, attempt)}", request
        case Publish(entry=entry):
            kind = type(entry.event).__name__
            if entry.request not in world.clients:
                return f"{kind} of the fleet", None
            return f"{kind} of {_attempt(world, entry.request, entry.attempt)}", entry.request
        case Synced():
            return "that it has seen everything", None
        case _:
            return str(message), None


def _stream(world: Options, kind: str, party: Party) -> tuple[str, frozenset[RequestId]]:
    who = label(party)
    if kind in {"up", "repeat", "lose", "swap"}:
        said, whose = _message(world, world.up[party][0])
        if kind == "swap":
            other, also = _message(world, world.up[party][1])
            named = frozenset(r for r in (whose, also) if r is not None)
            return f"{other} of {who} overtakes {said}", named
        sentence = {
            "up": f"the scheduler hears {who}: {said}",
            "repeat": f"the scheduler hears {who}, and will again: {said}",
            "lose": f"lost on its way from {who}: {said}",
        }[kind]
        return sentence, frozenset() if whose is None else frozenset({whose})
    if kind in {"down", "echo", "garble"}:
        said, whose = _message(world, world.down[party][0])
        how = {"echo": ", and will be again", "garble": ", with a prompt of other tokens"}
        return (
            f"{who} is shown {said}{how.get(kind, '')}",
            frozenset() if whose is None else frozenset({whose}),
        )
    if kind == "answer":
        return _answered(world, party, world.answers[party][0])
    sentence = {
        "retransmit": f"{who} sends again what was not answered",
        "break": f"the stream of {who} breaks with all that is on it",
        "connect": f"{who} connects",
    }[kind]
    return sentence, frozenset()


def _answered(world: Options, party: Party, answer: Answer) -> tuple[str, frozenset[RequestId]]:
    proposal = world.cores[party].outstanding.get(answer.number)
    said, whose = ("a proposal", None) if proposal is None else _message(world, proposal)
    how = "was logged" if answer.position else f"was dropped by {answer.rule}"
    return f"{label(party)} learns: {said} {how}", frozenset() if whose is None else {whose}  # type: ignore[return-value]


_WRITE_SAYS = {
    "land": "lands",
    "reland": "lands again",
    "lie": "lands after its end was reported",
    "done": "is reported as done",
    "failed": "is reported as refused",
    "fail": "is reported as failed",
    "doubt": "is reported as in doubt",
    "hang": "is in doubt, and nothing will ever be said about it",
}
_PLAIN_SAYS = {
    "tick": "time reaches the next deadline",
    "late": "time reaches the next deadline, and no timer says so",
    "overdue": "the time to bring an ended attempt's pages home is over",
    "torn": "the machine stops in the middle of a write; a part of the log's tail is there",
    "flush": "the log becomes durable",
    "crash": "the scheduler and its machine stop; what was not durable is gone",
    "process-crash": "the scheduler stops; its log stays",
    "restart": "{} begins a new life",
    "declare-lost": "{} is given up, though it lives",
    "rejoin": "{} comes back in a new life",
}


def describe(world: Any, action: Action) -> tuple[str, frozenset[RequestId]]:
    """One sentence on what is about to happen, and the requests that it concerns alone.

    No request means: everybody, or nobody.
    """
    if not isinstance(world, Options):
        return "", frozenset()
    kind, *whom = action
    if kind == "submit":
        asked = world.scenario.asked[world.asked]
        new = counted(asked.new_tokens, "token")
        return f"a client asks: {asked.prompt_tokens} + {new}", frozenset()
    if kind == "cancel":
        return f"the client of {request_label(world, whom[0])} leaves", frozenset(whom)  # type: ignore[arg-type]
    if kind == "verify":
        party, asked_for = world.verifies[whom[0]]  # type: ignore[call-overload]
        whose = _attempt(world, asked_for.request, asked_for.attempt)
        return f"{label(party)} compares what arrived for {whose}", frozenset({asked_for.request})
    if kind == "fenced":
        party, fence = world.fences[whom[0]]  # type: ignore[call-overload]
        return f"{label(party)} has shut {label(fence.party)} out of a grant", frozenset()
    if kind == "forge":
        whose = request_label(world, whom[1])  # type: ignore[arg-type]
        return f"{label(whom[0])} claims a token of {whose}", frozenset(whom[1:])  # type: ignore[arg-type]
    if kind in WRITES:
        post = world.writes[(whom[0], whom[1])].post  # type: ignore[index]
        whose = _attempt(world, post.request, post.attempt)
        return f"the write for {whose} {_WRITE_SAYS[kind]}", frozenset({post.request})
    if kind in _PLAIN_SAYS:
        return _PLAIN_SAYS[kind].format(*whom), frozenset()
    party = whom[0]
    if isinstance(party, Party) and kind.startswith("step"):
        return _steps(world, kind, party)
    assert isinstance(party, Party)
    return _stream(world, kind, party)


def _steps(world: Options, kind: str, party: Party) -> tuple[str, frozenset[RequestId]]:
    if kind == "step":
        return f"{label(party)} starts a forward pass", frozenset()
    slices = world.steps[party][0].slices
    whose = frozenset(part.request for part in slices)
    names = ", ".join(_attempt(world, part.request, part.attempt) for part in slices)
    how = "ends" if kind == "step-end" else "fails"
    return f"the forward pass of {label(party)} for {names} {how}", whose
