"""Dtypes of every table that kvsim reads or writes, and what their columns mean.

A dtype here and the C struct of the same name in ``_core/types.pxd`` are one
fact written twice; `kvsim._core.state` compares them, size and offsets, when
it is imported. All rows are aligned and without implicit padding.
"""

from __future__ import annotations

import enum

import numpy as np

__all__ = [
    "ADMISSION",
    "ADMISSION_LOG",
    "BLOCK",
    "CONFIG",
    "COPY",
    "EVENT",
    "EVENT_BLOCK",
    "HANDOFF",
    "HANDOFF_RECORD",
    "HEADER",
    "HOST",
    "HOST_ENTRY",
    "LEASE",
    "NODE",
    "OFFLOAD",
    "OFFLOAD_BLOCK",
    "OFFLOAD_EVENT",
    "ORIGIN",
    "OUTPUT_RECORD",
    "PASS_RECORD",
    "PRESSURE",
    "RADIX",
    "REQUEST",
    "REQUEST_RECORD",
    "REQUEST_SPEC",
    "ROUTER_LOAD",
    "ROUTER_SHARE",
    "ROUTING_RECORD",
    "RUN",
    "SEGMENT",
    "SIGNAL",
    "TIERS",
    "TIER_BLOCK",
    "TIER_ENTRY",
    "TIER_JOB",
    "TRANSFER",
    "TRANSFER_BLOCK",
    "BlockFlag",
    "FailReason",
    "HandoffRole",
    "OffloadEventKind",
    "Pool",
    "RequestStatus",
    "StorageTier",
    "Tier",
    "TierJob",
    "TierLink",
    "TierState",
]


class RequestStatus(enum.IntEnum):
    """How a request of a run ended."""

    UNFINISHED = 0
    COMPLETED = 1
    REJECTED = 2
    FAILED = 3
    CANCELLED = 4


class Pool(enum.IntEnum):
    """Which workers of a run a row is about."""

    AGGREGATED = 0
    PREFILL = 1
    DECODE = 2


class BlockFlag(enum.IntFlag):
    """What the index of findable blocks knows of a block: the column `hashed` of `BLOCK`."""

    FINDABLE = 1  # by its hash
    NEWER = 2  # there is an older copy of the hash, which lookups take
    COPIED = 4  # the oldest of several copies
    ROOTED = 8  # found through `heads`, not through the block before it
    BRANCHED = 16  # a block behind it is, or was, found through `heads`


class HandoffRole(enum.IntEnum):
    """Which half of a handoff a live request is, and how far it is (spec/handoff.md sections 2 and 3)."""

    NONE = 0
    SOURCE_REGISTERED = 1
    SOURCE_HELD = 2
    DESTINATION_PENDING = 3
    DESTINATION_HELD = 4
    DESTINATION_ACTIVE = 5


class StorageTier(enum.IntEnum):
    """Where a block of a KV event lies."""

    DEVICE = 0
    HOST_PINNED = 1


class Tier(enum.IntEnum):
    """A KVBM tier below the device (spec/host-offload.md part B)."""

    G2 = 0
    G3 = 1
    G4 = 2


class TierLink(enum.IntEnum):
    """A link between tiers: index into the columns of TIERS that are about links."""

    G1_TO_G2 = 0
    G2_TO_G1 = 1
    G2_TO_G3 = 2
    G3_TO_G2 = 3
    G2_TO_G4 = 4
    G4_TO_G2 = 5


class TierState(enum.IntEnum):
    """How far a block of a KVBM tier is."""

    #: It has its room; its transfer waits for its turn or is on a link.
    ARRIVING = 0
    RESIDENT = 1


class TierJob(enum.IntEnum):
    """What a row of TIER_JOB is; 0 is an unused row."""

    #: What one allocation evicted; its blocks are those that need no transfer.
    OFFLOAD = 1
    #: A part of an offload on its way from the device to G2.
    BATCH = 2
    #: Blocks on their way back to the device, for a parked request.
    SWAP = 3
    #: The part of a swap that lies in G3 or G4, on its way to G2.
    STAGE = 4
    #: Blocks of G2 that are copied on to G3 or G4.
    COPY = 5


class OffloadEventKind(enum.IntEnum):
    """What an observation of the host tier tells (spec/host-offload.md section 2)."""

    STORE_PREPARED = 0
    STORE_BLOCK_MAPPINGS = 1
    STORE_SUBMITTED = 2
    STORE_COMPLETED = 3
    LOAD_QUEUED = 4
    LOAD_COMPLETED = 5
    LOAD_CANCELLED = 6
    EVICTED = 7
    CAPACITY_RETRY = 8


class FailReason(enum.IntEnum):
    """Why a request was rejected or failed."""

    NONE = 0
    #: The prompt reaches ``max_model_len``.
    MODEL_LENGTH = 1
    #: The prompt (TensorRT-LLM: prompt and output) needs more blocks than the pool has.
    POOL_TOO_SMALL = 2
    #: Generation outgrew the pool.
    OUTGREW_POOL = 3
    #: Chunked prefill is off and the prompt, or with SGLang a chunk, exceeds the token budget of a pass.
    BUDGET_TOO_SMALL = 4
    #: The policy never admits it, or names no victim when it must grow.
    NOT_ADMITTED = 5
    #: No worker was active, and none became so.
    NO_WORKER = 6
    #: It waited for something that could not happen any more.
    STALLED = 7


#: A run of prompt tokens: token ``j`` is ``(start + j * step) mod 2**32``, ``step`` in {0, 1}.
SEGMENT = np.dtype([("start", "<u4"), ("step", "<u4"), ("length", "<i8")])

#: Equal pages in a row, the content of a request for the radix engine.
RUN = np.dtype(
    [
        ("key", "<u8"),  # local hash of each page
        ("seq", "<u8"),  # sequence hash of the last page, kept only with events
        ("pages", "<i8"),  # how many
    ]
)

#: What a request asks for: read-only input of a run, one row per request in release order.
REQUEST_SPEC = np.dtype(
    [
        ("id_hi", "<u8"),  # request id, upper and lower 64 bits
        ("id_lo", "<u8"),
        ("arrival_ms", "<f8"),  # nan: released by the closed loop or by a session
        ("input_tokens", "<i8"),
        ("max_output_tokens", "<i8"),
        ("prompt_offset", "<i8"),  # first row of the prompt in `segments`, or in `tokens`
        ("prompt_count", "<i8"),  # rows of it
        ("planned_offset", "<i8"),  # first of `max_output_tokens` ids in `planned`; -1: made up by rule
        ("session", "<i4"),  # -1: none
        ("turn", "<i4"),
        ("dp_rank", "<i4"),  # -1: any
        ("prompt_is_tokens", "<i4"),  # 1: the prompt lies in `tokens`, 0: in `segments`
        ("priority", "<f8"),  # seconds of advantage in the queue of a router, below 0 as 0
        ("strict_priority", "<i8"),  # >= 0; a higher one leaves that queue first
    ]
)

#: What became of it: the per-request result of a run. Times are ms, nan where it did not happen.
REQUEST_RECORD = np.dtype(
    [
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("arrival_ms", "<f8"),
        ("tokenized_ms", "<f8"),  # left the front tokenization pool
        ("first_admit_ms", "<f8"),
        ("first_token_ms", "<f8"),
        ("second_token_ms", "<f8"),
        ("last_token_ms", "<f8"),
        ("terminal_ms", "<f8"),
        ("input_tokens", "<i8"),
        ("requested_output_tokens", "<i8"),
        ("output_tokens", "<i8"),
        ("reused_tokens", "<i8"),  # largest reuse over all admissions
        ("first_reused_tokens", "<i8"),  # reuse of the first admission
        ("recomputed_tokens", "<i8"),  # tokens computed again after preemptions
        ("admissions", "<i4"),
        ("preemptions", "<i4"),
        ("worker", "<i4"),  # -1: never placed
        ("dp_rank", "<i4"),
        ("session", "<i4"),
        ("turn", "<i4"),
        ("status", "<i4"),  # RequestStatus
        ("reason", "<i4"),  # FailReason
        ("needed", "<i8"),  # blocks or tokens that `reason` found too many, else 0
        ("row", "<i8"),  # index of the request in its workload
    ]
)

TABLE_CLASSES = 32
NUM_TIERS = 3
NUM_LINKS = 6
MAX_DRAFTS = 64

# ---------------------------------------------------------------- the arena

#: ChaCha12 generator (`rng_t` of _core/rng.pxd).
RNG = np.dtype([("key", "<u4", (8,)), ("block", "<u8"), ("words", "<u4", (16,)), ("used", "<i8")])

#: Constants of a rank, one row.
CONFIG = np.dtype(
    [
        ("num_blocks", "<i8"),
        ("block_size", "<i8"),
        ("max_model_len", "<i8"),  # 0: no limit
        ("max_running", "<i8"),  # cap of the running set
        ("budget", "<i8"),  # tokens per pass
        ("total_kv_tokens", "<i8"),  # num_blocks * block_size
        ("nextn", "<i8"),  # draft tokens, 0: no speculation
        ("speedup", "<f8"),  # divides durations, 0: unscaled
        ("decode_speedup", "<f8"),  # divides decode durations further
        ("prefill_ms", "<f8"),  # FIXED: modelled durations, scaled and rounded
        ("decode_ms", "<f8"),
        ("caching", "<i4"),
        ("chunked", "<i4"),
        ("gate", "<i4"),  # gate_kind
        ("may_preempt", "<i4"),
        ("victim", "<i4"),  # victim_kind
        ("order", "<i4"),  # order_kind
        ("worker", "<i4"),  # worker_kind
        ("timing", "<i4"),  # timing_kind
        ("recompute_last", "<i4"),  # a full hit recomputes the last block
        ("eager_samples", "<i4"),  # blocks of samples are taken at emission
        ("first_token_is_decode", "<i4"),
        ("decode_from_blocks", "<i4"),
        ("floor_every_decode", "<i4"),
        ("always_draft", "<i4"),  # drafts need neither an emission nor budget
        ("emit_events", "<i4"),
        ("ask_admission", "<i4"),  # the policy decides each admission by code
        ("ask_order", "<i4"),  # the policy orders the waiting requests
        ("giveback", "<i4"),  # cached blocks computed again for the drafter
        ("keep_locals", "<i4"),  # local hashes are kept with the content
        ("engine", "<i4"),  # engine_kind
        ("lpm", "<i4"),  # radix: longest prefix match first
        ("legacy", "<i4"),  # radix: generation `dynamo-1.3`
        ("keeps_place", "<i4"),  # paged: an activated destination waits where it came, else at the end
        ("host", "<i4"),  # paged: finished prompt blocks are written through to host memory
        ("offload", "<i4"),  # paged: there is some lower tier, of either design
        ("tiers", "<i4"),  # paged: evicted blocks go to the KVBM tiers
        ("host_blocks", "<i8"),  # blocks that fit there
        ("block_bytes", "<u8"),  # bytes that a transfer moves per block
        ("store_rate", "<f8"),  # bytes per ms towards the host, 0: instantaneous
        ("load_rate", "<f8"),  # and back
        ("tier_blocks", "<i8", (NUM_TIERS,)),  # blocks that fit into G2, G3 and G4, 0: there is no such tier
        ("offload_batch", "<i8"),  # KVBM tiers: blocks of a transfer, and transfers at a time
        ("link_rates", "<f8", (NUM_LINKS,)),  # by TierLink: bytes per ms, 0: instantaneous
        ("max_prefill", "<i8"),  # radix: computed prompt tokens per pass
        ("chunk", "<i8"),  # radix: chunk budget per pass
        ("clip", "<i8"),  # radix: output tokens reserved at most
        ("prefill_interval", "<i8"),  # radix: passes without prefill after one with
        ("init_ratio", "<f8"),  # radix: new-token ratio
        ("min_ratio", "<f8"),
        ("ratio_decay", "<f8"),
        ("accept_rates", "<f8", (MAX_DRAFTS,)),
    ]
)

#: Every scalar of a rank, one row.
HEADER = np.dtype(
    [
        ("num_running", "<i8"),
        ("num_waiting", "<i8"),
        ("num_live", "<i8"),  # rows in use
        ("high_water", "<i8"),  # rows ever used
        ("arrivals", "<i8"),  # next waiting_order
        ("passes", "<i8"),  # passes executed
        ("preemptions_total", "<i8"),
        ("capacity_generation", "<i8"),  # grows whenever capacity may have grown
        ("next_event_id", "<i8"),
        ("num_events", "<i8"),  # rows of `events` not drained
        ("num_event_blocks", "<i8"),
        ("num_free", "<i8"),  # blocks without content, on the stack
        ("num_inactive", "<i8"),  # findable blocks without references
        ("inactive_head", "<i8"),  # places of the queue ever left, and ever taken: modulo its length
        ("inactive_tail", "<i8"),
        ("num_reserved", "<i8"),  # free blocks promised inside a pass
        ("table_used", "<i8"),  # bump pointer of the block-table heap
        ("running_blocks", "<i8"),  # table entries of running requests
        ("running_completion", "<i8"),  # blocks those will have when complete
        ("queued_count", "<i8"),  # waiting, never preempted: number, sum and sum of squares of prompt lengths
        ("queued_sum", "<i8"),
        ("queued_squares", "<i8"),
        ("requeued_count", "<i8"),  # preempted or activated, and waiting: of whole lengths
        ("requeued_sum", "<i8"),
        ("requeued_squares", "<i8"),
        ("committed_prefill_tokens", "<i8"),
        ("num_held_sources", "<i8"),
        ("num_pending", "<i8"),  # destinations without capacity
        ("num_held_destinations", "<i8"),
        ("num_materialised", "<i8"),
        ("expected_sum", "<i8"),  # pending and held destinations: sum and sum of squares of prompt lengths
        ("expected_squares", "<i8"),
        ("promised_blocks", "<i8"),  # TO_COMPLETION: blocks for outputs of held and materialised destinations
        ("reserve_attempts", "<i8"),
        ("num_connector", "<i8"),  # requests in the connector queue, or parked, not in `num_waiting` ...
        ("num_asleep", "<i8"),  # ... and those of them that wait for a transfer
        ("num_transfers", "<i8"),  # prepared or on a link
        ("duration_count", "<i8"),  # Welford over pass durations
        ("duration_sum", "<f8"),
        ("duration_mean", "<f8"),
        ("duration_m2", "<f8"),
        ("waiting_head", "<i4"),
        ("waiting_tail", "<i4"),
        ("free_request", "<i4"),  # head of the list of unused rows
        ("effect_free", "<i4"),  # the last pass changed nothing
        ("pending_head", "<i4"),  # destinations without capacity, first come first served
        ("pending_tail", "<i4"),
        ("prebuilt_head", "<i4"),  # radix: materialised requests in order of activation
        ("prebuilt_tail", "<i4"),
        ("table_free", "<i4", (TABLE_CLASSES,)),  # heads of the free spans of 2**k entries
        ("rng", RNG),  # acceptance draws
    ]
)

#: A live request, 128 bytes.
REQUEST = np.dtype(
    [
        ("num_input", "<i4"),  # prompt tokens
        ("length", "<i4"),  # prompt and generated tokens
        ("limit", "<i4"),  # length at which generation is complete
        ("generated", "<i4"),
        ("computed", "<i4"),  # tokens whose KV is computed
        ("allocated", "<i4"),  # tokens the lease covers
        ("capacity", "<i4"),  # n_blocks * block_size
        ("next_seal", "<i4"),  # computing this many tokens completes a block
        ("table", "<i4"),  # first entry of its block table, -1: none
        ("n_blocks", "<i4"),  # entries in use
        ("drafts", "<i4"),  # proposed by its last emission
        ("sched_drafts", "<i4"),  # scheduled in pass `stamp`
        ("stamp", "<i8"),  # pass that scheduled it last
        ("status", "u1"),  # request_status
        ("flags", "u1"),  # request_flag
        ("table_class", "u1"),  # log2 of the span
        ("host", "u1"),  # host_flag
        ("sched_total", "<i4"),  # tokens scheduled in pass `stamp`
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("waiting_order", "<i8"),
        ("score", "<f8"),
        ("next", "<i4"),  # waiting, pending or prebuilt list, or list of unused rows
        ("prev", "<i4"),
        ("sched_prompt", "<i4"),  # prompt tokens scheduled in pass `stamp`
        ("hashed", "<i4"),  # leading blocks whose hash is known
        ("preemptions", "<i4"),
        ("cached_prefix", "<i4"),  # reuse of the first admission, -1: not admitted yet
        ("max_output", "<i4"),
        ("reused", "<i4"),  # reuse of the last admission
    ]
)

#: The half of a handoff that a request is, by request row.
HANDOFF = np.dtype(
    [
        ("handoff_hi", "<u8"),
        ("handoff_lo", "<u8"),
        ("attempted", "<i8"),  # capacity generation of the last reservation attempt, -1: none
        ("role", "<i4"),  # HandoffRole
        ("transferable", "<i4"),  # destination: prompt tokens of the blocks that were not found here
    ]
)

#: A block of the pool, 32 bytes.
BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("refs", "<i4"),
        ("place", "<i4"),  # in `inactive`, -1: not there
        ("link", "<i4"),  # block before it in its prompt; ROOTED: next in its chain; NEWER: the oldest copy, once
        ("follow", "<i4"),  # block behind it in a prompt, found through it
        ("hashed", "<i4"),  # BlockFlag, 0: not findable
        ("unused", "<i4"),
    ]
)

#: The copies of one hash in a ring, from older to newer, by block, 8 bytes; zero where there is but one.
COPY = np.dtype(
    [
        ("prev", "<i4"),
        ("next", "<i4"),
    ]
)

#: Every scalar of a host tier, one row.
HOST = np.dtype(
    [
        ("next_transfer", "<i8"),  # id of the next transfer
        ("epoch", "<i8"),  # of the last touch
        ("cohort", "<i8"),  # stamp of the last cohort
        ("progress", "<i8"),  # times that sleepers were woken
        ("num_entries", "<i8"),  # blocks in the host, pending ones included
        ("num_evictable", "<i8"),  # entries that are resident and not pinned: those of the LRU list
        ("num_pending", "<i8"),  # entries whose store has not completed
        ("entries_used", "<i8"),  # rows ever used
        ("transfers_used", "<i8"),
        ("blocks_used", "<i8"),  # bump pointer of the heap of transfer blocks
        ("num_events", "<i8"),  # observations not drained
        ("num_event_blocks", "<i8"),
        ("stored_blocks", "<i8"),  # blocks that completed stores have brought
        ("loaded_blocks", "<i8"),  # and completed loads
        ("evicted_blocks", "<i8"),
        ("device_hit_tokens", "<i8"),  # of either design: reused by first admissions, from the device
        ("lower_hit_tokens", "<i8"),  # and from below
        ("load_wait_ms", "<f8"),  # summed over requests: from the decision to load to the end of the load
        ("fence_wait_ms", "<f8"),  # summed over passes: that the computation waited for stores
        ("store_tail_ms", "<f8"),  # when the last transfer of each lane ends
        ("load_tail_ms", "<f8"),
        ("lru_head", "<i4"),  # next victim
        ("lru_tail", "<i4"),
        ("free_entry", "<i4"),  # head of the list of unused rows
        ("free_transfer", "<i4"),
        ("prepared_head", "<i4"),  # stores not on the link yet, in order of preparation
        ("prepared_tail", "<i4"),
        ("store_head", "<i4"),  # transfers on each link, in order of their ends
        ("store_tail", "<i4"),
        ("load_head", "<i4"),
        ("load_tail", "<i4"),
        ("settled_head", "<i4"),  # ended and not yet shown; empty between calls
        ("settled_tail", "<i4"),
        ("connector_head", "<i4"),  # requests that look at transfers, first come first served
        ("connector_tail", "<i4"),
        ("span_free", "<i4", (TABLE_CLASSES,)),  # heads of the free spans of 2**k transfer blocks
    ]
)

#: A block in the host, 40 bytes.
HOST_ENTRY = np.dtype(
    [
        ("hash", "<u8"),
        ("epoch", "<i8"),  # recency; equal in a cohort
        ("cohort", "<i8"),  # stamp of the last cohort it was looked at for
        ("transfer", "<i4"),  # row of the store that fills it, NO_SLOT: resident
        ("pins", "<i4"),  # loads that read it, -1: row not in use
        ("prev", "<i4"),  # LRU list, oldest first
        ("next", "<i4"),  # LRU list, or list of unused rows
        ("ahead", "<i4"),  # hint: stood a few places further on in the LRU list once, NO_SLOT: nobody did
        ("unused", "<i4"),
    ]
)

#: A transfer between device and host that has not completed, 64 bytes.
TRANSFER = np.dtype(
    [
        ("id", "<i8"),
        ("deadline_ms", "<f8"),  # when it ends, once it is on a link
        ("id_hi", "<u8"),  # request
        ("id_lo", "<u8"),
        ("first", "<i4"),  # span of the heap of transfer blocks, of 2**span_class rows
        ("count", "<i4"),  # rows in use
        ("kind", "<i4"),  # transfer_kind
        ("on_link", "<i4"),
        ("slot", "<i4"),  # row of the request; says nothing once that has ended
        ("span_class", "<i4"),
        ("prev", "<i4"),  # its list: prepared, a link, or settled
        ("next", "<i4"),  # or list of unused rows
    ]
)

#: A block of a transfer.
TRANSFER_BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("tokens_hash", "<u8"),  # store
        ("parent_hash", "<u8"),  # store, with index > 0
        ("entry", "<i4"),  # row of HOST_ENTRY; in a free span the next free span
        ("index", "<i4"),  # position in the prompt
        ("block", "<i4"),  # store: the device block it reads
        ("unused", "<i4"),
    ]
)

#: What the lower tiers know of a live request, by request row.
OFFLOAD = np.dtype(
    [
        ("progress", "<i8"),  # connector queue: asleep as long as HOST.progress is this
        ("next_store", "<i4"),  # leading prompt blocks the host was asked to take, or has
        ("latest_store", "<i4"),  # row of its newest store, NO_SLOT: none under way
        ("load", "<i4"),  # row of its load (KVBM tiers: of its swap job), NO_SLOT: none under way
        ("device_blocks", "<i4"),  # leading blocks on the device when its load was decided; -1: no load
        ("looked", "<i8"),  # HOST.next_transfer when all prompt blocks were looked up last, -1: never
        ("absent_from", "<i4"),  # prompt blocks from this one on were not in the host then
        ("unused", "<i4"),
    ]
)

#: An observation of the host tier; its blocks are `count` rows of OFFLOAD_BLOCK from `first`.
OFFLOAD_EVENT = np.dtype(
    [
        ("at_ms", "<f8"),
        ("completes_at_ms", "<f8"),  # of submitted and queued transfers, NaN for all others
        ("id_hi", "<u8"),  # request
        ("id_lo", "<u8"),
        ("transfer_id", "<i8"),  # -1: none
        ("kind", "<i4"),  # OffloadEventKind
        ("flags", "<i4"),  # 1, with CAPACITY_RETRY: the host is too small for the cohort, whatever it holds
        ("first", "<i4"),  # first row in offload_blocks
        ("count", "<i4"),
    ]
)

#: A block of an observation.
OFFLOAD_BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("index", "<i4"),  # position in the prompt
        ("unused", "<i4"),
    ]
)

#: Every scalar of the KVBM tiers, one row.
TIERS = np.dtype(
    [
        ("next_job", "<i8"),  # id of the next job
        ("entries_used", "<i8"),  # rows ever used
        ("jobs_used", "<i8"),
        ("blocks_used", "<i8"),  # bump pointer of the heap of job blocks
        ("num_entries", "<i8", (NUM_TIERS,)),  # blocks that take room in each tier
        ("num_evictable", "<i8", (NUM_TIERS,)),  # those that are resident and not pinned: those of the LRU list
        ("num_offloads", "<i8"),  # those that are not over
        ("num_running", "<i8", (NUM_TIERS,)),  # batches on the links towards each tier, until their end was settled
        ("num_quarantined", "<i8"),  # device blocks that offloads hold
        ("moved", "<i8", (NUM_LINKS,)),  # blocks carried by each link so far
        ("evicted", "<i8", (NUM_TIERS,)),  # blocks that left each tier for others
        ("parked_ms", "<f8"),  # summed over requests: from parking until its end was seen
        ("seen_ms", "<f8"),  # until when that is counted
        ("clock_ms", "<f8"),  # latest time that was looked at; nothing starts before it
        ("ended_ms", "<f8"),  # first end on G1-G2 that was not settled yet, infinity: none
        ("below_ms", "<f8"),  # the same, of this rank's transfers on the links below
        ("link_ms", "<f8", (NUM_LINKS,)),  # until when progress is accounted for
        ("link_next_ms", "<f8", (NUM_LINKS,)),  # when the next transfer of the link ends, infinity: none
        ("link_head", "<i4", (NUM_LINKS,)),  # transfers, in order of their start
        ("link_tail", "<i4", (NUM_LINKS,)),
        ("lru_head", "<i4", (NUM_TIERS,)),  # next victim
        ("lru_tail", "<i4", (NUM_TIERS,)),
        ("wait_head", "<i4", (NUM_TIERS,)),  # batches that wait for their turn towards each tier
        ("wait_tail", "<i4", (NUM_TIERS,)),
        ("free_entry", "<i4"),  # heads of the lists of unused rows
        ("free_job", "<i4"),
        ("ended_head", "<i4"),  # transfers on G1-G2 that have ended and were not settled
        ("ended_tail", "<i4"),
        ("below_head", "<i4"),  # the same, of this rank's jobs below, which may lie in tables that others share
        ("below_tail", "<i4"),
        ("done_head", "<i4"),  # swaps whose blocks have come, in order of parking; empty between calls
        ("done_tail", "<i4"),
        ("parked_head", "<i4"),  # parked requests, in order of parking
        ("parked_tail", "<i4"),
        ("span_free", "<i4", (TABLE_CLASSES,)),  # heads of the free spans of 2**k job blocks
    ]
)

#: A block in a KVBM tier, 48 bytes.
TIER_ENTRY = np.dtype(
    [
        ("hash", "<u8"),
        ("tokens_hash", "<u8"),  # with KV events, else 0
        ("parent_hash", "<u8"),
        ("tier", "<i4"),  # Tier, -1: row not in use
        ("state", "<i4"),  # TierState
        ("pins", "<i4"),  # jobs that read it
        ("flags", "<i4"),  # event_flag
        ("prev", "<i4"),  # LRU list of its tier, oldest first
        ("next", "<i4"),  # LRU list, or list of unused rows
    ]
)

#: A transfer between KVBM tiers, or what leads several, 72 bytes.
TIER_JOB = np.dtype(
    [
        ("id", "<i8"),
        ("remaining", "<f8"),  # bytes left, while on a link
        ("ended_ms", "<f8"),  # when it ended, until that is settled
        ("first", "<i4"),  # span of the heap of job blocks, of 2**span_class rows
        ("count", "<i4"),  # rows in use
        ("kind", "<i4"),  # TierJob
        ("link", "<i4"),  # TierLink, -1: on none
        ("slot", "<i4"),  # swap: row of the request, NO_SLOT: it was cancelled
        ("rank", "<i4"),  # stage and copy: number of the rank it belongs to
        ("parent", "<i4"),  # batch: row of its offload; stage: of its swap
        ("stages", "<i4"),  # offload, swap: its batches or stages that have not ended
        ("prefix", "<i4"),  # swap: leading rows that are pinned blocks of the device
        ("span_class", "<i4"),
        ("prev", "<i4"),  # its link, or its waiting list
        ("next", "<i4"),  # or list of unused rows
    ]
)

#: A block of such a job.
TIER_BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("entry", "<i4"),  # row of the block in G2; in a free span the next free span
        ("below", "<i4"),  # row of the block in G3 or G4
        ("block", "<i4"),  # device block that is read, written or pinned
        ("unused", "<i4"),
    ]
)

#: What KV events tell of a device block when it is announced below, by block.
ORIGIN = np.dtype(
    [
        ("tokens_hash", "<u8"),
        ("parent_hash", "<u8"),
        ("flags", "<i4"),  # event_flag
        ("unused", "<i4"),
    ]
)

#: What a request of the radix engine owns, by request row.
LEASE = np.dtype(
    [
        ("node", "<i4"),  # deepest node it locks, 0 (the root): none
        ("pages", "<i4"),  # pages owned, those of the tree included
        ("cached", "<i4"),  # leading pages that lie in the tree
        ("run", "<i4"),  # first run of its content behind `cached` ...
        ("run_offset", "<i8"),  # ... and pages of that run before it
        ("late", "<i4"),  # prompt too long for the model: rejected by the next pass
        ("unused", "<i4"),
    ]
)

#: A node of the radix tree and the edge that leads to it.
NODE = np.dtype(
    [
        ("last_access", "<i8"),  # logical clock
        ("ordinal", "<i8"),  # order of creation
        ("pages", "<i8"),  # on the edge
        ("parent", "<i4"),  # NO_NODE: the root, or an unused row
        ("lock_refs", "<i4"),  # leases whose path goes through here
        ("children", "<i4"),
        ("keys", "<i4"),  # first run of the edge in the heap of runs
        ("num_runs", "<i4"),
        ("span", "<i4"),  # span of that heap, of 2**span_class runs
        ("span_class", "<i4"),
        ("heap_at", "<i4"),  # place in the eviction heap, -1: not an unlocked leaf
        ("next", "<i4"),  # list of unused rows
        ("live", "<i4"),
    ]
)

#: Every scalar of a radix tree, one row.
RADIX = np.dtype(
    [
        ("available", "<i8"),  # pages that nobody owns
        ("evictable", "<i8"),  # pages of unlocked nodes
        ("protected", "<i8"),  # pages of locked nodes
        ("clock", "<i8"),  # ticks once per operation on the tree
        ("next_ordinal", "<i8"),
        ("num_nodes", "<i8"),  # rows ever used, the root included
        ("live_nodes", "<i8"),
        ("heap_size", "<i8"),
        ("runs_used", "<i8"),  # bump pointer of the heap of runs
        ("decode_passes", "<i8"),  # passes with a decoding request
        ("late_requests", "<i8"),  # waiting prompts that are too long
        ("countdown", "<i8"),  # passes that may not prefill yet
        ("new_token_ratio", "<f8"),
        ("hit_tokens", "<i8"),  # prompt tokens found in the cache by the last pass
        ("total_tokens", "<i8"),  # and those looked up
        ("free_node", "<i4"),
        ("flush", "<i4"),  # buffered events may be handed out
        ("retry", "<i4"),  # retry_kind of the last pass
        ("flushed", "<i4"),  # leading events of the buffer that were handed out
        ("run_free", "<i4", (TABLE_CLASSES,)),
    ]
)

#: A KV event; its blocks are `count` rows of EVENT_BLOCK from `first`.
EVENT = np.dtype(
    [
        ("event_id", "<i8"),
        ("parent_hash", "<u8"),
        ("at_ms", "<f8"),  # end of the pass, filled by a driver when it completes; -1 before
        ("first", "<i4"),  # first row in event_blocks
        ("count", "<i4"),
        ("kind", "<i4"),  # event_kind
        ("flags", "<i4"),  # event_flag
        ("tier", "<i4"),  # StorageTier
        ("start", "<i4"),  # position of the first block, host tier only; -1: not told
    ]
)

#: A block of a KV event.
EVENT_BLOCK = np.dtype(
    [
        ("block_hash", "<u8"),
        ("tokens_hash", "<u8"),
        ("slot", "<i4"),  # request that computed it, for its token ids
        ("index", "<i4"),  # position in that request
    ]
)

#: An output signal.
SIGNAL = np.dtype(
    [
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("slot", "<i4"),
        ("token", "<u4"),
        ("flags", "<i4"),  # signal_flag
        ("cached", "<i4"),  # with HAS_CACHED
        ("reason", "<i4"),  # fail_reason
        ("num_input", "<i4"),
        ("needed", "<i8"),  # blocks or tokens that `reason` found too many
        ("generated", "<i4"),  # tokens so far, this one included
        ("preemptions", "<i4"),
    ]
)

#: A request that entered the running set.
ADMISSION = np.dtype(
    [
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("slot", "<i4"),
        ("reused", "<i4"),
        ("device", "<i4"),  # host tier, first admission: reused tokens that were on the device; -1: not told
        ("unused", "<i4"),
    ]
)

#: A preemption, with the occupancy around it.
PRESSURE = np.dtype(
    [
        ("id_hi", "<u8"),
        ("id_lo", "<u8"),
        ("running_before", "<i4"),
        ("waiting_before", "<i4"),
        ("running_after", "<i4"),
        ("waiting_after", "<i4"),
        ("active_before", "<i8"),
        ("active_after", "<i8"),
        ("request_blocks", "<i8"),
        ("logical_available", "<i8"),  # radix only: pages free or evictable, and pages the step needed
        ("required", "<i8"),
        ("slot", "<i4"),
        ("computed", "<i4"),  # tokens whose KV it lost
    ]
)

# ---------------------------------------------------------------- logs of a run

#: One executed pass of one rank: its span and its forward-pass metrics (timing-and-fpm.md section 5).
PASS_RECORD = np.dtype(
    [
        ("start_ms", "<f8"),
        ("end_ms", "<f8"),  # of the whole group
        ("worker", "<i4"),
        ("dp_rank", "<i4"),
        ("num_prefill_requests", "<i8"),
        ("sum_prefill_tokens", "<i8"),
        ("var_prefill_length", "<f8"),
        ("sum_prefill_kv_tokens", "<i8"),
        ("num_decode_requests", "<i8"),
        ("sum_decode_kv_tokens", "<i8"),
        ("var_decode_kv_tokens", "<f8"),
        ("num_queued_prefill", "<i8"),
        ("sum_queued_prefill_tokens", "<i8"),
        ("var_queued_prefill_length", "<f8"),
        ("num_queued_decode", "<i8"),
        ("sum_queued_decode_kv_tokens", "<i8"),
        ("var_queued_decode_kv_tokens", "<f8"),
        ("active_blocks", "<i8"),
        ("inactive_blocks", "<i8"),
        ("running_requests", "<i8"),
        ("waiting_requests", "<i8"),
        ("output_tokens", "<i8"),
    ]
)

#: One admission of a request to a running set; rows in time order.
ADMISSION_LOG = np.dtype(
    [
        ("row", "<i8"),  # index of the request in its workload
        ("at_ms", "<f8"),  # start of the pass that admitted it
        ("reused_tokens", "<i8"),  # tokens found in the cache
        ("worker", "<i4"),
        ("dp_rank", "<i4"),
        ("pool", "<i4"),  # Pool
        ("device_tokens", "<i4"),  # with a host tier, first admission: those of them that the device had; -1: not told
    ]
)

#: The halves of a request in a disaggregated run, one row per row of the workload; times NaN, numbers -1: never.
HANDOFF_RECORD = np.dtype(
    [
        ("prefill_admit_ms", "<f8"),  # first admission by a prefill rank
        ("source_held_ms", "<f8"),  # its prompt is computed and held
        ("destination_reserved_ms", "<f8"),  # a decode rank owns the blocks that the prompt needs
        ("destination_activated_ms", "<f8"),  # the transfer is over, the decode rank may run it
        ("source_released_ms", "<f8"),
        ("decode_admit_ms", "<f8"),  # first admission by the decode rank
        ("decode_reused_tokens", "<i8"),  # most tokens found by an admission of the decode rank
        ("prefill_worker", "<i4"),
        ("prefill_dp_rank", "<i4"),
    ]
)

#: One placement of a request on a rank, in order of decision.
ROUTING_RECORD = np.dtype(
    [
        ("row", "<i8"),  # index of the request in its workload
        ("queue_entered_ms", "<f8"),  # NaN: placed at once
        ("released_ms", "<f8"),  # NaN: placed at once
        ("cost", "<f8"),  # of the chosen rank, NaN: the placement knows none
        ("overlap_tokens", "<i8"),  # prompt tokens the placement believes cached there
        ("overlap_blocks", "<i8"),  # -1: the placement does not look
        ("best_overlap_blocks", "<i8"),  # of any rank, -1: the placement does not look
        ("worker", "<i4"),
        ("dp_rank", "<i4"),
        ("pool", "<i4"),  # Pool
        ("unused", "<i4"),
    ]
)

# ---------------------------------------------------------------- the KV router

#: Load of one rank as the router counts it.
ROUTER_LOAD = np.dtype(
    [
        ("prefill_tokens", "<f8"),  # of its prompts that are not computed yet, less what the router believes cached
        ("blocks", "<i8"),  # different blocks that its live requests have in use
        ("requests", "<i8"),  # live
        ("worker", "<i4"),  # -1: no rank has this number
        ("dp_rank", "<i4"),
    ]
)

#: A block that several live requests of a rank have in use.
ROUTER_SHARE = np.dtype(
    [
        ("hash", "<u8"),
        ("rank", "<i4"),  # number of the rank
        ("extra", "<i4"),  # requests beyond the first, 0: empty row
    ]
)

#: One output signal of a run, in order of emission.
OUTPUT_RECORD = np.dtype(
    [
        ("row", "<i8"),  # index of the request in its workload
        ("at_ms", "<f8"),
        ("token", "<u4"),
        ("flags", "<i4"),  # signal_flag of _core/types.pxd
        ("cached", "<i4"),
        ("worker", "<i4"),
    ]
)
