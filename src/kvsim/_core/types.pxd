# Integer types, enums and every struct of the arena, each field on its line.
#
# A struct here and the dtype of the same name in kvsim/layout.py are one fact
# written twice; state.pyx compares them when it is imported. Indices are
# signed, links between rows are indices, never pointers: an index survives
# copying, saving and forking.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvsim._core.rng cimport rng_t

cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    #ifdef KVSIM_CHECK
    /* A broken invariant inside a kernel: the state is wrong, going on would hide it. */
    #define KVSIM_ASSERT(condition) do { if (!(condition)) { fprintf(stderr, \\
        "kvsim: broken invariant at %s:%d: %s\\n", __FILE__, __LINE__, #condition); abort(); } } while (0)
    #else
    #define KVSIM_ASSERT(condition) ((void)0)
    #endif
    #define KVSIM_PREFETCH(address) __builtin_prefetch((const void*)(address))
    #define KVSIM_LIKELY(condition) __builtin_expect(!!(condition), 1)
    #define KVSIM_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
    """
    void CHECK "KVSIM_ASSERT"(bint condition) noexcept nogil
    void prefetch "KVSIM_PREFETCH"(const void* address) noexcept nogil
    bint likely "KVSIM_LIKELY"(bint condition) noexcept nogil
    bint unlikely "KVSIM_UNLIKELY"(bint condition) noexcept nogil

cdef enum:
    NO_SLOT = -1
    NO_BLOCK = -1
    NO_NODE = -1
    ROOT = 0
    TABLE_CLASSES = 32
    MAX_DRAFTS = 64

cdef enum request_status:
    FREE = 0       # row not in use
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3  # waiting again, has generated or computed before
    # Halves of a handoff that no pass looks at.
    HELD_SOURCE = 4          # complete, its blocks are kept for the destination
    PENDING_DESTINATION = 5  # waits for capacity
    HELD_DESTINATION = 6     # owns blocks for its prompt, whose content is on its way

cdef enum request_flag:
    SIGNALLED = 1  # its first output signal is out
    OUTGROWN = 2   # had the whole pool to itself and still could not grow
    SCORED = 4     # `score` was given by the policy
    HANDOFF = 8    # one half of a handoff: its row of `handoffs` is in use
    ACTIVATED = 16     # a destination whose prompt has arrived
    MATERIALISED = 32  # activated and not admitted yet: enters without prefill
    CROWDED = 64       # alone, it found no block for what it emits: it enters only when there is one

cdef enum block_flag:  # layout.BlockFlag
    FINDABLE = 1   # by its hash
    NEWER = 2      # there is an older copy of the hash, which lookups take
    COPIED = 4     # the oldest of several copies
    ROOTED = 8     # found through `heads`, not through the block before it
    BRANCHED = 16  # a block behind it is, or was, found through `heads`

cdef enum host_flag:
    CONNECTOR = 1  # waits in the queue of those that look at transfers
    UNSTORED = 2   # has complete prompt blocks that the host was not asked to take
    DEPENDENT = 4  # KVBM tiers: waits until evicted blocks have left the device
    PARKED = 8     # KVBM tiers: its blocks are being loaded, it is in no queue

cdef enum handoff_role:
    NO_ROLE = 0
    SOURCE_REGISTERED = 1
    SOURCE_HELD = 2
    DESTINATION_PENDING = 3
    DESTINATION_HELD = 4
    DESTINATION_ACTIVE = 5

cdef enum engine_kind:
    PAGED = 0      # vLLM, TensorRT-LLM
    RADIX = 1      # SGLang

cdef enum gate_kind:
    FULL_ISL = 0       # the whole known sequence must fit (vLLM)
    TO_COMPLETION = 1  # prompt and all outputs are reserved (TensorRT-LLM)

cdef enum victim_kind:
    NEWEST = 0
    OLDEST = 1
    ASK_VICTIM = 2  # a policy orders the victims

cdef enum order_kind:
    ARRIVAL = 0
    BY_SCORE = 1

cdef enum worker_kind:
    AGGREGATED = 0
    PREFILL = 1
    DECODE = 2

cdef enum timing_kind:
    FIXED = 0
    POLYNOMIAL = 1
    PROFILE = 2
    CALLABLE = 3

cdef enum retry_kind:  # why a radix pass at the same instant may differ from one that did nothing
    RETRY_RATIO = 1         # the new-token ratio moved
    RETRY_COUNTDOWN = 2     # prefill had to wait for the interval

cdef enum event_kind:
    STORED = 0
    REMOVED = 1

cdef enum event_flag:
    HAS_PARENT = 1

cdef enum storage_tier:  # layout.StorageTier
    DEVICE = 0
    HOST_PINNED = 1

cdef enum transfer_kind:
    NO_TRANSFER = 0
    STORE = 1      # device to host
    LOAD = 2       # host to device

cdef enum:
    NUM_TIERS = 3  # below the device: G2, G3, G4
    NUM_LINKS = 6

cdef enum:  # layout.Tier
    G2 = 0
    G3 = 1
    G4 = 2

cdef enum:  # layout.TierLink; those of G3 and G4 may be shared by several ranks
    G1_TO_G2 = 0
    G2_TO_G1 = 1
    G2_TO_G3 = 2
    G3_TO_G2 = 3
    G2_TO_G4 = 4
    G4_TO_G2 = 5

cdef enum tier_state:
    ARRIVING = 0   # it has its room, its transfer waits or is on a link
    RESIDENT = 1

cdef enum job_kind:
    NO_JOB = 0
    OFFLOAD_JOB = 1  # what one allocation evicted; its blocks are those that need no transfer
    BATCH_JOB = 2    # a part of an offload on its way to G2
    SWAP_JOB = 3     # blocks on their way back to the device, for a parked request
    STAGE_JOB = 4    # the part of a swap that comes from G3 or G4, on its way to G2
    COPY_JOB = 5     # blocks of G2 copied on to G3 or G4

cdef enum offload_event_kind:  # layout.OffloadEventKind
    STORE_PREPARED = 0
    STORE_BLOCK_MAPPINGS = 1
    STORE_SUBMITTED = 2
    STORE_COMPLETED = 3
    LOAD_QUEUED = 4
    LOAD_COMPLETED = 5
    LOAD_CANCELLED = 6
    EVICTED = 7
    CAPACITY_RETRY = 8

cdef enum offload_event_flag:
    UNFITTABLE = 1  # with CAPACITY_RETRY: the host is too small for the cohort, whatever it holds

cdef enum signal_flag:
    HAS_TOKEN = 1
    COMPLETED = 2
    REJECTED = 4
    FAILED = 8
    HAS_CACHED = 16
    HELD = 32      # with COMPLETED: a source, whose blocks are kept

cdef enum fail_reason:
    NO_REASON = 0
    MODEL_LENGTH = 1
    POOL_TOO_SMALL = 2
    OUTGREW_POOL = 3
    BUDGET_TOO_SMALL = 4
    NOT_ADMITTED = 5
    NO_WORKER = 6    # the driver's
    STALLED = 7      # the driver's

cdef enum growable:  # what `rank_t.grow` is asked to enlarge
    GROW_REQUESTS = 0
    GROW_TABLES = 1
    GROW_EVENTS = 2
    GROW_EVENT_BLOCKS = 3
    GROW_SIGNALS = 4
    GROW_PRESSURES = 5
    GROW_NODES = 6
    GROW_RUNS = 7
    GROW_HOST_ENTRIES = 8
    GROW_TRANSFERS = 9
    GROW_TRANSFER_BLOCKS = 10
    GROW_OFFLOAD_EVENTS = 11
    GROW_OFFLOAD_BLOCKS = 12
    GROW_TIER_ENTRIES = 13
    GROW_TIER_JOBS = 14
    GROW_TIER_BLOCKS = 15

cdef enum pass_status:
    PASS_OK = 0
    PASS_FAILED = -1  # a Python callback raised; the exception is kept by the owner

cdef struct config_t:  # constants of the rank; one row
    int64_t num_blocks
    int64_t block_size
    int64_t max_model_len         # 0: no limit
    int64_t max_running           # cap of the running set
    int64_t budget                # tokens per pass
    int64_t total_kv_tokens       # num_blocks * block_size
    int64_t nextn                 # draft tokens, 0: no speculation
    double speedup                # divides durations, 0: unscaled
    double decode_speedup         # divides decode durations further
    double prefill_ms             # FIXED: modelled durations, scaled and rounded
    double decode_ms
    int32_t caching
    int32_t chunked
    int32_t gate                  # gate_kind
    int32_t may_preempt
    int32_t victim                # victim_kind
    int32_t order                 # order_kind
    int32_t worker                # worker_kind
    int32_t timing                # timing_kind
    int32_t recompute_last        # a full hit recomputes the last block
    int32_t eager_samples         # blocks of samples are taken at emission
    int32_t first_token_is_decode
    int32_t decode_from_blocks
    int32_t floor_every_decode
    int32_t always_draft          # drafts need neither an emission nor budget
    int32_t emit_events
    int32_t ask_admission         # the policy decides each admission by code
    int32_t ask_order             # the policy orders the waiting requests
    int32_t giveback              # cached blocks computed again for the drafter
    int32_t keep_locals           # local hashes are kept with the content
    int32_t engine                # engine_kind
    int32_t lpm                   # radix: longest prefix match first
    int32_t legacy                # radix: generation `dynamo-1.3`
    int32_t keeps_place           # paged: an activated destination waits where it came, else at the end
    int32_t host                  # paged: finished prompt blocks are written through to host memory
    int32_t offload               # paged: there is some lower tier, of either design
    int32_t tiers                 # paged: evicted blocks go to the KVBM tiers
    int64_t host_blocks           # blocks that fit there
    uint64_t block_bytes          # bytes that a transfer moves per block
    double store_rate             # bytes per ms towards the host, 0: instantaneous
    double load_rate              # and back
    int64_t tier_blocks[NUM_TIERS]    # KVBM tiers: blocks that fit into G2, G3 and G4, 0: there is no such tier
    int64_t offload_batch         # blocks of a transfer, and transfers at a time
    double link_rates[NUM_LINKS]  # bytes per ms, 0: instantaneous
    int64_t max_prefill           # radix: computed prompt tokens per pass
    int64_t chunk                 # radix: chunk budget per pass
    int64_t clip                  # radix: output tokens reserved at most
    int64_t prefill_interval      # radix: passes without prefill after one with
    double init_ratio             # radix: new-token ratio
    double min_ratio
    double ratio_decay
    double accept_rates[MAX_DRAFTS]

cdef struct header_t:  # every scalar of the rank; one row
    int64_t num_running
    int64_t num_waiting
    int64_t num_live              # rows in use
    int64_t high_water            # rows ever used
    int64_t arrivals              # next waiting_order
    int64_t passes                # passes executed
    int64_t preemptions_total
    int64_t capacity_generation   # grows whenever capacity may have grown
    int64_t next_event_id
    int64_t num_events            # rows of `events` not drained
    int64_t num_event_blocks
    int64_t num_free              # blocks without content, on the stack
    int64_t num_inactive          # findable blocks without references
    int64_t inactive_head         # places of the queue ever left, and ever taken: modulo its length
    int64_t inactive_tail
    int64_t num_reserved          # free blocks promised inside a pass
    int64_t table_used            # bump pointer of the block-table heap
    int64_t running_blocks        # table entries of running requests
    int64_t running_completion    # blocks those will have when complete
    int64_t queued_count          # waiting, never preempted: number, sum and sum of squares of prompt lengths
    int64_t queued_sum
    int64_t queued_squares
    int64_t requeued_count        # preempted or activated, and waiting: of whole lengths
    int64_t requeued_sum
    int64_t requeued_squares
    int64_t committed_prefill_tokens
    int64_t num_held_sources
    int64_t num_pending           # destinations without capacity
    int64_t num_held_destinations
    int64_t num_materialised
    int64_t expected_sum          # pending and held destinations: sum and sum of squares of prompt lengths
    int64_t expected_squares
    int64_t promised_blocks       # TO_COMPLETION: blocks for outputs of held and materialised destinations
    int64_t reserve_attempts
    int64_t num_connector         # requests in the connector queue, or parked, not in `num_waiting` ...
    int64_t num_asleep            # ... and those of them that wait for a transfer
    int64_t num_transfers         # prepared or on a link
    int64_t duration_count        # Welford over pass durations
    double duration_sum
    double duration_mean
    double duration_m2
    int32_t waiting_head
    int32_t waiting_tail
    int32_t free_request          # head of the list of unused rows
    int32_t effect_free           # the last pass changed nothing
    int32_t pending_head          # destinations without capacity, first come first served
    int32_t pending_tail
    int32_t prebuilt_head         # radix: materialised requests in order of activation
    int32_t prebuilt_tail
    int32_t table_free[TABLE_CLASSES]  # heads of the free spans of 2**k entries
    rng_t rng                     # acceptance draws

cdef struct request_t:  # 128 bytes: what a decode step touches lies in the first 64
    int32_t num_input             # prompt tokens
    int32_t length                # prompt and generated tokens
    int32_t limit                 # length at which generation is complete
    int32_t generated
    int32_t computed              # tokens whose KV is computed
    int32_t allocated             # tokens the lease covers
    int32_t capacity              # n_blocks * block_size
    int32_t next_seal             # computing this many tokens completes a block
    int32_t table                 # first entry of its block table, -1: none
    int32_t n_blocks              # entries in use
    int32_t drafts                # proposed by its last emission
    int32_t sched_drafts          # scheduled in pass `stamp`
    int64_t stamp                 # pass that scheduled it last
    uint8_t status                # request_status
    uint8_t flags                 # request_flag
    uint8_t table_class           # log2 of the span
    uint8_t host                  # host_flag
    int32_t sched_total           # tokens scheduled in pass `stamp`
    uint64_t id_hi
    uint64_t id_lo
    int64_t waiting_order
    double score
    int32_t next                  # waiting, pending or prebuilt list, or list of unused rows
    int32_t prev
    int32_t sched_prompt          # prompt tokens scheduled in pass `stamp`
    int32_t hashed                # leading blocks whose hash is known
    int32_t preemptions
    int32_t cached_prefix         # reuse of the first admission, -1: not admitted yet
    int32_t max_output
    int32_t reused                # reuse of the last admission

cdef struct handoff_t:  # the half of a handoff that a request is, by request row; 32 bytes
    uint64_t handoff_hi
    uint64_t handoff_lo
    int64_t attempted             # capacity generation of the last reservation attempt, -1: none
    int32_t role                  # handoff_role
    int32_t transferable          # destination: prompt tokens of the blocks that were not found here

cdef struct block_t:  # 32 bytes
    uint64_t hash
    int32_t refs
    int32_t place                 # in `inactive`, NO_BLOCK: not there
    int32_t link                  # block before it in its prompt; ROOTED: next in its chain; NEWER: the oldest copy, once
    int32_t follow                # block behind it in a prompt, found through it
    int32_t hashed                # block_flag, 0: not findable
    int32_t unused

cdef struct copy_t:  # 8 bytes: ring of the copies of one hash, from older to newer; zero where there is but one
    int32_t prev
    int32_t next

cdef struct host_t:  # host tier: its scalars; one row
    int64_t next_transfer         # id of the next transfer
    int64_t epoch                 # of the last touch
    int64_t cohort                # stamp of the last cohort
    int64_t progress              # times that sleepers were woken
    int64_t num_entries           # blocks in the host, pending ones included
    int64_t num_evictable         # entries that are resident and not pinned: those of the LRU list
    int64_t num_pending           # entries whose store has not completed
    int64_t entries_used          # rows ever used
    int64_t transfers_used
    int64_t blocks_used           # bump pointer of the heap of transfer blocks
    int64_t num_events            # observations not drained
    int64_t num_event_blocks
    int64_t stored_blocks         # blocks that completed stores have brought
    int64_t loaded_blocks         # and completed loads
    int64_t evicted_blocks
    int64_t device_hit_tokens     # of either design: reused by first admissions, from the device
    int64_t lower_hit_tokens      # and from below
    double load_wait_ms           # summed over requests: from the decision to load to the end of the load
    double fence_wait_ms          # summed over passes: that the computation waited for stores
    double store_tail_ms          # when the last transfer of each lane ends
    double load_tail_ms
    int32_t lru_head              # next victim
    int32_t lru_tail
    int32_t free_entry            # head of the list of unused rows
    int32_t free_transfer
    int32_t prepared_head         # stores not on the link yet, in order of preparation
    int32_t prepared_tail
    int32_t store_head            # transfers on each link, in order of their ends
    int32_t store_tail
    int32_t load_head
    int32_t load_tail
    int32_t settled_head          # ended and not yet shown; empty between calls
    int32_t settled_tail
    int32_t connector_head        # requests that look at transfers, first come first served
    int32_t connector_tail
    int32_t span_free[TABLE_CLASSES]  # heads of the free spans of 2**k transfer blocks

cdef struct host_entry_t:  # a block in the host; 48 bytes
    uint64_t hash
    int64_t epoch                 # recency; equal in a cohort
    int64_t cohort                # stamp of the last cohort it was looked at for
    int32_t transfer              # row of the store that fills it, NO_SLOT: resident
    int32_t pins                  # loads that read it, -1: row not in use
    int32_t prev                  # LRU list, oldest first
    int32_t next                  # LRU list, or list of unused rows
    int32_t ahead                 # hint: stood a few places further on in the LRU list once, NO_SLOT: nobody did
    int32_t unused

cdef struct transfer_t:  # 64 bytes
    int64_t id
    double deadline_ms            # when it ends, once it is on a link
    uint64_t id_hi                # request
    uint64_t id_lo
    int32_t first                 # span of the heap of transfer blocks, of 2**span_class rows
    int32_t count                 # rows in use
    int32_t kind                  # transfer_kind
    int32_t on_link
    int32_t slot                  # row of the request; says nothing once that has ended
    int32_t span_class
    int32_t prev                  # its list: prepared, a link, or settled
    int32_t next                  # or list of unused rows

cdef struct transfer_block_t:  # 40 bytes
    uint64_t hash
    uint64_t tokens_hash          # store
    uint64_t parent_hash          # store, with index > 0
    int32_t entry                 # row of `host_entries`; in a free span the next free span
    int32_t index                 # position in the prompt
    int32_t block                 # store: the device block it reads
    int32_t unused

cdef struct offload_t:  # what the lower tiers know of a request, by request row; 40 bytes
    int64_t progress              # connector queue: asleep as long as `host_t.progress` is this
    int32_t next_store            # leading prompt blocks the host was asked to take, or has
    int32_t latest_store          # row of its newest store, NO_SLOT: none under way
    int32_t load                  # row of its load (tiers: of its swap job), NO_SLOT: none under way
    int32_t device_blocks         # leading blocks found on the device when its load was decided; -1: no load waits for admission
    int64_t looked                # `host_t.next_transfer` when all prompt blocks were looked up last, -1: never
    int32_t absent_from           # prompt blocks from this one on were not in the host then
    int32_t unused

cdef struct offload_event_t:  # an observation
    double at_ms
    double completes_at_ms        # of submitted and queued transfers, NaN for all others
    uint64_t id_hi                # request
    uint64_t id_lo
    int64_t transfer_id           # -1: none
    int32_t kind                  # offload_event_kind
    int32_t flags                 # offload_event_flag
    int32_t first                 # first row in offload_blocks
    int32_t count

cdef struct offload_block_t:
    uint64_t hash
    int32_t index                 # position in the prompt
    int32_t unused

cdef struct tiers_t:  # KVBM tiers: their scalars; one row
    int64_t next_job              # id of the next job
    int64_t entries_used          # rows ever used
    int64_t jobs_used
    int64_t blocks_used           # bump pointer of the heap of job blocks
    int64_t num_entries[NUM_TIERS]    # blocks that take room in each tier
    int64_t num_evictable[NUM_TIERS]  # those of them that are resident and not pinned: those of the LRU list
    int64_t num_offloads          # those that are not over
    int64_t num_running[NUM_TIERS]    # batches on the links towards each tier, until their end was settled
    int64_t num_quarantined       # device blocks that offloads hold
    int64_t moved[NUM_LINKS]      # blocks carried by each link so far
    int64_t evicted[NUM_TIERS]    # blocks that left each tier for others
    double parked_ms              # summed over requests: from parking until its end was seen
    double seen_ms                # until when that is counted
    double clock_ms               # latest time that was looked at; nothing starts before it
    double ended_ms               # first end on G1-G2 that was not settled yet, infinity: none
    double below_ms               # the same, of this rank's transfers on the links below
    double link_ms[NUM_LINKS]     # until when progress is accounted for
    double link_next_ms[NUM_LINKS]    # when the next transfer of the link ends, infinity: none
    int32_t link_head[NUM_LINKS]  # transfers, in order of their start
    int32_t link_tail[NUM_LINKS]
    int32_t lru_head[NUM_TIERS]   # next victim
    int32_t lru_tail[NUM_TIERS]
    int32_t wait_head[NUM_TIERS]  # batches that wait for their turn towards each tier
    int32_t wait_tail[NUM_TIERS]
    int32_t free_entry            # heads of the lists of unused rows
    int32_t free_job
    int32_t ended_head            # transfers on G1-G2 that have ended and were not settled
    int32_t ended_tail
    int32_t below_head            # the same, of this rank's jobs in the tables of `rank_t.deep`
    int32_t below_tail
    int32_t done_head             # swaps whose blocks have come, in order of parking; empty between calls
    int32_t done_tail
    int32_t parked_head           # parked requests, in order of parking
    int32_t parked_tail
    int32_t span_free[TABLE_CLASSES]  # heads of the free spans of 2**k job blocks

cdef struct tier_entry_t:  # a block in a lower tier; 48 bytes
    uint64_t hash
    uint64_t tokens_hash          # with KV events, else 0
    uint64_t parent_hash
    int32_t tier                  # layout.Tier, -1: row not in use
    int32_t state                 # tier_state
    int32_t pins                  # jobs that read it
    int32_t flags                 # event_flag
    int32_t prev                  # LRU list of its tier, oldest first
    int32_t next                  # LRU list, or list of unused rows

cdef struct tier_job_t:  # a transfer, or what leads several; 72 bytes
    int64_t id
    double remaining              # bytes left, while on a link
    double ended_ms               # when it ended, until that is settled
    int32_t first                 # span of the heap of job blocks, of 2**span_class rows
    int32_t count                 # rows in use
    int32_t kind                  # job_kind
    int32_t link                  # layout.TierLink, -1: on none
    int32_t slot                  # swap: row of the request, NO_SLOT: it was cancelled
    int32_t rank                  # stage and copy: number of the rank it belongs to
    int32_t parent                # batch: row of its offload; stage: of its swap
    int32_t stages                # offload, swap: its batches or stages that have not ended
    int32_t prefix                # swap: leading rows that are pinned blocks of the device
    int32_t span_class
    int32_t prev                  # its link, or its waiting list
    int32_t next                  # or list of unused rows

cdef struct tier_block_t:  # 24 bytes
    uint64_t hash
    int32_t entry                 # row of the block in G2; in a free span the next free span
    int32_t below                 # row of the block in G3 or G4
    int32_t block                 # device block that is read, written or pinned
    int32_t unused

cdef struct origin_t:  # what KV events tell of a device block, by block; 24 bytes
    uint64_t tokens_hash
    uint64_t parent_hash
    int32_t flags                 # event_flag
    int32_t unused

cdef struct lease_t:  # radix engine: what a request owns, by request row; 32 bytes
    int32_t node                  # deepest node it locks, 0 (the root): none
    int32_t pages                 # pages owned, those of the tree included
    int32_t cached                # leading pages that lie in the tree
    int32_t run                   # first run of its content behind `cached` ...
    int64_t run_offset            # ... and pages of that run before it
    int32_t late                  # prompt too long for the model: rejected by the next pass
    int32_t unused

cdef struct node_t:  # radix engine: an edge of the tree and the node at its end; 64 bytes
    int64_t last_access           # logical clock
    int64_t ordinal               # order of creation
    int64_t pages                 # on the edge
    int32_t parent                # NO_NODE: the root, or an unused row
    int32_t lock_refs             # leases whose path goes through here
    int32_t children
    int32_t keys                  # first run of the edge in the heap of runs
    int32_t num_runs
    int32_t span                  # span of that heap, of 2**span_class runs
    int32_t span_class
    int32_t heap_at               # place in the eviction heap, -1: not an unlocked leaf
    int32_t next                  # list of unused rows
    int32_t live

cdef struct radix_t:  # radix engine: its scalars; one row
    int64_t available             # pages that nobody owns
    int64_t evictable             # pages of unlocked nodes
    int64_t protected             # pages of locked nodes
    int64_t clock                 # ticks once per operation on the tree
    int64_t next_ordinal
    int64_t num_nodes             # rows ever used, the root included
    int64_t live_nodes
    int64_t heap_size
    int64_t runs_used             # bump pointer of the heap of runs
    int64_t decode_passes         # passes with a decoding request
    int64_t late_requests         # waiting prompts that are too long
    int64_t countdown             # passes that may not prefill yet
    double new_token_ratio
    int64_t hit_tokens            # prompt tokens found in the cache by the last pass
    int64_t total_tokens          # and those looked up
    int32_t free_node
    int32_t flush                 # buffered events may be handed out
    int32_t retry                 # retry_kind of the last pass
    int32_t flushed               # leading events of the buffer that were handed out
    int32_t run_free[TABLE_CLASSES]

cdef struct event_t:
    int64_t event_id
    uint64_t parent_hash
    double at_ms                  # end of the pass, filled by a driver when it completes; -1 before
    int32_t first                 # first row in event_blocks
    int32_t count
    int32_t kind                  # event_kind
    int32_t flags                 # event_flag
    int32_t tier                  # storage_tier
    int32_t start                 # position of the first block, host tier only; -1: not told

cdef struct event_block_t:
    uint64_t block_hash
    uint64_t tokens_hash
    int32_t slot                  # request that computed it, for its token ids
    int32_t index                 # position in that request

cdef struct signal_t:  # one output signal of a pass
    uint64_t id_hi
    uint64_t id_lo
    int32_t slot
    uint32_t token
    int32_t flags                 # signal_flag
    int32_t cached                # with HAS_CACHED
    int32_t reason                # fail_reason
    int32_t num_input
    int64_t needed                # blocks or tokens that `reason` found too many
    int32_t generated             # tokens so far, this one included
    int32_t preemptions

cdef struct admission_t:
    uint64_t id_hi
    uint64_t id_lo
    int32_t slot
    int32_t reused
    int32_t device                # host tier, first admission: reused tokens that were on the device; -1: not told
    int32_t unused

cdef struct pressure_t:
    uint64_t id_hi
    uint64_t id_lo
    int32_t running_before
    int32_t waiting_before
    int32_t running_after
    int32_t waiting_after
    int64_t active_before
    int64_t active_after
    int64_t request_blocks
    int64_t logical_available     # radix only: pages free or evictable, and pages the step needed
    int64_t required
    int32_t slot
    int32_t computed              # tokens whose KV it lost

cdef struct moments_t:  # integer sums of one group of requests
    int64_t count
    int64_t sum
    int64_t squares

cdef struct pass_t:  # the pass being executed, scratch
    double start_ms
    double prefill_ms
    double decode_ms
    double end_ms
    double not_before_ms          # host tier: computes no earlier than this
    int64_t budget
    int64_t prefill_count         # prompts in the prefill batch, with their sums
    int64_t prefill_isl
    int64_t prefill_prefix
    moments_t prefill             # full prompt lengths of scheduled prefills
    int64_t prefill_tokens
    int64_t prefill_kv_tokens
    moments_t decode              # lengths of scheduled decodes
    int64_t scheduled             # requests scheduled
    int64_t coasting              # requests that emit one token each without standing in `ready`
    int64_t completed
    int64_t visible               # non-rejected signals, and distinct requests among them
    int64_t visible_requests
    int64_t admitted              # radix: prompts and chunks of this pass, those without work too
    int64_t reserved              # radix: pages held for the tokens of this pass
    double ratio_before           # radix: new-token ratio when the pass began
    int32_t preempted_any
    int32_t num_ready
    int32_t num_ending            # leading entries of `hits`: who coasted and ends in this pass
    int32_t num_terminal
    int32_t num_retracted
    int32_t deferred              # radix: prefill had to wait
    int32_t out_of_pool           # radix, 1.3: the pool refused what the budgets let pass
    int32_t deferrals             # host tier: requests that went to sleep
    int32_t connector             # host tier: first of the connector queue that was not looked at in this pass
    int32_t offloading            # KVBM tiers: blocks were refused because they are on their way out
    int32_t ticked                # KVBM tiers: transfers that ended when the pass began changed something visible
    int32_t emitted               # KVBM tiers: the tokens are out already

cdef struct coast_t:  # coast.pxd: the leading entries of `running` whose rows stand still
    int64_t count
    int64_t sum                   # of their lengths now, and of the squares
    int64_t squares
    int64_t wheel_at              # radix: entry of `wheel` for the next step
    int32_t tick                  # passes since the first of them joined
    int32_t next_due              # no entry of `due` is earlier
    int32_t wanted                # whoever drives the rank lets requests coast
    int32_t unused

cdef struct request_spec_t:  # layout.REQUEST_SPEC
    uint64_t id_hi
    uint64_t id_lo
    double arrival_ms
    int64_t input_tokens
    int64_t max_output_tokens
    int64_t prompt_offset
    int64_t prompt_count
    int64_t planned_offset
    int32_t session
    int32_t turn
    int32_t dp_rank
    int32_t prompt_is_tokens
    double priority
    int64_t strict_priority

cdef struct request_record_t:  # layout.REQUEST_RECORD
    uint64_t id_hi
    uint64_t id_lo
    double arrival_ms
    double tokenized_ms
    double first_admit_ms
    double first_token_ms
    double second_token_ms
    double last_token_ms
    double terminal_ms
    int64_t input_tokens
    int64_t requested_output_tokens
    int64_t output_tokens
    int64_t reused_tokens
    int64_t first_reused_tokens
    int64_t recomputed_tokens
    int32_t admissions
    int32_t preemptions
    int32_t worker
    int32_t dp_rank
    int32_t session
    int32_t turn
    int32_t status                # run_status
    int32_t reason                # fail_reason
    int64_t needed
    int64_t row

cdef struct handoff_record_t:  # layout.HANDOFF_RECORD
    double prefill_admit_ms
    double source_held_ms
    double destination_reserved_ms
    double destination_activated_ms
    double source_released_ms
    double decode_admit_ms
    int64_t decode_reused_tokens
    int32_t prefill_worker
    int32_t prefill_dp_rank

cdef enum pool_kind:  # layout.Pool
    POOL_AGGREGATED = 0
    POOL_PREFILL = 1
    POOL_DECODE = 2

cdef enum run_status:  # layout.RequestStatus
    RUN_UNFINISHED = 0
    RUN_COMPLETED = 1
    RUN_REJECTED = 2
    RUN_FAILED = 3
    RUN_CANCELLED = 4

cdef struct run_t:  # layout.RUN: equal pages in a row
    uint64_t key                  # local hash of each page
    uint64_t seq                  # sequence hash of the last page, kept only with events
    int64_t pages

cdef struct content_t:  # what a request's tokens are; read-only, owned by Python, beside the arena
    const uint64_t* hashes        # one per full block of prompt and planned output
    const uint64_t* locals        # local hashes, NULL: not kept
    const uint32_t* planned       # output ids, NULL: made up by rule
    int64_t num_hashes
    const run_t* runs             # radix engine: the full pages of prompt and planned output
    int64_t num_runs
    uint64_t head                 # equal for two requests exactly when their first 32 tokens, page-rounded, are

cdef struct profile_t:  # an interpolated timing profile; read-only, owned by Python
    const double* decode_kv       # axis, active KV tokens
    const double* decode_context  # axis
    const double* decode_itl      # [decode_kv, decode_context]
    int64_t num_kv
    int64_t num_context
    const double* prefill_x       # 1-D: axis; batch-aware: batch axis
    const double* prefill_tokens  # batch-aware: axis of new tokens per request
    const double* prefill_read    # batch-aware: axis of cached tokens per request
    const double* prefill_time
    int64_t num_x
    int64_t num_tokens
    int64_t num_read              # 0: 1-D

cdef struct rank_t  # below

ctypedef int (*grow_fn)(rank_t*, int, int64_t) noexcept nogil
ctypedef bint (*room_fn)(rank_t*, int64_t, int64_t) noexcept nogil
ctypedef int (*predict_fn)(rank_t*, int, int64_t, int64_t, int64_t, int64_t, double*) noexcept nogil
ctypedef int32_t (*ask_fn)(rank_t*, int32_t) noexcept nogil
ctypedef double (*score_fn)(rank_t*, int32_t) noexcept nogil

cdef struct rank_t:  # pointers into the arena of one rank, rebound whenever it moves; never stored in it
    config_t* config
    header_t* header
    request_t* requests
    handoff_t* handoffs
    int32_t* running
    int32_t* ids                  # id -> row, linear probing
    int32_t* tables               # heap of block tables
    block_t* blocks
    int32_t* free_stack
    int32_t* inactive             # findable blocks without references, the next victim first; with gaps
    copy_t* copies                # by block
    int32_t* heads                # hash -> chain of blocks that are not found through another
    event_t* events
    event_block_t* event_blocks
    radix_t* radix                # radix engine: the tree
    lease_t* leases
    node_t* nodes
    int32_t* node_index           # (parent, first key) -> node, linear probing
    int32_t* evict_heap           # unlocked leaves, the next victim first
    run_t* runs                   # heap of the edges' runs
    host_t* host                  # host tier
    host_entry_t* host_entries
    uint64_t* host_index          # lower half of a hash and its entry, linear probing; all bits set: empty
    transfer_t* transfers
    transfer_block_t* transfer_blocks
    offload_t* offloads           # by request row
    int32_t* sources              # by block: row of the store that reads it, NO_SLOT: none
    offload_event_t* offload_events
    offload_block_t* offload_blocks
    tiers_t* tiers                # KVBM tiers
    tier_entry_t* tier_entries
    int32_t* tier_index           # (tier, hash) -> entry, linear probing
    tier_job_t* tier_jobs
    tier_block_t* tier_blocks
    origin_t* origins             # by block
    rank_t* deep                  # KVBM tiers: the rank whose tables hold G3, G4 and their links; itself if not shared
    rank_t** sharers              # of such a rank: those that share its tables, by number, NULL: it left
    int64_t num_sharers           # 0: not shared
    int32_t sharer                # its number
    int64_t cap_tier_entries
    int64_t mask_tiers
    int64_t cap_tier_jobs
    int64_t cap_tier_blocks
    int64_t cap_host_entries
    int64_t mask_host
    int64_t cap_transfers
    int64_t cap_transfer_blocks
    int64_t cap_offload_events
    int64_t cap_offload_blocks
    int64_t cap_nodes
    int64_t mask_nodes
    int64_t cap_runs
    int64_t cap_requests
    int64_t mask_ids
    int64_t cap_tables
    int64_t mask_inactive
    int64_t mask_heads
    int64_t cap_events
    int64_t cap_event_blocks
    # beside the arena
    content_t* contents           # by row
    profile_t* profile
    signal_t* signals
    admission_t* admissions
    pressure_t* pressures
    int32_t* ready                # scratch: rows that emit in this pass
    int32_t* burst                # scratch: tokens each of them emits
    int32_t* terminal             # scratch: rows that end without a token
    int32_t* retracted            # scratch: rows that were retracted
    int32_t* found                # scratch: findable leading blocks of request row `found_of`, see lease_find
    int64_t num_found
    int64_t found_active          # how many of them are in use
    int64_t found_first           # place in the queue of the first that would be evicted, before it is taken modulo
    int64_t found_uses            # `uses` then
    int64_t uses                  # grows whenever blocks are held or dropped
    int32_t found_of
    int32_t* due                  # beside `running`: tick at which a coasting request needs something
    int32_t* since                # by row: tick that the row of a coasting request shows
    int32_t* hits                 # scratch: entries of `running` that are due
    int32_t* wheel                # radix: how many of those who coast open a page, by tick modulo the block size
    int64_t num_signals
    int64_t num_rejected
    int64_t num_admissions
    int64_t num_pressures
    int64_t cap_signals
    int64_t cap_pressures
    int32_t want_signals          # fill token ids, not only ends
    int32_t want_firsts           # tell the first token of each request too
    int32_t want_offload          # keep observations of the host tier
    double command_ms             # lower tiers: the time of the command, pass or boundary under way
    int32_t grouped               # has siblings: what depends on all of them is done by the driver
    coast_t coast
    pass_t p
    void* owner                   # RankState, for the callbacks
    grow_fn grow
    room_fn make_room             # KVBM tiers: empty blocks by offloading inactive ones
    predict_fn predict            # CALLABLE timing
    ask_fn ask_victim
    ask_fn ask_admission
    ask_fn ask_order
    score_fn score
