"""The tally counts what a log says: each claim is one kind of event, or one law of the fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import attrs
import pytest

from engine.explorer import walk
from engine.scenarios import WORLDS
from lifecycle import tally_metrics as metrics
from lifecycle.events import (
    Aborted,
    Admitted,
    Cause,
    Drained,
    Dropped,
    Entry,
    Finished,
    Lost,
    LostCause,
    Proof,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    Requeued,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, TokenRange
from lifecycle.replay import replay
from lifecycle.state import TERMINAL, Phase
from lifecycle.tally import Tally
from lifecycle.tally_metrics import BOUNDS_NS, METRICS, Distribution, Kind, Labels, Metric, Value
from tests import handmade as hand

SEEDS = range(4)
WORLD_NAMES = ("crowded", "deadlines", "lost engines", "lying plane", "failures", "fences")


def tally_of(entries: Iterable[tuple[int, Entry]]) -> Tally:
    """The tally of these entries."""
    tally = Tally()
    for _, entry in entries:
        tally.note(entry)
    return tally


@cache
def walked(name: str, seed: int) -> tuple[tuple[int, Entry], ...]:
    """The log of a random walk through a world with faults."""
    world, _, _ = walk(WORLDS[name], seed)
    return tuple(world.stored)


def value(tally: Tally, metric: Metric, *labels: str) -> Value:
    """One value of one metric."""
    return next(f for f in tally.families() if f.metric == metric).values[labels]


def observed(tally: Tally, metric: Metric, *labels: str) -> tuple[int, int]:
    """How many observations of a distribution there are, and their sum in nanoseconds."""
    found = value(tally, metric, *labels)
    assert isinstance(found, Distribution)
    return sum(found.counts), found.sum_ns


# --- single events --------------------------------------------------------------------------------


def test_a_request_that_finishes_is_counted_once_everywhere() -> None:
    """Outcome, attempt, tokens, grants, pages, writes, proofs and checks of one whole request."""
    log = hand.decoding(hand.Log()).add(hand.growth(), Released(hand.SOURCE), hand.finished())
    log.add(Released(hand.DESTINATION), Released(hand.GROWTH))
    tally = tally_of(log.entries)
    assert value(tally, metrics.REQUESTS, "finished", "stop") == 1
    assert value(tally, metrics.ATTEMPTS, "first") == 1
    assert value(tally, metrics.ATTEMPTS, "again") == 0
    assert value(tally, metrics.PROMPT_TOKENS) == hand.PROMPT
    assert value(tally, metrics.NEW_TOKENS) == 3
    assert value(tally, metrics.GRANTS, "growth") == 1
    assert value(tally, metrics.RESERVED_PAGES, "destination") == 3
    assert value(tally, metrics.TRANSFERS) == 1
    assert value(tally, metrics.TRANSFERRED_BYTES) == 64
    assert value(tally, metrics.DRAINS, "acknowledged") == 1
    assert value(tally, metrics.RELEASED_PAGES) == 7
    assert value(tally, metrics.VERIFIED_PAGES) == 2
    assert value(tally, metrics.VERIFIED_HEADERS) == 2
    assert value(tally, metrics.VERIFIED_DIGESTS) == 2
    assert value(tally, metrics.READS_CHECKED) == 9
    assert value(tally, metrics.READS_UNCHECKED) == 0
    assert value(tally, metrics.EPOCH) == hand.EPOCH


def test_reads_that_nobody_checked_are_counted() -> None:
    """A silent skip of the check would show here, whatever the rules make of it."""
    log = hand.decoding(hand.Log(without=("read-what-was-written/all-checked",)))
    entry = log.entry(hand.finished(reads_unchecked=2))
    tally = tally_of(log.entries)
    tally.note(entry)
    assert value(tally, metrics.READS_UNCHECKED) == 2


def test_a_rejection_is_counted_by_its_code_and_is_no_attempt() -> None:
    """It owns nothing, so it is neither open nor timed."""
    tally = tally_of(hand.turned_away(hand.Log()).entries)
    assert value(tally, metrics.REQUESTS, "rejected", "queue_full") == 1
    assert value(tally, metrics.ATTEMPTS, "first") == 0
    assert sum(observed(tally, metrics.PHASE_SECONDS, p.value)[0] for p in metrics.TIMED) == 0


def test_an_isolation_violation_has_a_counter_of_its_own() -> None:
    """It is an abort like others, and somebody must be able to watch it alone."""
    log = hand.decoding(hand.Log()).add(
        Aborted(Cause.ISOLATION_VIOLATION, str(hand.DECODE), page=1, tag_expected=1, tag_found=2),
        Quarantined(hand.DESTINATION, QuarantineCause.ISOLATION),
    )
    tally = tally_of(log.entries)
    assert value(tally, metrics.ISOLATION_VIOLATIONS) == 1
    assert value(tally, metrics.REQUESTS, "aborted", "isolation_violation") == 1
    assert value(tally, metrics.QUARANTINED_PAGES, "isolation") == 3
    assert tally.quarantined(hand.DECODE)[QuarantineCause.ISOLATION] == 3


def test_a_requeue_is_counted_by_its_cause_and_the_next_attempt_as_another() -> None:
    """The relayed tokens count once, with the answer."""
    log = hand.second_decoding(hand.Log())
    log.add(Released(GrantId(hand.PREFILL, 2)), hand.finished(), Released(hand.GROWTH))
    tally = tally_of(log.entries)
    assert value(tally, metrics.REQUEUES, "out_of_pages") == 1
    assert value(tally, metrics.ATTEMPTS, "first") == value(tally, metrics.ATTEMPTS, "again") == 1
    assert value(tally, metrics.PROMPT_TOKENS) == hand.PROMPT
    assert observed(tally, metrics.PHASE_SECONDS, "requeued")[0] == 1
    assert observed(tally, metrics.PHASE_SECONDS, "admitted")[0] == 2


def test_tokens_of_earlier_attempts_belong_to_the_answer() -> None:
    """A client that got two tokens and then three has five; their first token's time is unknown."""
    log = hand.requeued_settled(hand.Log())
    log.add(
        hand.again(),
        hand.source(grant=GrantId(hand.PREFILL, 2), tokens=TokenRange(0, 8)),
        hand.destination(grant=hand.GROWTH),
        hand.transferred(0, 8, grant=hand.GROWTH),
        hand.drained(grant=hand.GROWTH),
        hand.verified(grants=(hand.GROWTH,)),
        hand.finished(),
    )
    tally = tally_of(log.entries)
    assert value(tally, metrics.NEW_TOKENS) == 5
    assert observed(tally, metrics.FIRST_TOKEN_SECONDS)[0] == 0


def test_proposals_that_fell_together_count_together() -> None:
    """The log names the first of a kind and then each doubling; the counter has them all."""
    log = hand.closed(hand.Log())
    log.add(hand.DROPPED, Dropped(hand.PREFILL, 12, "Transferred", "quiet-after-end", None, 2))
    assert value(tally_of(log.entries), metrics.DROPPED_PROPOSALS, "quiet-after-end") == 3


def test_proofs_are_counted_by_their_kind() -> None:
    """The writer's own word, and the owner's that has shut it out."""
    log = hand.ended(hand.Log()).add(hand.drained(proof=Proof.FENCED))
    tally = tally_of(log.entries)
    assert value(tally, metrics.DRAINS, "fenced") == 1
    assert value(tally, metrics.DRAINS, "acknowledged") == 0


def test_a_late_proof_brings_quarantined_pages_home() -> None:
    """What left circulation stays counted; what is out of it now goes back to nothing."""
    log = hand.closed(hand.Log())
    tally = tally_of(log.entries)
    assert value(tally, metrics.QUARANTINE_PAGES, "d0", "1", "0", "decode", "no_proof") == 3
    assert value(tally, metrics.ENGINE_PAGES, "d0", "1", "0", "decode", "quarantined") == 3
    log.add(hand.drained(), Released(hand.DESTINATION))
    tally = tally_of(log.entries)
    assert value(tally, metrics.QUARANTINE_PAGES, "d0", "1", "0", "decode", "no_proof") == 0
    assert value(tally, metrics.ENGINE_PAGES, "d0", "1", "0", "decode", "free") == hand.PAGES
    assert value(tally, metrics.QUARANTINED_PAGES, "no_proof") == 3


def test_a_lost_life_takes_its_pages_along() -> None:
    """Nobody's capacity shrinks for memory that is gone; the loss is counted by its cause."""
    log = hand.closed(hand.Log())
    log.add(Lost(hand.DECODE.engine, 1, LostCause.LEASE), request=FLEET)
    tally = tally_of(log.entries)
    assert tally.quarantine == {}
    assert tally._history.requests == {}
    assert value(tally, metrics.LOSSES, "lease") == 1
    assert value(tally, metrics.ENGINES, "decode", "attached") == 0
    pages = next(f for f in tally.families() if f.metric == metrics.ENGINE_PAGES)
    assert {labels[0] for labels in pages.values} == {"p0"}


def test_phases_are_timed_by_the_logs_own_clock() -> None:
    """Entries of the handmade log are one nanosecond apart."""
    log = hand.decoding(hand.Log()).add(hand.finished(first_token_ns=9))
    admitted_ns = next(e.time_ns for _, e in log.entries if isinstance(e.event, Admitted))
    log.add(Released(hand.SOURCE), Released(hand.DESTINATION))
    tally = tally_of(log.entries)
    assert observed(tally, metrics.PHASE_SECONDS, "admitted") == (1, 5)
    assert observed(tally, metrics.PHASE_SECONDS, "decoding") == (1, 1)
    assert observed(tally, metrics.PHASE_SECONDS, "ended") == (1, 2)
    assert observed(tally, metrics.REQUEST_SECONDS, "finished") == (1, 6)
    assert observed(tally, metrics.FIRST_TOKEN_SECONDS) == (1, 9 - admitted_ns)


def test_stages_of_a_handoff_add_up_to_the_phase() -> None:
    """Grant, writes, proof and comparison, each counted from where the last one ended."""
    log = hand.Log().add(hand.admitted(), hand.source(), hand.destination())
    log.add(hand.transferred(0, 4), hand.transferred(4, 6), hand.drained(), hand.verified())
    tally = tally_of(log.entries)
    stages = [observed(tally, metrics.HANDOFF_SECONDS, stage) for stage in metrics.STAGES]
    assert stages == [(1, 2), (1, 2), (1, 1), (1, 1)]
    assert observed(tally, metrics.PHASE_SECONDS, "admitted") == (1, 6)


def test_a_second_attempts_handoff_is_its_own() -> None:
    """Times of the attempt before are forgotten, and its late proof is none of this one's."""
    log = hand.second_decoding(hand.Log())
    tally = tally_of(log.entries[:-1])
    tally.note(attrs.evolve(log.entry(hand.drained()), time_ns=log.now_ns))
    verified = log.entries[-1][1]
    tally.note(attrs.evolve(verified, sequence=verified.sequence + 1, time_ns=log.now_ns + 1))
    stages = [observed(tally, metrics.HANDOFF_SECONDS, stage) for stage in metrics.STAGES]
    assert stages == [(1, 2), (1, 1), (1, 1), (1, 3)]


def test_a_first_token_before_its_admission_counts_as_no_wait() -> None:
    """The decode engine's clock may be behind the scheduler's; a negative wait is none."""
    log = hand.decoding(hand.Log()).add(hand.finished(first_token_ns=0))
    assert observed(tally_of(log.entries), metrics.FIRST_TOKEN_SECONDS) == (1, 0)


@pytest.mark.parametrize("bucket", range(len(BOUNDS_NS)))
def test_a_bound_belongs_to_the_bucket_that_it_closes(bucket: int) -> None:
    """As Prometheus has it: `le` means less or equal."""
    bound = BOUNDS_NS[bucket]
    assert Distribution().with_one(bound).counts[bucket] == 1
    assert Distribution().with_one(bound + 1).counts[bucket + 1] == 1


# --- laws of the fold -----------------------------------------------------------------------------


def test_every_known_series_is_there_before_anything_happened() -> None:
    """A counter that appears at 1 would look as if it had never grown."""
    for family in Tally().families():
        assert tuple(family.values) == family.metric.known
        zero = Distribution() if family.metric.kind is Kind.HISTOGRAM else 0
        assert set(family.values.values()) <= {zero}


def recounted(entries: Iterable[tuple[int, Entry]]) -> Counter[tuple[str, Labels]]:
    """The counters of requests, requeues, proofs and drops by looking at entries alone."""
    found: Counter[tuple[str, Labels]] = Counter()
    for _, entry in entries:
        event = entry.event
        found["custody_events_total", (type(event).__name__,)] += 1
        match event:
            case Rejected():
                found["custody_requests_total", ("rejected", event.code.value)] += 1
            case Aborted():
                found["custody_requests_total", ("aborted", event.cause.value)] += 1
            case Finished():
                found["custody_requests_total", ("finished", event.reason.value)] += 1
            case Requeued():
                found["custody_requeues_total", (event.cause.value,)] += 1
            case Drained():
                found["custody_drains_total", (event.proof.value,)] += 1
            case Dropped():
                found["custody_dropped_proposals_total", (event.rule,)] += event.count
            case Admitted():
                again = ("first",) if entry.attempt == 1 else ("again",)
                found["custody_attempts_total", again] += 1
    return found


COUNTED = {
    "custody_events_total",
    "custody_requests_total",
    "custody_requeues_total",
    "custody_drains_total",
    "custody_dropped_proposals_total",
    "custody_attempts_total",
}


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_on_logs_of_worlds_every_counter_equals_a_recount(name: str) -> None:
    """Faults and all: the tally and a scan of the same entries agree on every series."""
    for seed in SEEDS:
        entries = walked(name, seed)
        counted = {
            (family.metric.name, labels): count
            for family in tally_of(entries).families()
            if family.metric.name in COUNTED
            for labels, count in family.values.items()
            if count
        }
        assert counted == dict(recounted(entries))


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_on_logs_of_worlds_pages_are_the_ledgers_at_every_prefix(name: str) -> None:
    """Free, booked, held and quarantined agree with a full reduction, and causes sum up."""
    seen: set[str] = set()
    for seed in SEEDS:
        tally, history = Tally(), History()
        for _, entry in walked(name, seed):
            tally.note(entry)
            assert history.apply(entry) is None
            assert tally._history.ledger == history.ledger
            seen.add(type(entry.event).__name__)
            for party, account in history.ledger.items():
                assert sum(tally.quarantined(party).values()) == account.quarantined_pages
    assert "Released" in seen


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_on_logs_of_worlds_only_what_can_change_is_remembered(name: str) -> None:
    """Closed requests are forgotten, so that memory does not grow with the log."""
    for seed in SEEDS:
        tally = tally_of(walked(name, seed))
        phases = dict(replay(walked(name, seed)).phases)
        kept = {one.request for one in tally.quarantine.values()}
        for request, state in tally._history.requests.items():
            assert state.phase not in TERMINAL or request in kept
        for phase in metrics.TIMED:
            assert value(tally, metrics.OPEN_REQUESTS, phase.value) == phases.get(phase.value, 0)


def test_the_worlds_reach_what_is_counted() -> None:
    """The laws above are not about empty logs: every outcome, quarantine, drops, losses."""
    reached: set[str] = set()
    for name in WORLD_NAMES:
        for seed in SEEDS:
            for (_, labels), count in recounted(walked(name, seed)).items():
                reached.update(labels if count else ())
    wanted = {"finished", "aborted", "rejected", "again", "Quarantined", "Dropped", "Lost"}
    assert wanted <= reached


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_a_tally_may_start_from_a_reduced_log(name: str) -> None:
    """From any position on it shows the same levels, and the growth of every counter since."""
    for seed in SEEDS:
        entries = walked(name, seed)
        middle = len(entries) // 2
        whole, history = Tally(), History()
        for _, entry in entries[:middle]:
            whole.note(entry)
            history.apply(entry)
        late = Tally(history)
        before = {(f.metric.name, k): v for f in whole.families() for k, v in f.values.items()}
        for _, entry in entries[middle:]:
            whole.note(entry)
            late.note(entry)
        assert late.quarantine == whole.quarantine
        assert set(late._history.requests) == set(whole._history.requests)
        for one, other in zip(late.families(), whole.families(), strict=True):
            if one.metric.kind is Kind.GAUGE:
                assert one == other
            elif one.metric.kind is Kind.COUNTER:
                for labels, count in other.values.items():
                    known = before[one.metric.name, labels]
                    assert isinstance(count, int)
                    assert isinstance(known, int)
                    assert one.values[labels] == count - known


def test_what_is_shown_does_not_change_later() -> None:
    """A scrape is one moment: entries that come afterwards do not reach into it."""
    log = hand.decoding(hand.Log())
    tally = tally_of(log.entries)
    before = tally.families()
    copied = [(f.metric, dict(f.values)) for f in before]
    tally.note(log.entry(hand.finished()))
    assert [(f.metric, dict(f.values)) for f in before] == copied


def test_a_late_proof_for_a_forgotten_request_is_only_counted() -> None:
    """Nothing of a request that is gone can be opened again."""
    log = hand.decoding(hand.Log()).add(
        hand.finished(), Released(hand.SOURCE), Released(hand.DESTINATION)
    )
    tally = tally_of(log.entries)
    assert tally._history.requests == {}
    tally.note(log.entry(hand.DROPPED))
    assert tally._history.requests == {}
    assert value(tally, metrics.DROPPED_PROPOSALS, "quiet-after-end") == 1


def test_illegal_entries_are_not_counted_by_a_replay() -> None:
    """A replay hands on what it accepted, so that a broken log does not count what never was."""
    log = hand.decoding(hand.Log())
    bad = log.entry(hand.destination(grant=hand.GROWTH))
    good = log.entry(hand.finished())
    tally = Tally()
    report = replay([*log.entries, (9, bad), (10, good)], accepted=tally.note)
    assert len(report.findings) == 1
    assert value(tally, metrics.GRANTS, "destination") == 1
    assert value(tally, metrics.REQUESTS, "finished", "stop") == 1


def test_no_two_metrics_share_a_name_and_labels_fit() -> None:
    """The list can be shown as it is."""
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert all(len(labels) == len(metric.labels) for labels in metric.known)
    assert set(metrics.TIMED) | TERMINAL | {Phase.NEW} == set(Phase)
