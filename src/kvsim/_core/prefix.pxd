# Hash -> block: which blocks are findable, and under which hash.
#
# A sequence hash stands for all tokens up to the end of its block, and a lease
# gives back its last block first, so the pool evicts a block before it evicts
# the one in front of it (pool.pxd). Hence what is findable is closed under
# prefixes: if the hash of block i of a prompt is here, so are those of all
# blocks before it. The index is therefore a forest laid over the block rows,
# and a prompt is looked up by walking down from its first block:
#
#     heads[hash] -> block 0 -follow-> block 1 -follow-> block 2      one prompt
#                                         |
#     heads[hash] -> block 2' -follow-> block 3'                      another one
#
# Each block knows one block behind it (`follow`), which knows it (`link`).
# First blocks, and further ones behind a block that has one, are ROOTED: they
# hang in the chain of their own hash in `heads`, and the block before them is
# BRANCHED. So blocks that are computed together are entered, found and evicted
# through their own rows and those of their neighbours; `heads` is touched only
# where prompts begin or part.
#
# A hash may have several physical copies: two requests computed the same block
# at the same time, and ids in block tables must never change. The oldest is in
# the forest, since lookups take it (spec/kv-cache.md section 2); the others hang
# on it in a ring, from older to newer, and the next older takes its place.

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvsim._core.types cimport (
    BRANCHED, CHECK, COPIED, FINDABLE, NEWER, NO_BLOCK, NO_SLOT, ROOTED, block_t, copy_t, likely, prefetch, rank_t,
    unlikely,
)


cdef inline int32_t prefix_find(const rank_t* r, int32_t before, uint64_t hash) noexcept nogil:
    """Oldest copy of `hash`, or NO_BLOCK. Changes nothing.

    `before` is what was found for the block before it, NO_BLOCK at the
    beginning of a prompt.
    """
    cdef const block_t* blocks = r.blocks
    cdef int32_t b
    if before != NO_BLOCK:
        b = blocks[before].follow
        if b != NO_BLOCK and blocks[b].hash == hash:
            return b
        if not blocks[before].hashed & BRANCHED:
            return NO_BLOCK
    b = r.heads[<int64_t>hash & r.mask_heads]
    while b != NO_BLOCK and blocks[b].hash != hash:
        b = blocks[b].link
    return b


cdef inline int32_t prefix_oldest(rank_t* r, int32_t b, const uint64_t* hashes, int64_t index) noexcept nogil:
    """Oldest copy of findable block `b`, which is block `index` of a prompt with these hashes.

    A newer copy remembers which it was; when another has taken its place, the
    prompt is looked up.
    """
    cdef block_t* block = &r.blocks[b]
    cdef const block_t* oldest
    cdef int32_t found = NO_BLOCK
    cdef int64_t i
    CHECK(block.hashed & FINDABLE and block.hash == hashes[index])
    if likely(not block.hashed & NEWER):
        return b
    oldest = &r.blocks[block.link]
    if oldest.hash != block.hash or oldest.hashed & (FINDABLE | NEWER) != FINDABLE:
        for i in range(index + 1):
            found = prefix_find(r, found, hashes[i])
        block.link = found
    return block.link


cdef inline int32_t prefix_register(rank_t* r, int32_t b, int32_t before, uint64_t hash) noexcept nogil:
    """Make block `b` findable as the newest copy of `hash`; returns the oldest, `b` if it is the only one.

    `before` is the oldest copy of the block before it, NO_BLOCK at the
    beginning of a prompt.
    """
    cdef int32_t oldest = prefix_find(r, before, hash)
    cdef block_t* block = &r.blocks[b]
    cdef int32_t* head
    CHECK(block.hashed == 0 and block.follow == NO_BLOCK)
    CHECK(before == NO_BLOCK or r.blocks[before].hashed & (FINDABLE | NEWER) == FINDABLE)
    block.hash = hash
    if unlikely(oldest != NO_BLOCK):
        block.hashed = FINDABLE | NEWER
        block.link = oldest
        copy_enter(r, b, oldest)
        return oldest
    if likely(before != NO_BLOCK):
        if likely(r.blocks[before].follow == NO_BLOCK):
            r.blocks[before].follow = b
            block.hashed = FINDABLE
            block.link = before
            return b
        r.blocks[before].hashed |= BRANCHED
    head = &r.heads[<int64_t>hash & r.mask_heads]
    block.hashed = FINDABLE | ROOTED
    block.link = head[0]
    head[0] = b
    return b


cdef inline bint prefix_unregister(rank_t* r, int32_t b) noexcept nogil:
    """Take block `b` out of the index; true if its hash is gone with it."""
    cdef block_t* block = &r.blocks[b]
    cdef int32_t hashed = block.hashed
    CHECK(hashed & FINDABLE)
    block.hashed = 0
    if unlikely(hashed & NEWER):
        copy_leave(r, b)
    elif unlikely(hashed & COPIED):
        heir_enter(r, b, hashed)
    elif hashed & ROOTED:
        chain_replace(r, b, block.link)
    else:
        r.blocks[block.link].follow = NO_BLOCK
    # What is behind a block is evicted before it.
    CHECK(hashed & (NEWER | COPIED) or block.follow == NO_BLOCK)
    block.link = NO_BLOCK
    block.follow = NO_BLOCK
    return not hashed & (NEWER | COPIED)


cdef inline void chain_replace(rank_t* r, int32_t b, int32_t by) noexcept nogil:
    """Let what leads to `b` in the chain of its hash lead to `by`."""
    cdef int32_t* at = &r.heads[<int64_t>r.blocks[b].hash & r.mask_heads]
    while at[0] != b:
        at = &r.blocks[at[0]].link
    at[0] = by


cdef inline void copy_enter(rank_t* r, int32_t b, int32_t oldest) noexcept nogil:
    """Put `b` at the end of the ring of copies that begins with `oldest`."""
    cdef copy_t* copies = r.copies
    if not r.blocks[oldest].hashed & COPIED:
        r.blocks[oldest].hashed |= COPIED
        copies[oldest].prev = oldest
        copies[oldest].next = oldest
    copies[b].prev = copies[oldest].prev
    copies[b].next = oldest
    copies[copies[b].prev].next = b
    copies[oldest].prev = b


cdef inline void copy_leave(rank_t* r, int32_t b) noexcept nogil:
    """Take `b` out of its ring; one that is left alone has no copies."""
    cdef copy_t* copies = r.copies
    cdef int32_t older = copies[b].prev
    cdef int32_t newer = copies[b].next
    copies[older].next = newer
    copies[newer].prev = older
    copies[b].prev = 0
    copies[b].next = 0
    if older == newer:
        r.blocks[older].hashed &= ~COPIED
        copies[older].prev = 0
        copies[older].next = 0


cdef inline void heir_enter(rank_t* r, int32_t b, int32_t hashed) noexcept nogil:
    """The next older copy takes the place of `b` in the forest; `hashed` is what `b` was."""
    cdef int32_t by = r.copies[b].next
    cdef block_t* block = &r.blocks[b]
    cdef block_t* heir = &r.blocks[by]
    heir.hashed = hashed
    copy_leave(r, b)
    heir.link = block.link
    heir.follow = block.follow
    if heir.follow != NO_BLOCK:
        r.blocks[heir.follow].link = by
    if hashed & ROOTED:
        chain_replace(r, b, by)
    else:
        r.blocks[heir.link].follow = by
