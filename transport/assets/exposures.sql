-- Who was exposed to whom, asked of a log as Parquet in DuckDB.
--
--     SET VARIABLE log = 'log.parquet';
--     .read exposures.sql
--     SELECT request, since, until FROM holders WHERE engine = 'decode-0' AND first_page <= 7 AND 7 < stop_page;
--     SELECT request FROM entries JOIN open_questions USING (r) GROUP BY request;
--
-- The definition is the ordered pass over entries.  These tables clear whom they can clear for
-- certain, which in a legal log is everybody that was not requeued: a request that wrote all that
-- it read, in its place, on pages on which nobody else was active from its reservation to its last
-- read.  Everybody else is an open question, which the pass answers from the entries of those in
-- `needed`.
--
-- `place` is an entry's row in the file, which is the order of the log.  `r` is a hash of a
-- request's id: two requests that share one break each other's sequence, and are open questions.
-- Numbers are cast to BIGINT; a log with larger ones ends in an error, and the pass alone judges it.

-- Positions that are missing, and whether more is missing of which nobody knows where it was.
CREATE TEMP TABLE IF NOT EXISTS gaps (gap_first BIGINT, gap_last BIGINT);
SET VARIABLE unlocated = coalesce(getvariable('unlocated'), false);

CREATE OR REPLACE TEMP VIEW entries AS
SELECT file_row_number AS place, hash(request) AS r, request = '00000000-000000000000' AS of_fleet, *
FROM read_parquet(getvariable('log'), file_row_number = true)
WHERE record IN ('entry', 'kept');

-- The ranks whose memory the log knows, each with a short number.
CREATE OR REPLACE TEMP TABLE pools AS
WITH legs AS (
    SELECT leg.engine AS engine, leg.incarnation AS incarnation, leg.ranks AS ranks,
           leg.page_tokens AS page_tokens, min(place) AS place
    FROM (SELECT place, unnest([admitted.prefill, admitted.decode]) AS leg
          FROM entries WHERE event = 'Admitted' AND NOT of_fleet)
    GROUP BY ALL
), said AS (
    SELECT place, engine, incarnation, unnest(range(ranks::BIGINT)) AS rank, page_tokens,
           false AS joined
    FROM legs
    UNION ALL
    SELECT place, attached.engine, attached.incarnation, unnest(range(attached.ranks::BIGINT)),
           attached.page_tokens, true
    FROM entries WHERE event = 'Attached' AND of_fleet
)
SELECT row_number() OVER (ORDER BY min(place), engine, incarnation, rank)::INTEGER AS pool,
       engine, incarnation, rank, min(page_tokens)::BIGINT AS page_tokens,
       min(place) FILTER (joined) AS joined_place, min(place) FILTER (NOT joined) AS named_place,
       -- Memory that is described twice, or named before it joined, is for the pass alone.
       count(DISTINCT page_tokens) > 1 OR count(*) FILTER (joined) > 1
           OR coalesce(min(place) FILTER (NOT joined) < min(place) FILTER (joined), false) AS odd
FROM said GROUP BY engine, incarnation, rank;

-- Requests whose numbers are not 0, 1, 2 ... in the log's order.
CREATE OR REPLACE TEMP TABLE broken AS
SELECT DISTINCT r
FROM (SELECT r, sequence, lag(sequence) OVER (PARTITION BY r ORDER BY place) AS before
      FROM entries WHERE NOT of_fleet)
WHERE sequence <> coalesce(before::HUGEINT + 1, 0);

-- One row for each request, from its own entries.
CREATE OR REPLACE TEMP TABLE stories AS
SELECT r,
       r IN (SELECT r FROM broken) AS broken,
       min(place) AS first_place, max(place) AS last_place,
       arg_min(position, place)::BIGINT AS first_position,
       arg_min(time_ns, place)::BIGINT AS first_ns,
       count(*) FILTER (event = 'Admitted') AS admissions,
       min(place) FILTER (event = 'Admitted') AS admitted_place,
       count(*) FILTER (event = 'Rejected') AS rejections,
       count(*) FILTER (event = 'Requeued') AS requeues,
       count(*) FILTER (event = 'Finished') AS finishes,
       count(*) FILTER (event IN ('Finished', 'Aborted')) AS ends,
       min(place) FILTER (event IN ('Finished', 'Aborted')) AS end_place,
       max(place) FILTER (event IN ('Finished', 'Aborted', 'Requeued')) AS last_end_place,
       max(position) FILTER (event IN ('Finished', 'Aborted'))::BIGINT AS end_position,
       max(time_ns) FILTER (event IN ('Finished', 'Aborted'))::BIGINT AS end_ns,
       min(place) FILTER (event = 'Verified') AS verified_place,
       max(place) FILTER (event = 'Verified') AS verified_last_place,
       coalesce(arg_max(verified.headers_checked >= verified.pages, place)
                FILTER (event = 'Verified'), false) AS compared,
       coalesce(bool_or(verified.headers_checked >= verified.pages AND verified.pages > 0)
                FILTER (event = 'Verified'), false) AS proved,
       any_value(admitted.prompt_tokens)::BIGINT AS prompt_tokens,
       any_value(admitted.prefill.engine) AS prefill_engine,
       any_value(admitted.prefill.incarnation) AS prefill_incarnation,
       any_value(admitted.prefill.ranks) AS prefill_ranks,
       any_value(admitted.decode.engine) AS decode_engine,
       any_value(admitted.decode.incarnation) AS decode_incarnation,
       any_value(admitted.decode.ranks) AS decode_ranks,
       coalesce(any_value(finished.tokens)::BIGINT, 0) AS made,
       coalesce(any_value(finished.first_token_ns)::BIGINT, 0) AS first_token_ns,
       coalesce(any_value(finished.reads_unchecked)::BIGINT, 0) AS reads_unchecked
FROM entries WHERE NOT of_fleet
GROUP BY r;

-- Everything that happened to a grant.
CREATE OR REPLACE TEMP TABLE moves AS
WITH said AS (
    SELECT place, r, event,
           coalesce(reserved."grant".owner.engine, transferred."grant".owner.engine,
                    drained."grant".owner.engine, released."grant".owner.engine,
                    quarantined."grant".owner.engine) AS engine,
           coalesce(reserved."grant".owner.incarnation, transferred."grant".owner.incarnation,
                    drained."grant".owner.incarnation, released."grant".owner.incarnation,
                    quarantined."grant".owner.incarnation) AS incarnation,
           coalesce(reserved."grant".owner.rank, transferred."grant".owner.rank,
                    drained."grant".owner.rank, released."grant".owner.rank,
                    quarantined."grant".owner.rank) AS rank,
           coalesce(reserved."grant".serial, transferred."grant".serial, drained."grant".serial,
                    released."grant".serial, quarantined."grant".serial) AS serial,
           reserved.purpose AS purpose,
           coalesce(reserved.tokens.start, transferred.tokens.start)::BIGINT AS start,
           coalesce(reserved.tokens.stop, transferred.tokens.stop)::BIGINT AS stop,
           coalesce(reserved.pages, transferred.pages) AS pages,
           len(reserved.parties) AS parties,
           list_sum(list_transform(reserved.parties, lambda p: hash(p)::HUGEINT)) AS parties_sum,
           CASE WHEN event = 'Drained' THEN hash(drained.party)::HUGEINT END AS party
    FROM entries
    WHERE event IN ('Reserved', 'Transferred', 'Drained', 'Released', 'Quarantined')
      AND NOT of_fleet
)
SELECT said.* EXCLUDE (engine, incarnation, rank, serial), pool,
       CASE WHEN pool IS NULL THEN hash(said.engine, said.incarnation, said.rank, said.serial)
            ELSE hash(pool, said.serial) END AS g
FROM said LEFT JOIN pools USING (engine, incarnation, rank);

-- One row for each grant of each request.
CREATE OR REPLACE TEMP TABLE grants AS
WITH told AS (
    SELECT r, g, any_value(pool) AS pool,
           count(*) FILTER (event = 'Reserved') AS reservations,
           min(place) FILTER (event = 'Reserved') AS reserved_place,
           min(place) FILTER (event = 'Transferred') AS first_transfer,
           max(place) FILTER (event = 'Transferred') AS last_transfer,
           coalesce(sum(stop - start) FILTER (event = 'Transferred'), 0)::BIGINT AS used,
           count(*) FILTER (event = 'Drained') AS drains,
           sum(party) AS drains_sum,
           max(place) FILTER (event = 'Drained') AS last_drain,
           count(*) FILTER (event = 'Released') AS releases,
           min(place) FILTER (event = 'Released') AS released_place,
           min(place) FILTER (event = 'Quarantined') AS quarantined_place
    FROM moves GROUP BY r, g
)
SELECT told.* EXCLUDE (joined_place, rank, incarnation, ranks, leg_incarnation, admissions,
                       admitted_place),
       -- Its memory was known when it was reserved.
       coalesce(joined_place < reserved_place, false)
           OR coalesce(admissions = 1 AND admitted_place < reserved_place
                       AND rank < ranks AND incarnation = leg_incarnation, false) AS known
FROM (
    SELECT told.*, purpose, moves.start, moves.stop, pages, parties, parties_sum,
           pools.page_tokens, pools.joined_place, pools.rank, pools.incarnation,
           admissions, admitted_place,
           CASE pools.engine WHEN prefill_engine THEN prefill_ranks
                             WHEN decode_engine THEN decode_ranks ELSE 0 END AS ranks,
           CASE pools.engine WHEN prefill_engine THEN prefill_incarnation
                             WHEN decode_engine THEN decode_incarnation END AS leg_incarnation
    FROM told
    LEFT JOIN moves ON moves.place = told.reserved_place
    LEFT JOIN pools ON pools.pool = told.pool
    LEFT JOIN stories ON stories.r = told.r
) AS told;

-- Each transfer beside its grant: whether it lies where its tokens belong.
CREATE OR REPLACE TEMP TABLE transfers AS
WITH beside AS (
    SELECT moves.place, moves.r, moves.g, moves.pool, moves.start, moves.stop, moves.pages,
           grants.pages AS granted, grants.start AS base, page_tokens AS size,
           reservations = 1 AND reserved_place < moves.place
               AND moves.start >= grants.start AND moves.stop <= grants.stop
               AND grants.start % page_tokens = 0 AS inside
    FROM moves JOIN grants USING (r, g)
    WHERE event = 'Transferred'
), counted AS (
    SELECT *, (start - base) // size AS skip,
           CASE WHEN stop > start THEN (stop - base - 1) // size - (start - base) // size + 1
                ELSE 0 END AS count
    FROM beside
)
SELECT place, r, g, pool, start, stop, pages, base,
       coalesce(inside AND CASE
           WHEN len(pages) = 1 AND len(granted) = 1 THEN
               pages[1].first = granted[1].first + skip AND pages[1].count >= count
               AND granted[1].count >= skip + count
           ELSE
               len(flatten(list_transform(pages,
                   lambda p: range(p.first::BIGINT, (p.first + p.count)::BIGINT)))) >= count
               AND flatten(list_transform(pages,
                   lambda p: range(p.first::BIGINT, (p.first + p.count)::BIGINT)))[1:count]
               = flatten(list_transform(granted,
                   lambda p: range(p.first::BIGINT, (p.first + p.count)::BIGINT)))[skip + 1:skip + count]
           END, false) AS placed
FROM counted;

-- Destination grants whose transfers follow one another without a gap, up to a token.
CREATE OR REPLACE TEMP TABLE chains AS
SELECT r, g, bool_and(placed AND start = coalesce(before, base)) AS unbroken, max(stop) AS reached
FROM (SELECT *, lag(stop) OVER (PARTITION BY r, g ORDER BY start, stop) AS before FROM transfers)
GROUP BY r, g;

-- What a request's grants say of it: whether its one read is as simple as these tables can judge.
CREATE OR REPLACE TEMP TABLE judged AS
WITH each AS (
    SELECT grants.*, prompt_tokens, made, end_place, broken,
           greatest(coalesce(prompt_tokens, stop) - 1, 0) AS prompt,
           coalesce(unbroken, false) AS unbroken, reached,
           reserved_place < end_place AND purpose <> 'source' AS held
    FROM grants JOIN stories USING (r) LEFT JOIN chains USING (r, g)
), told AS (
    SELECT *,
           coalesce(purpose = 'destination', true) AND releases > 0 AND (broken OR NOT (
               releases = 1 AND parties = drains AND parties_sum = drains_sum
               AND last_drain < released_place
               OR releases = 1 AND coalesce(last_transfer < released_place, true)
               AND used >= least(stop, greatest(coalesce(prompt_tokens, 0) - 1, 0)) - start
           )) AS door
    FROM each
)
SELECT r,
       coalesce(bool_or(held), false) AS has_pages,
       coalesce(bool_or(door), false) AS door,
       max(used) AS handed_over,
       min(released_place) FILTER (purpose = 'source') AS source_released,
       max(last_transfer) AS last_transfer,
       -- Everything that makes a read more than this.
       bool_or(reservations <> 1 OR pool IS NULL OR NOT coalesce(known, false)
               OR coalesce(first_transfer < reserved_place, false)
               OR coalesce(last_transfer > end_place, false)
               OR purpose <> 'source' AND coalesce(released_place < end_place, false)
               OR coalesce(quarantined_place < end_place, false)
               OR used > 0 AND purpose <> 'destination'
               OR held AND purpose = 'destination' AND start < least(stop, prompt)
                  AND NOT (unbroken AND reached = least(stop, prompt))) AS odd
FROM told GROUP BY r;

-- Requests with what is known of their read.
CREATE OR REPLACE TEMP TABLE verdicts AS
SELECT stories.*, coalesce(has_pages, false) AS has_pages, coalesce(handed_over, 0) AS handed_over,
       finishes > 0 AS answered,
       finishes > 0 OR requeues > 0 OR ends > 0 AND verified_place IS NOT NULL AS reads,
       NOT compared OR reads_unchecked > 0 AS unchecked,
       broken OR coalesce(door, false)
           OR (finishes > 0 OR requeues > 0 OR ends > 0 AND verified_place IS NOT NULL) AND (
               admissions <> 1 OR admitted_place <> first_place OR rejections > 0 OR requeues > 0
               OR ends <> 1 OR coalesce(verified_last_place > end_place, false)
               OR coalesce(odd, false) OR NOT coalesce(has_pages, false)
               OR coalesce(source_released < last_transfer, false)
           ) AS open,
       coalesce(door, false) AS door,
       broken OR coalesce(source_released < last_transfer, false) AS source_reused
FROM stories LEFT JOIN judged USING (r);

-- Who was active on which pages, and when: the history of ownership.
CREATE OR REPLACE TEMP TABLE ownership AS
WITH watched AS (
    -- Memory in which nobody reads is of no interest, unless a source was copied after its release.
    SELECT DISTINCT pool FROM grants WHERE purpose = 'destination' AND pool IS NOT NULL
    UNION
    SELECT DISTINCT grants.pool FROM grants JOIN verdicts USING (r)
    WHERE source_reused AND purpose = 'source' AND grants.pool IS NOT NULL
), reserved AS (
    SELECT moves.r, moves.g, moves.pool, moves.place AS since, moves.pages,
           greatest(moves.place, coalesce(last_transfer, 0), CASE
               WHEN broken OR source_reused AND moves.purpose = 'source' THEN last_place
               WHEN NOT reads OR moves.purpose = 'source' THEN 0
               WHEN reservations = 1 THEN least(last_end_place,
                                                coalesce(released_place, last_end_place))
               ELSE last_end_place END) AS until,
           -- So many of its pages bear its own bytes from end to end, once it has ended.
           CASE WHEN open OR reservations <> 1 OR NOT coalesce(known, false) THEN 0
                WHEN moves.purpose <> 'destination' THEN 1::BIGINT << 40
                WHEN reads THEN (least(moves.stop, greatest(coalesce(prompt_tokens, 0) - 1, 0) + made)
                                 - moves.start) // page_tokens
                ELSE 0 END AS filled,
           moves.purpose <> 'source' AS readable
    FROM moves JOIN grants USING (r, g) JOIN verdicts USING (r)
    WHERE event = 'Reserved' AND moves.pool IN (SELECT pool FROM watched)
), runs AS (
    SELECT r, pool, since, until, filled, readable, unnest(pages) AS run,
           unnest(list_transform(range(len(pages)), lambda n:
               coalesce(list_sum(list_transform(pages[1:n], lambda p: p.count::BIGINT)), 0)))
               ::BIGINT AS before
    FROM reserved
), strays AS (
    -- Bytes that landed elsewhere than in their place.
    SELECT r, pool, place AS since, place AS until, unnest(pages) AS run
    FROM transfers WHERE NOT placed AND pool IN (SELECT pool FROM watched)
), pieces AS (
    SELECT r, pool, since, until, run.first::BIGINT AS first_page,
           run.first::BIGINT + least(run.count::BIGINT, filled - before) AS stop_page, true AS full_pages,
           readable
    FROM runs WHERE filled > before
    UNION ALL
    SELECT r, pool, since, until, run.first::BIGINT + greatest(0, filled - before),
           (run.first + run.count)::BIGINT, false, readable
    FROM runs WHERE filled - before < run.count::BIGINT
    UNION ALL
    SELECT r, pool, since, until, run.first::BIGINT, (run.first + run.count)::BIGINT, false,
           false
    FROM strays
)
SELECT pool, first_page, stop_page, since, until, r, full_pages, readable FROM pieces;

-- The same in words.
CREATE OR REPLACE TEMP VIEW holders AS
SELECT engine, incarnation, rank, first_page, stop_page, since, until, request
FROM ownership
JOIN pools USING (pool)
JOIN stories USING (r)
JOIN (SELECT place AS first_place, request FROM entries) USING (first_place);

-- The same, cut at every border, so that two rows are on the same pages or on none in common.
CREATE OR REPLACE TEMP TABLE borders AS
SELECT pool, page, row_number() OVER (PARTITION BY pool ORDER BY page) AS border
FROM (SELECT pool, first_page AS page FROM ownership UNION SELECT pool, stop_page FROM ownership);

CREATE OR REPLACE TEMP TABLE active AS
WITH cut AS (
    SELECT o.pool, unnest(range(a.border, z.border)) AS piece, o.since, o.until, o.r, o.full_pages,
           o.readable
    FROM ownership AS o
    JOIN borders AS a ON a.pool = o.pool AND a.page = o.first_page
    JOIN borders AS z ON z.pool = o.pool AND z.page = o.stop_page
)
SELECT pool, piece, since, r, full_pages, readable,
       coalesce(max(until) OVER (PARTITION BY pool, piece ORDER BY since
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) >= since, false)
       OR coalesce(lead(since) OVER (PARTITION BY pool, piece ORDER BY since) <= until, false)
           AS contested
FROM cut;

-- Answers that no table clears, and what no table can say more of.
CREATE OR REPLACE TEMP TABLE open_questions AS
SELECT r FROM verdicts WHERE open
UNION
SELECT r FROM active JOIN verdicts USING (r) WHERE contested AND reads AND readable
UNION
-- Nothing was compared, in a log in which others compared.
SELECT r FROM verdicts
WHERE answered AND NOT compared AND (SELECT bool_or(proved) FROM verdicts)
UNION
-- Something is missing from its time, and it did not compare all that it read.
SELECT r FROM verdicts WHERE answered AND unchecked AND getvariable('unlocated')
UNION
SELECT r FROM verdicts, gaps
WHERE answered AND unchecked AND gap_first <= end_position AND gap_last >= first_position
UNION
-- Its pages came from a grant that was given back before its writer had drained.
SELECT mine.r
FROM verdicts AS mine
JOIN active AS here ON here.r = mine.r
JOIN active AS past ON past.pool = here.pool AND past.piece = here.piece AND past.since < here.since
WHERE mine.answered AND mine.unchecked AND past.r IN (SELECT r FROM verdicts WHERE door);

-- Whose entries the pass must see in order to answer those: their own, those of whoever was active
-- beside them or wrote last before them, and the first that name each memory.
CREATE OR REPLACE TEMP TABLE needed AS
WITH ranked AS (
    SELECT *, r IN (SELECT r FROM open_questions) AS open,
           row_number() OVER (PARTITION BY pool, piece ORDER BY since) AS rank
    FROM active
    WHERE EXISTS (SELECT 1 FROM open_questions)
), following AS (
    SELECT r, contested,
           min(CASE WHEN open THEN rank END) OVER later AS next_open,
           min(CASE WHEN full_pages AND NOT contested AND NOT open THEN rank END) OVER later
               AS next_full
    FROM ranked
    WINDOW later AS (PARTITION BY pool, piece ORDER BY rank
                     ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)
)
SELECT r FROM open_questions
UNION
SELECT r FROM following WHERE contested OR coalesce(next_open <= coalesce(next_full, next_open), false)
UNION
SELECT r FROM entries WHERE NOT of_fleet AND place IN (SELECT named_place FROM pools);
