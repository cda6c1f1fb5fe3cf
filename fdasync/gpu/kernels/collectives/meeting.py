"""How the same programs of a launch on several devices meet, and where each device's buffer is.

Programs wait for each other by flags in the peers' memory. Under Triton's interpreter programs do not wait, and tests
launch one device after another. Called by the kernels of this room.
"""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit  # type: ignore[untyped-decorator]
def meet(flags, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return when the same program of every peer has come here; what each wrote before is seen behind it.

    A flag is set by one peer and taken back by its reader, so the flags are as they were when all have passed.
    """
    if not _INTERPRETED:
        # all threads of this program have written
        tl.debug_barrier()
        program = tl.program_id(0)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                theirs = tl.load(flags + peer).to(tl.pointer_type(tl.uint32)) + program * RANKS + RANK
                while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                    pass
        own = tl.load(flags + RANK).to(tl.pointer_type(tl.uint32)) + program * RANKS
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
                    pass
        tl.debug_barrier()


@triton.jit
def buffer_of(buffers, rank, like):  # type: ignore[no-untyped-def]
    """The buffer of a rank, as elements of the kind of `like`."""
    return tl.multiple_of(tl.load(buffers + rank).to(like.dtype), 16)
