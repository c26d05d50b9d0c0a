"""Logs of this version that every later one must still read and reduce to the same states.

Run as `python -m tests.captures NAME` it records `tests/captured/NAME`: one log as segments, as real
engines leave it, and one of small worlds as JSON Lines, with the hash of the states that they
reduce to.  They are recorded once; a version that changes the schema records others beside them.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from engine.explorer import walk
from engine.sampler import SamplingParams
from engine.scenarios import SCENARIOS
from engine.store import Append, Stored
from engine.tokenizer import load_tokenizer
from engine.weights import load_model
from lifecycle.history import History
from lifecycle.replay import Replayer
from lifecycle.state import Grant, RequestState
from tests.inprocess import Deployment
from tests.tiny import tiny_llama
from transport.forensics_read import open_capture
from transport.jsonlines import write_jsonlines
from transport.stores.segments import SegmentStore

FOLDER = Path(__file__).parent / "captured"
SEGMENT_BYTES = 4096
"""So small that a short log has several segments, all but the last of them sealed."""


def _grant(grant: Grant) -> list[Any]:
    reserved = grant.reserved
    return [
        str(grant.id),
        grant.attempt,
        reserved.purpose.value,
        [[run.first, run.count] for run in reserved.pages],
        [reserved.tokens.start, reserved.tokens.stop],
        [[str(w.party), w.transfer.tokens.start, w.transfer.tokens.stop] for w in grant.written],
        [str(party) for party in grant.drained],
        grant.settlement.value,
        None if grant.quarantine is None else grant.quarantine.value,
    ]


def _request(state: RequestState) -> list[Any]:
    return [
        state.phase.value,
        state.sequence,
        state.attempt,
        state.time_ns,
        state.deadline_ns,
        state.settle_by_ns,
        state.relayed,
        type(state.outcome).__name__,
        [_grant(grant) for grant in state.grants],
    ]


def state_hash(history: History) -> str:
    """SHA-256 over what a log reduces to: requests, lives, pages.

    It names facts and no classes, so that a field which is added later changes nothing.
    """
    lives = [
        [name, life.attached.incarnation, life.draining, life.lost.value if life.lost else None]
        for name, life in history.fleet.lives
    ]
    accounts = {
        str(party): [
            account.capacity,
            f"{account.held:x}",
            f"{account.quarantined:x}",
            [list(one) for one in account.booked],
            account.serial,
        ]
        for party, account in history.ledger.items()
    }
    facts = {
        "requests": {name: _request(state) for name, state in history.requests.items()},
        "fleet": [history.fleet.epoch, history.fleet.sequence, lives],
        "pages": accounts,
        "time_ns": history.time_ns,
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def judged(path: Path) -> dict[str, Any]:
    """What a kept log holds, and what this version makes of it."""
    with ExitStack() as stack:
        capture = open_capture(path, stack)
        replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot)
        for position, entry in capture:
            replayer.take(position, entry)
        report = replayer.report(whole=capture.whole)
    return {
        "whole": capture.whole,
        "chain_end": capture.head.hex() if capture.head else None,
        "entries": report.entries,
        "events": dict(report.events),
        "phases": dict(report.phases),
        "violations": len(report.findings),
        "states": state_hash(replayer.history),
    }


# --- Recording --------------------------------------------------------------------------------


def real_engines() -> list[Stored]:
    """A tiny model on real engines: answers, a cancel, a refusal, growth, an engine that is lost."""
    torch.set_num_threads(1)
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        model_path = tiny_llama(Path(scratch) / "tiny", tied=False)
        model, tokenizer = load_model(model_path), load_tokenizer(model_path)
    here = Deployment(model, tokenizer, prefill_pages=8, decode_pages=24)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, 60) for _ in range(length)]

    for length in (5, 24, 61):
        here.ask(prompt(length), SamplingParams(max_new_tokens=20, ignore_eos=True))
    here.run()
    left = here.ask(prompt(30), SamplingParams(max_new_tokens=40, ignore_eos=True))
    here.run(until=lambda: len(left.tokens) > 2)
    here.cancel(left)
    here.run()
    here.ask(prompt(100), SamplingParams(max_new_tokens=4))
    last = here.ask(prompt(20), SamplingParams(max_new_tokens=40, ignore_eos=True))
    here.run(until=lambda: bool(last.tokens))
    here.lose(next(party for party in here.owners if party.engine == "prefill-0"))
    here.run()
    return [Stored(position, entry) for position, entry in here.log]


def small_worlds() -> list[Stored]:
    """The walk, of many, whose log holds most kinds of events and entries."""
    best: list[Stored] = []
    score = (0, 0)
    for scenario in SCENARIOS.values():
        for seed in range(5):
            world, trace, _ = walk(scenario, seed, steps=300)
            kinds = {type(entry.event) for _, entry in world.stored}
            found = (len(kinds), len(world.stored))
            if trace is None and found > score and len(world.stored) <= 400:
                best, score = [Stored(p, entry) for p, entry in world.stored], found
    return best


def record(name: str) -> None:
    """Write both logs and what they hold."""
    folder = FOLDER / name
    folder.mkdir(parents=True)
    store = SegmentStore(folder / "segments", segment_bytes=SEGMENT_BYTES)
    for one in real_engines():
        store.append_batch([Append(one.entry.request, one.entry.sequence, (one.entry,))])
        store.flush()
        store.seal()
    store.close()
    (folder / "segments" / "lock").unlink()
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:
        write_jsonlines(file, small_worlds(), complete=True)
    kept = {path: judged(folder / path) for path in ("segments", "log.jsonl")}
    (folder / "expected.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
