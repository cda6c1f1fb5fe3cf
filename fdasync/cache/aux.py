"""Block-bound data: what it is (`AuxSpec`) and the slots that hold it (`SlotPool`). Pure.

A slot belongs to one computation of a block and shares the life of the KV it was written with
(docs/design.md, section 4). The bytes live in `aux_arena.py`; this module knows none of them. The block pool takes
slots from it; the engine, the runners and the instances read the specs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fdasync.errors import BadInput, InvariantBroken

#: name of the spec that is the expert routing
ROUTING = "routing"
#: name of the spec that is the final hidden state of each token, its bytes as they are: over a hit that has them only
#: the head runs, for log-probs of prompts
FINAL_HIDDEN = "final_hidden"
_DTYPE_NBYTES = {"uint8": 1, "uint16": 2, "int32": 4, "uint32": 4, "float16": 2, "float32": 4}


class AuxSpec(msgspec.Struct, frozen=True):
    """One kind of per-token data that lives with KV blocks.

    Attributes:
        name: key in results; "routing" is the expert routing.
        shape: per token; routing is (num_moe_layers, top_k).
        dtype: numpy name: uint8, uint16, int32, uint32, float16 or float32.
        by_name: results have it only where a request asks for it by name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    by_name: bool = False

    def __post_init__(self) -> None:
        """Raises BadInput."""
        if not self.name:
            raise BadInput("aux_specs.name", "is empty")
        if not self.shape or min(self.shape) < 1:
            raise BadInput(
                "aux_specs.shape", f"of {self.name!r} is {self.shape}", limit="one or more sizes of 1 or more"
            )
        if self.dtype not in _DTYPE_NBYTES:
            raise BadInput(
                "aux_specs.dtype", f"of {self.name!r} is {self.dtype!r:.100}", limit=", ".join(_DTYPE_NBYTES)
            )

    @property
    def token_nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_NBYTES[self.dtype]


def wanted_specs(
    specs: Sequence[AuxSpec], routing: bool | None, aux: bool | Sequence[str] | None
) -> tuple[AuxSpec, ...]:
    """The specs whose rows a request gets, in their order; `GenerateOptions` says what `routing` and `aux` mean."""
    all_others = [spec.name for spec in specs if aux is not False and not spec.by_name]
    others = aux if isinstance(aux, Sequence) else all_others
    return tuple([spec for spec in specs if (routing is not False if spec.name == ROUTING else spec.name in others)])


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot and the generation of its present use; a pair of an earlier use matches nothing.

    Attributes:
        id: number of the slot.
        generation: number of this use of the slot, 1 or more.
    """

    id: int
    generation: int


class SlotPool:
    """Hands out slots, each use under a new generation. Generations start at 1; 0 is never valid.

    Attributes:
        num_slots: all slots, free or in use.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # by slot: the generation of its latest use, and 1 while it is in use
        self._generation = [0] * num_slots
        self._used = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Slot:
        """A free slot. There are as many slots as blocks that need one, so running out is a defect."""
        if not self._free:
            raise InvariantBroken(f"no aux slot left of {self.num_slots}")
        slot = self._free.pop()
        self._used[slot] = 1
        # generations are 32 bits wide in the arena and skip 0 when they wrap
        self._generation[slot] = generation = self._generation[slot] % 0xFFFF_FFFF + 1
        return Slot(slot, generation)

    def release(self, slot: Slot) -> None:
        if not self._used[slot.id] or self._generation[slot.id] != slot.generation:
            raise InvariantBroken(f"slot {slot.id} generation {slot.generation} is not in use")
        self._used[slot.id] = 0
        self._free.append(slot.id)

    def check(self) -> None:
        """Raise InvariantBroken unless every slot is either free once or in use."""
        if len(set(self._free)) != len(self._free) or any(self._used[slot] for slot in self._free):
            raise InvariantBroken("an aux slot is free twice, or free and in use")
        if len(self._free) + sum(self._used) != self.num_slots:
            raise InvariantBroken(
                f"{len(self._free)} free and {sum(self._used)} used aux slots are not {self.num_slots}"
            )
