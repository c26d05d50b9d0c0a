"""Figures of serving, as clients of real processes see them.

Owns: what each figure compares, and in which order the sides run.
Must not know: how processes are started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice

from lifecycle.events import Rejected
from transport.bench_context import Context
from transport.bench_parts import Deployment, PeerRun, Stream, greedy, together
from transport.bench_stats import Figure, Target, UnusableSample, decode_rate, interleave
from transport.client import Refused

WARM_TOKENS = 4
REFUSALS = 200
SHORT_PROMPT = 16
SHORT_ANSWER = 8
SHORT_REQUESTS = 32
SHORT_CLIENTS = 4
COLOCATED_REQUESTS = 6


def single(context: Context) -> tuple[Figure, ...]:
    """One stream: decode throughput, and the time to its first token."""
    settings, deployment, peer = context.settings, context.deployment, context.peer
    prompts = [context.prompt() for _ in range(settings.runs)]

    def ours(number: int) -> Stream:
        stream = deployment.stream(prompts[number], new_tokens=settings.new_tokens)
        deployment.settle()
        return stream

    def theirs(number: int) -> PeerRun | None:
        if peer is None:
            return None
        return peer.generate([prompts[number]], new_tokens=settings.new_tokens)

    _warm(context, [context.prompt()])
    rounds = interleave(settings.runs, ours, theirs)
    runs = [run for _, run in rounds if run is not None]
    same = sum(tuple(stream.tokens) == run.tokens[0] for stream, run in rounds if run is not None)
    shape = f"a prompt of {settings.prompt_tokens} tokens, {settings.new_tokens} new ones"
    rates = [decode_rate([stream.times], new_tokens=settings.new_tokens) for stream, _ in rounds]
    return (
        Figure(
            name="decode-single",
            says=f"decode throughput of one stream, {shape}",
            unit="tokens/s",
            ours=tuple(rates),
            theirs=tuple(run.decode_rate for run in runs),
            peer=settings.peer,
            target=Target(value=1.0, better="higher") if runs else None,
            notes={"same_tokens_as_peer": same} if runs else {},
        ),
        Figure(
            name="first-token",
            says=f"time to the first token of a prompt of {settings.prompt_tokens} tokens, from a "
            "client's call over gRPC, hand-off included, against the peer's prefill in its process",
            unit="s",
            ours=tuple(stream.times.first for stream, _ in rounds),
            theirs=tuple(run.prefill_seconds for run in runs),
            peer=settings.peer,
            target=Target(value=1.15, better="lower") if runs else None,
        ),
    )


def batch(context: Context) -> tuple[Figure, ...]:
    """Many streams: decode throughput while all of them decode."""
    settings, deployment, peer = context.settings, context.deployment, context.peer
    prompts = [[context.prompt() for _ in range(settings.batch)] for _ in range(settings.runs)]
    # Prefill is serial: the first streams must go on while the last prompts are computed.
    # They are asked for as much as fits, and cut off when the last has its tokens.
    asked = int(deployment.settle().context_tokens) - settings.prompt_tokens

    def ours(number: int) -> float:
        streams = together(
            [(deployment, prompt) for prompt in prompts[number]],
            new_tokens=settings.new_tokens,
            asked=asked,
        )
        deployment.settle()
        return decode_rate([s.times for s in streams], new_tokens=settings.new_tokens)

    def theirs(number: int) -> PeerRun | None:
        if peer is None:
            return None
        return peer.generate(prompts[number], new_tokens=settings.new_tokens)

    _warm(context, [context.prompt() for _ in range(settings.batch)])
    rounds = interleave(settings.runs, ours, theirs)
    runs = [run for _, run in rounds if run is not None]
    return (
        Figure(
            name="decode-batch",
            says=f"decode throughput of {settings.batch} streams while all decode, prompts of "
            f"{settings.prompt_tokens} tokens, {settings.new_tokens} new ones",
            unit="tokens/s",
            ours=tuple(rate for rate, _ in rounds),
            theirs=tuple(run.decode_rate for run in runs),
            peer=settings.peer,
            target=Target(value=1.0, better="higher") if runs else None,
            notes={"batch": settings.batch},
        ),
    )


def _warm(context: Context, prompts: Sequence[Sequence[int]]) -> None:
    """Both sides once, so that memory is mapped and threads run before anything counts."""
    deployment = context.deployment
    together([(deployment, p) for p in prompts], new_tokens=WARM_TOKENS, asked=WARM_TOKENS)
    deployment.settle()
    if context.peer is not None:
        context.peer.generate(prompts, new_tokens=WARM_TOKENS)


def refusal(context: Context) -> tuple[Figure, ...]:
    """A prompt that can never fit: how fast it is refused, and that nobody else hears of it."""
    deployment = context.deployment
    steps = deployment.engine_steps()
    before = deployment.settle()
    request = greedy(context.prompt(int(before.context_tokens) + 1), new_tokens=1)
    took: list[float] = []
    for _ in range(REFUSALS):
        start = time.perf_counter()
        try:
            for _ in deployment.client.generate(request):
                break
        except Refused:
            took.append((time.perf_counter() - start) * 1e3)
        else:
            raise UnusableSample(figure="refusal", reason="a prompt longer than context was taken")
    after = deployment.settle()
    grown = int(after.log_position - before.log_position)
    entries = [
        one.entry for one in islice(deployment.client.tail(int(before.log_position) + 1), grown)
    ]
    alone = all(isinstance(entry.event, Rejected) for entry in entries)
    if not alone or len(entries) != REFUSALS or len({e.request for e in entries}) != REFUSALS:
        kinds = sorted({type(entry.event).__name__ for entry in entries})
        reason = f"{REFUSALS} refusals left {len(entries)} entries ({', '.join(kinds)})"
        raise UnusableSample(figure="refusal", reason=reason)
    return (
        Figure(
            name="refusal",
            says=f"answer to a prompt of {before.context_tokens + 1} token ids, one more than the "
            "context",
            unit="ms",
            ours=tuple(took),
            target=Target(value=10.0, better="lower"),
            notes={
                "entries_per_refusal": len(entries) / REFUSALS,
                "entries_other_than_rejected": 0,
                "engine_steps": deployment.engine_steps() - steps,
            },
        ),
    )


def stores(context: Context) -> tuple[Figure, ...]:
    """Requests a second with the log in segment files, against the log in memory."""
    with ExitStack() as stays:
        disk = context.make_deployment("disk", log=context.folder / "segments", stays=stays)
        memory = context.make_deployment("memory", stays=stays)
        for deployment in (disk, memory):
            _short_requests(context, deployment)
        rounds = interleave(
            context.settings.runs,
            lambda _: _short_requests(context, disk),
            lambda _: _short_requests(context, memory),
        )
    return (
        Figure(
            name="segment-store",
            says=f"requests of {SHORT_PROMPT} prompt and {SHORT_ANSWER} new tokens from "
            f"{SHORT_CLIENTS} clients, log in segment files against log in memory",
            unit="requests/s",
            ours=tuple(ours for ours, _ in rounds),
            theirs=tuple(theirs for _, theirs in rounds),
            peer="the same with its log in memory",
            target=Target(value=0.98, better="higher"),
            notes={"requests": SHORT_REQUESTS},
        ),
    )


def _short_requests(context: Context, deployment: Deployment) -> float:
    start = time.perf_counter()
    for _ in range(SHORT_REQUESTS // SHORT_CLIENTS):
        clients = [(deployment, context.prompt(SHORT_PROMPT)) for _ in range(SHORT_CLIENTS)]
        together(clients, new_tokens=SHORT_ANSWER, asked=SHORT_ANSWER)
    took = time.perf_counter() - start
    deployment.settle()
    return SHORT_REQUESTS / took


def colocated(context: Context) -> tuple[Figure, ...]:
    """Prefill and decode on a core each, against two whole replicas on a core each."""
    settings = context.settings
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise UnusableSample(figure="colocated", reason="two cores are needed")
    prompts = [
        [context.prompt() for _ in range(COLOCATED_REQUESTS)] for _ in range(settings.runs + 1)
    ]

    def rate(deployments: Sequence[Deployment], number: int) -> float:
        streams = together(
            [(deployments[n % len(deployments)], p) for n, p in enumerate(prompts[number])],
            new_tokens=settings.new_tokens,
            asked=settings.new_tokens,
        )
        for deployment in deployments:
            deployment.settle()
        return COLOCATED_REQUESTS * settings.new_tokens / max(stream.seconds for stream in streams)

    with ExitStack() as stays:
        apart = [context.make_deployment("apart", threads=1, stays=stays)]
        replicas = [
            context.make_deployment(f"replica-{core}", threads=1, cores=(core,), stays=stays)
            for core in cores
        ]
        for deployments in (apart, replicas):
            rate(deployments, settings.runs)
        rounds = interleave(settings.runs, lambda n: rate(apart, n), lambda n: rate(replicas, n))
    return (
        Figure(
            name="disaggregated",
            says=f"output of {COLOCATED_REQUESTS} requests at once, {settings.prompt_tokens} prompt "
            f"and {settings.new_tokens} new tokens, one thread each for prefill and decode, "
            "against two replicas that keep both on one core",
            unit="tokens/s",
            ours=tuple(ours for ours, _ in rounds),
            theirs=tuple(theirs for _, theirs in rounds),
            peer="two colocated replicas of ours",
            target=Target(value=0.86, better="higher"),
        ),
    )
