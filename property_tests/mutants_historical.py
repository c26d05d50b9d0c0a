"""The registry's first part: defects that were reported in public, for systems that do our job.

Owns: each report's story, and what it looks like here.
Must not know: how a hunt is run.
"""

from __future__ import annotations

from property_tests import mutants_decode as decode
from property_tests import mutants_prefill as prefill
from property_tests import mutants_scheduler as scheduler
from property_tests.mutants_base import Mutant, mutant
from property_tests.mutants_decode import PARTIES, RECOVERED

COVERED = "whole-before-read/covered"
RESERVED = "whole-before-read/reserved"
COMPARED = "read-what-was-written/verified"

HISTORICAL: tuple[Mutant, ...] = (
    mutant(
        "wrong-field",
        "sglang #30233, sglang #34208",
        story="A request was rejected while it waited, and the rejection was written to one field. "
        "The admission door read another one, so a placeholder prompt of one token walked on: "
        "prefill wrote one page of many, and decode read pages that held an earlier request. "
        "Here the mark is set on a request that was cancelled while it waited, and nobody reads it.",
        guard="one fact for rejection; the prompt's digest beside it; whole-before-read/reserved "
        "and /covered",
        rules="whole-before-read",
        oracles="isolation observed-foreign token-order replay",
        without=(COVERED, RESERVED),
        scheduler=scheduler.WrongField,
        prefill=prefill.WritesPlaceholder,
        decode=decode.BelievesPlaceholder,
    ),
    mutant(
        "rejected-walks",
        "sglang #30233",
        story="The rejection is logged, but the queue still holds the request and admits it later: "
        "two places say whether a request may run, and one client gets two answers.",
        guard="one-decision/table",
        rules="one-decision unbroken-log quiet-after-end bounded",
        oracles="sequencer answered-twice token-after-end stuck",
        scheduler=scheduler.RejectedWalks,
    ),
    mutant(
        "short-handoff",
        "sglang #38704",
        story="Prefill's own copy of the prompt's length was believed. It was a page short, fewer "
        "pages were written than reserved, and decode attended over what had been there before.",
        guard="whole-before-read/covered",
        rules="whole-before-read",
        oracles="isolation observed-foreign replay",
        without=(COVERED,),
        prefill=prefill.ShortHandoff,
        decode=decode.ReadsWhatCame,
    ),
    mutant(
        "aborted-requeued",
        "sglang #36988",
        story="An aborted prefill result was queued again as if it were unfinished, and went on "
        "computing and writing after the request's end.",
        guard="EngineCore.is_live",
        rules="quiet-after-end drained-is-final acted-after-logged bounded conservation "
        "drained-before-released",
        oracles="stepped-after-end late-write step-on-unheld stuck leak never-quiet replay",
        prefill=prefill.AbortedRequeued,
    ),
    mutant(
        "late-chunk",
        "sglang #36988",
        story="The delayed result of a retired request still sent its chunk, into pages that "
        "had an owner again.",
        guard="a party posts nothing after its Drained",
        rules="drained-is-final quiet-after-end acted-after-logged",
        oracles="late-write",
        prefill=prefill.LateChunk,
    ),
    mutant(
        "silent-reject",
        "sglang #38935",
        story="The other leg was not told that the request was over. It waited for a time-out of "
        "its own, 300 seconds in the report, and held its pages for nothing.",
        guard="every leg is shown every entry",
        rules="bounded conservation acted-after-logged",
        oracles="stuck leak not-closed never-quiet freed-but-held",
        scheduler=scheduler.SilentReject,
    ),
    mutant(
        "retire-owner",
        "sglang #38935",
        story="Whatever carried an abort mark was dropped at the door, although a request that "
        "came back in still owned the pages of its earlier attempt.",
        guard="requeue-keeps-resources-honest/owned",
        rules="requeue-keeps-resources-honest",
        oracles="replay stuck leak not-closed late-write step-on-unheld",
        without=("requeue-keeps-resources-honest/owned",),
        scheduler=scheduler.Reenters,
        decode=decode.AttemptForgotten,
    ),
    mutant(
        "free-on-abort",
        "sglang #24527, sglang #32564, sglang #35049",
        story="On an abort decode gave its destination pages back at once. One-sided writes that "
        "prefill had posted before landed in the next owner's pages.",
        guard=PARTIES,
        rules="drained-before-released",
        oracles="late-write replay",
        without=(PARTIES, RECOVERED),
        decode=decode.FreeOnAbort,
    ),
    mutant(
        "free-on-failure",
        "sglang #41404, sglang #38961",
        story="Only a client's abort waited for the drain. A failed transfer freed the pages at "
        "once, although another rank was still writing.",
        guard=PARTIES,
        rules="drained-before-released",
        oracles="late-write replay",
        without=(PARTIES, RECOVERED),
        decode=decode.FreeOnFailure,
    ),
    mutant(
        "free-source",
        "sglang #38961",
        story="Prefill freed what a write reads while the transfer still read it, so another "
        "request's bytes were shipped under this request's name.",
        guard="PrefillCore.post_ended gives staging back, and nothing else does",
        rules="drained-before-released conservation read-what-was-written",
        oracles="foreign-staging leak isolation",
        prefill=prefill.FreeSource,
    ),
    mutant(
        "ack-forgotten",
        "sglang #40645, sglang #38961",
        story="Cleaning up the sender forgot whom to acknowledge. Nothing was ever sent again, and "
        "the receiver held its pages for ever.",
        guard="EngineCore._settle",
        rules="bounded",
        oracles="stuck leak",
        prefill=prefill.AckForgotten,
    ),
    mutant(
        "one-ack-of-many",
        "sglang #41402, sglang #38961",
        story="Several ranks write one destination. The first acknowledgement was taken for all.",
        guard=PARTIES,
        rules="drained-before-released",
        oracles="late-write replay",
        without=(PARTIES, RECOVERED),
        decode=decode.OneAckOfMany,
    ),
    mutant(
        "stale-ack",
        "sglang #27374",
        story="An acknowledgement that belonged to an earlier attempt under the same name was "
        "taken for this attempt's. Here proofs name their grant; the mutant asks only whether the "
        "writer ever acknowledged this request.",
        guard=PARTIES,
        rules="drained-before-released current-attempt",
        oracles="late-write replay",
        without=(PARTIES, RECOVERED),
        decode=decode.StaleAck,
    ),
    mutant(
        "timer-frees",
        "sglang's default release timer",
        story="Pages of an aborted request are held until the writer acknowledges, or until a "
        "timer of 30 seconds fires. A write that is later than the timer lands in a new owner.",
        guard="time-is-no-proof/by-engine",
        rules="time-is-no-proof",
        oracles="late-write step-on-unheld read-unheld replay",
        without=(PARTIES, RECOVERED, "time-is-no-proof/by-engine", "settled-once/owner"),
        scheduler=scheduler.TimerFrees,
        decode=decode.Patient,
    ),
    mutant(
        "double-release",
        "sglang #30937, sglang #25805",
        story="Two paths released the same pages, and two requests were given one page.",
        guard="a holding is deleted where its pages are given back",
        rules="settled-once",
        oracles="allocator two-owners",
        decode=decode.DoubleRelease,
    ),
    mutant(
        "aba",
        "sglang #23346, sglang #17259",
        story="A page's tag did not change with its owner, so a stale page looked like a new one. "
        "Here every grant of a rank bears the same tag, and the plane breaks its promise.",
        guard="the random tag of a grant, compared at every read",
        rules="read-what-was-written one-owner",
        oracles="observed-foreign",
        decode=decode.OneTag,
        prefill=prefill.OneTagSource,
    ),
    mutant(
        "one-leg-capacity",
        "sglang #30326, the incident of 2026",
        story="Capacity was checked on one leg, and against the advertised context on the other. "
        "A prompt was admitted that the prefill pool can never hold.",
        guard="capacity-proved/counted",
        rules="capacity-proved",
        oracles="replay stuck",
        without=("capacity-proved/counted",),
        scheduler=scheduler.OneLegCapacity,
    ),
    mutant(
        "send-before-compute",
        "sglang #33970, sglang #31368",
        story="A chunk was sent while the forward pass that fills it was still running.",
        guard="a post needs the pass to have ended; computed-before-sent/step",
        rules="computed-before-sent",
        oracles="computed-before-sent",
        prefill=prefill.SendBeforeCompute,
    ),
    mutant(
        "kind-missing",
        "sglang #30057, sglang #32995",
        story="A hybrid model leaves more than KV behind. Only the KV was checked on arrival, and "
        "decode began with whatever the other state's memory held.",
        guard="whole-before-read/kinds",
        rules="whole-before-read",
        oracles="observed-foreign replay",
        without=("whole-before-read/kinds",),
        decode=decode.OnlyKv,
    ),
    mutant(
        "success-overwrites-abort",
        "sglang #33507",
        story="The success branch overwrote a pending abort, and one request had two outcomes.",
        guard="one-decision/table in ENDED",
        rules="first-cause-wins",
        oracles="answered-twice",
        scheduler=scheduler.SuccessOverwrites,
    ),
    mutant(
        "token-after-end",
        "sglang #34149, sglang #36333",
        story="A result that was in flight emitted its token after the abort.",
        guard="the relay forwards only while the attempt decodes",
        rules="quiet-after-end one-decision",
        oracles="token-after-end token-order ill-formed",
        scheduler=scheduler.RelaysAlways,
    ),
    mutant(
        "old-incarnation",
        "sglang #16903",
        story="A restarted engine under the same address was taken for the old one, and what the "
        "old one had said was believed.",
        guard="incarnation-fences/proposer",
        rules="incarnation-fences",
        oracles="replay late-write",
        without=("incarnation-fences/proposer",),
    ),
    mutant(
        "layout-mismatch",
        "sglang #14439, sglang #19398",
        story="Legs with different page layouts were paired, and bytes landed at wrong offsets. "
        "Here an engine restarts with another layout, and the layout it brings is not compared.",
        guard="Scheduler.attach compares layouts; compatible-legs/joined",
        rules="compatible-legs unbroken-log",
        oracles="wrong-offset replay replay-differs",
        scheduler=scheduler.AnyLayout,
    ),
    mutant(
        "partial-acquire",
        "sglang #16067",
        story="A request needs several resources. The third could not be had, and the first two "
        "were kept: they belong to nobody. Booking both legs before `Admitted` backs this up, so that "
        "pages which were promised can be had; here both are gone.",
        guard="PageAllocator.take is all or nothing; conservation/promised",
        rules="conservation capacity-proved",
        oracles="conservation replay",
        without=("conservation/promised", "capacity-proved/counted"),
        scheduler=scheduler.Unbooked,
        decode=decode.PartialAcquire,
    ),
    mutant(
        "duplicate-id",
        "sglang #40125, sglang #26486",
        story="Two live requests had one id, and each was given what belonged to the other.",
        guard="Scheduler.mint counts up",
        rules="one-decision",
        oracles="id-minted-twice sequencer",
        scheduler=scheduler.MintsTwice,
    ),
    mutant(
        "shared-flag",
        "vllm #46240, vllm #43226",
        story="One flag deferred the release for two pending transfers. The first that completed "
        "took the flag down, and the pages were free while the second still landed.",
        guard="PrefillCore._writing counts writes",
        rules="drained-is-final drained-before-released acted-after-logged bounded",
        oracles="late-write failed-for-nothing",
        prefill=prefill.SharedFlag,
    ),
)
