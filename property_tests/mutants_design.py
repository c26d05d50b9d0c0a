"""The registry's second part: holes that were found by attacking this design.

Owns: each hole's story; and the two mutants that test the search itself.
Must not know: how a hunt is run.
"""

from __future__ import annotations

from property_tests import mutants_decode as decode
from property_tests import mutants_prefill as prefill
from property_tests import mutants_scheduler as scheduler
from property_tests import mutants_worlds as worlds
from property_tests.mutants_base import Mutant, mutant

DESIGN: tuple[Mutant, ...] = (
    mutant(
        "repeat-dropped",
        "",
        story="A proposal is repeated because its answer was lost. Answered with a refusal instead "
        "of the first one's position, the owner takes back pages that are exposed.",
        guard="Scheduler.propose answers a repeat as before",
        rules="acted-after-logged unbroken-log quiet-after-end drained-is-final",
        oracles="freed-but-held late-write log-diverged",
        scheduler=scheduler.RepeatDropped,
    ),
    mutant(
        "published-not-durable",
        "",
        story="A grant that lets in a remote writer is shown to it before it is durable. After a "
        "crash nobody knows the grant; its pages are granted again while the write is under way.",
        guard="waits_for_durability",
        rules="acted-after-logged",
        oracles="late-write",
        scheduler=scheduler.PublishedEarly,
    ),
    mutant(
        "same-memory",
        "",
        story="A new incarnation lives in the old one's memory, and the old addresses still work: "
        "a write to the old life lands on the new one's pages.",
        guard="an incarnation is a life of its memory",
        rules="incarnation-fences",
        oracles="late-write",
        worlds=worlds.SameMemory,
    ),
    mutant(
        "read-before-drain",
        "",
        story="Decode reads once every token is covered, though a writer has not drained: a write "
        "that lands a second time overwrites decode's own tokens.",
        guard="exclusive-before-read/drained",
        rules="exclusive-before-read bounded",
        oracles="replay isolation observed-foreign log-diverged stuck",
        without=("exclusive-before-read/drained",),
        decode=decode.ReadBeforeDrain,
    ),
    mutant(
        "free-under-step",
        "",
        story="A request ends while a forward pass still runs on it. Its pages are released, and "
        "the pass writes into the next owner's.",
        guard="DecodeCore.touched",
        rules="drained-before-released",
        oracles="step-on-unheld read-unheld",
        decode=decode.FreeUnderStep,
    ),
    mutant(
        "free-under-compute",
        "",
        story="A rank gives its source back when its own share is written, though it still "
        "computes what other ranks write.",
        guard="PrefillCore._release_source waits for the whole prompt",
        rules="drained-before-released",
        oracles="step-on-unheld",
        prefill=prefill.FreeUnderCompute,
    ),
    mutant(
        "ack-early",
        "",
        story="A write in flight is acknowledged as ended: the proof itself is forged.",
        guard="PrefillCore._writing",
        rules="drained-is-final quiet-after-end bounded",
        oracles="late-write failed-for-nothing",
        prefill=prefill.AckEarly,
    ),
    mutant(
        "post-after-drain",
        "",
        story="A party proposes `Drained` and posts the rest of its share afterwards. The owner has "
        "every proof that it asks for, releases the pages, and the write lands in another's.",
        guard="drained-is-final/transfer",
        rules="drained-is-final",
        oracles="late-write replay failed-for-nothing",
        without=("drained-is-final/transfer",),
        prefill=prefill.DrainThenPost,
    ),
    mutant(
        "drain-overtakes",
        "",
        story="Proposals are not taken in order. A `Drained` overtakes the transfer before it, or "
        "what was lost is never asked for again, and the request never closes.",
        guard="Scheduler.propose takes numbers without gaps",
        rules="bounded conservation",
        oracles="stuck leak never-quiet not-closed failed-for-nothing",
        scheduler=scheduler.DrainOvertakes,
    ),
    mutant(
        "id-minted-twice",
        "",
        story="Ids do not contain the epoch, and a scheduler life that follows a crash mints the "
        "same ones again: two clients stand under one id.",
        guard="the epoch in every request id, taken durably",
        rules="unbroken-log one-decision",
        oracles="sequencer id-minted-twice",
        settings={"epochs_repeat": True},
    ),
    mutant(
        "position-reused",
        "",
        story="A crash forgot the tail of the log, and its positions are given out again. An "
        "engine that keeps its cursor over the new epoch takes an end for a repeat.",
        guard="EngineCore.begin_sync; Scheduler.connect compares epochs",
        rules="unbroken-log bounded conservation",
        oracles="log-diverged stuck leak not-closed freed-but-held never-quiet",
        scheduler=scheduler.BelievesCursor,
        prefill=prefill.KeepsPositionPrefill,
        decode=decode.KeepsPositionDecode,
    ),
    mutant(
        "one-shot-fence",
        "",
        story="A fence refuses what it meets at that moment. A write of the same dead writer that "
        "arrives later is placed, after the pages have gone to somebody else.",
        guard="a refused grant stays refused",
        rules="drained-is-final",
        oracles="late-write",
        worlds=worlds.OneShotFence,
    ),
    mutant(
        "answer-before-durable",
        "",
        story="The client is told success before the log can no longer forget it. After a crash "
        "the log says aborted.",
        guard="TellOutcome waits for durability",
        rules="acted-after-logged",
        oracles="answer-before-durable",
        scheduler=scheduler.AnsweredEarly,
    ),
    mutant(
        "token-before-verified",
        "",
        story="Tokens leave before the log says that decode may read: text of a hand-off that "
        "nobody has accepted.",
        guard="Scheduler.tokens asks for DECODING",
        rules="whole-before-read quiet-after-end",
        oracles="token-before-verified token-order",
        scheduler=scheduler.RelaysUnverified,
        decode=decode.DecodesUnverified,
    ),
    mutant(
        "ok-before-last-token",
        "",
        story="`Finished` is accepted before every token that it counts is there: a truncated "
        "answer with success.",
        guard="Judge._take holds Finished back",
        rules="first-cause-wins",
        oracles="truncated",
        scheduler=scheduler.FinishedEarly,
    ),
    mutant(
        "settle-by-attempt",
        "",
        story="Settlement is matched by attempt instead of by grant. What an ended attempt proves "
        "is refused, and its pages never come home.",
        guard="Drained and Released are matched by grant",
        rules="bounded conservation",
        oracles="stuck leak never-quiet not-closed failed-for-nothing",
        scheduler=scheduler.SettlesByAttempt,
    ),
    mutant(
        "owner-lost-forgotten",
        "",
        story="An engine is lost with its memory. Nobody is left to release its grants, and the "
        "request never closes.",
        guard="decide puts a lost owner's grants into quarantine",
        rules="bounded conservation",
        oracles="stuck leak not-closed failed-for-nothing",
        scheduler=scheduler.OwnerLostForgotten,
    ),
    mutant(
        "unbooked",
        "",
        story="Pages are promised to nobody. Two requests each hold what the other needs.",
        guard="both legs are booked in one step",
        rules="capacity-proved bounded conservation",
        oracles="replay stuck",
        without=("conservation/promised", "capacity-proved/counted"),
        scheduler=scheduler.Unbooked,
    ),
    mutant(
        "early-proposal-final",
        "",
        story="An engine proposes what its own copy of the log does not allow yet, is refused, and "
        "takes that for final. Nothing is proposed again, and the request hangs.",
        guard="EngineCore.propose asks its own copy",
        rules="bounded conservation",
        oracles="stuck leak not-closed never-quiet failed-for-nothing",
        prefill=prefill.EarlyFinalPrefill,
        decode=decode.EarlyFinalDecode,
    ),
    mutant(
        "forgets-backfill",
        "",
        story="An engine that joins a request at a later attempt is shown what came before. When "
        "its stream breaks, a cursor beyond those entries is believed.",
        guard="Scheduler._seen",
        rules="unbroken-log",
        oracles="log-diverged",
        scheduler=scheduler.ForgetsBackfill,
    ),
)

HARMLESS = mutant(
    "harmless",
    "",
    story="Decode runs one request a step. It is slower, and nothing is wrong with it.",
    guard="none",
    rules="",
    oracles="",
    decode=decode.OneByOne,
    green=True,
)
"""What must stay green: a search that finds everything finds nothing."""

CANARY = mutant(
    "canary",
    "",
    story="A page is taken before anybody asks for one, and belongs to nobody.",
    guard="every page is free or in a grant",
    rules="conservation",
    oracles="conservation",
    decode=decode.KeepsOne,
)
"""What must be red in every run: a search that is blind here is blind."""
