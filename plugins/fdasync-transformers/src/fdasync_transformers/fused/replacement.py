"""How kernels come into the place of modules of the library: found, compared, put there; or left, with the reason.

A `Replacement` says what is special of one kind of modules: where a model has them, what could take their place, and
what that is compared with, and how closely. What all kinds have in common is here: the first candidate that passes
every case takes the place, and notes tell why other modules stay.

A proof runs the library's code on made-up rows and compiles kernels for a device that they may not fit. Both may raise
errors of any type, a kernel's that needs more shared memory than the device has among them: what a proof raises is a
reason to keep the library's own code, and ends no start. Only memory that ran out says nothing about the code: a start
that went on without kernels would be slow for no reason that lasts. Knows no kernels. Used by all that is fused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from fdasync_kernels import chip

from fdasync.errors import BadInput

C = TypeVar("C")

#: holds a candidate against the library's module on some rows; raises Differs
Case = Callable[[C], None]
#: takes one rank's reason not to fuse something, "" where there is none; returns the reason of all ranks
Agree = Callable[[str], str]


class Differs(Exception):
    """Why a candidate cannot take a module's place, or why there is none; the message goes on a sentence that begins
    with the module."""


class Place(NamedTuple):
    """A module that may be replaced.

    Attributes:
        name: of the module in the model, or another that no second place has.
        label: what notes call it: its class, or its layer's number.
        subject: begins the reason in notes; "": none is needed.
        refusal: why it is not even tried, as far as its attributes say so; "" if it is tried.
        key: of places with equal keys one is proven for all; None: each is proven.
        given: what else the replacement has read of it.
    """

    name: str
    module: Any
    label: str
    subject: str = ""
    refusal: str = ""
    key: Hashable = None
    given: Any = None


class Replacement(ABC, Generic[C]):
    """What may take the place of one kind of modules.

    Attributes:
        what: for people: the kind, in the plural.
        which: begins the note on places, before their labels.
        together: one place that stays keeps all: none is looked for behind it. What was put before has no effect.
    """

    what: ClassVar[str]
    which: ClassVar[str]
    together: ClassVar[bool] = False

    @abstractmethod
    def finds(self, model: Any) -> Iterator[Place]:
        """The places of a model; each is asked for when what came before is decided. Runs on any device, also on the
        meta device."""

    @abstractmethod
    def candidates(self, place: Place) -> Iterable[C]:
        """What could take a place, the preferred first. Raises Differs with the reason where there is nothing."""

    @abstractmethod
    def cases(self, place: Place) -> Iterable[Case[C]]:
        """What a candidate must pass, each with its tolerance; none if `candidates` has proven it. Raises Differs."""

    @abstractmethod
    def put(self, place: Place, candidate: C) -> None:
        """Have a proven candidate compute what the module did. It reads the module's parameters at each call, since an
        update may put new ones in their places; no proof sees whether it does."""


class Operation(Replacement[C]):
    """What a kernel computes as the library does, for rows of one dtype; others go the library's way.

    Attributes:
        dtype: of the rows.
        device: of the weights; kernels run there.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device


@dataclass
class Replaced:
    """What became of one kind of modules.

    Attributes:
        kind: the replacement.
        names: of the replaced modules in the model.
        reasons: by label, why others are the library's own; of each label the first reason.
        remarks: for people: what falls short of the promise.
    """

    kind: Replacement[Any] | type[Replacement[Any]]
    names: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def leave(self, place: Place, reason: str) -> bool:
        """Note why a place keeps the library's code; whether all do."""
        self.reasons.setdefault(place.label, f"{place.subject} {reason}".lstrip())
        if self.kind.together:
            self.names.clear()
        return self.kind.together

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: what is the library's own and why, once for each reason."""
        labels: dict[str, list[str]] = {}
        # numbers of layers rise
        for label in sorted(self.reasons, key=lambda label: (len(label), label)):
            labels.setdefault(self.reasons[label], []).append(label)
        told = {
            reason: f"{self.kind.which} {', '.join(ones)}" if any(ones) else self.kind.what
            for reason, ones in labels.items()
        }
        return (*self.remarks, *[f"{whose} are the library's own: {reason}" for reason, whose in told.items()])


def no_kernels(device: torch.device) -> bool:
    """Whether nothing can be replaced on a device."""
    return not chip.runs_on(device)


def alone(reason: str) -> str:
    """The `Agree` of a process that is no rank of a group."""
    return reason


def replace(replacement: Replacement[C], model: Any, agree: Agree = alone) -> Replaced:
    """Replace what a model has of a kind, in place; waits for the device, for start-up.

    Args:
        model: in inference, its weights on their device and in their final dtype.
        agree: what the ranks of a group make of a reason to keep what they hold parts of; asked at each proof.

    Returns:
        What was replaced, and what was not. Raises MemoryError and torch.OutOfMemoryError.
    """
    done = Replaced(replacement)
    proofs: dict[Hashable, C | Differs] = {}
    for place in replacement.finds(model):
        key = place.name if place.key is None else place.key
        found: C | Differs = Differs(place.refusal)
        # refused places are alike on all ranks, which need not be asked; but none may go on where another one ends
        if not place.refusal or replacement.together:
            if key not in proofs:
                proven = prove(replacement, place)
                problem = agree(str(proven) if isinstance(proven, Differs) else "")
                proofs[key] = Differs(problem) if problem else proven
            found = proofs[key]
        if not isinstance(found, Differs):
            replacement.put(place, found)
            done.names.append(place.name)
            continue
        if done.leave(place, str(found)):
            break
    return done


def foresee(replacement: Replacement[Any], model: Any) -> Replaced:
    """What `replace` would try in a model, which may be on the meta device, and what not; changes nothing."""
    done = Replaced(replacement)
    for place in replacement.finds(model):
        if not place.refusal:
            done.names.append(place.name)
        elif done.leave(place, place.refusal):
            break
    return done


@torch.inference_mode()
def prove(replacement: Replacement[C], place: Place) -> C | Differs:
    """The first candidate for a place that passes every case, not put there; or why there is none. Waits for the
    device. Raises MemoryError and torch.OutOfMemoryError as they are."""
    try:
        if place.refusal:
            return Differs(place.refusal)
        return first_proven(replacement.candidates(place), replacement.cases(place))
    except Differs as difference:
        # a new one: that holds no frames, and their tensors
        return Differs(str(difference))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models, compilers and drivers raise errors of many types
        return Differs(not_compared(error))


def not_compared(error: Exception) -> str:
    """The reason where a proof raises."""
    return f"cannot be compared: {type(error).__name__}: {str(error)[:200]}"


def first_proven(candidates: Iterable[C], cases: Iterable[Case[C]]) -> C:
    """The first candidate that passes every case; kernels refuse tensors that they do not take by BadInput.

    Raises Differs with the reason of the candidate that came furthest.
    """
    furthest, reason, all_cases = -1, "nothing is known that could", list(cases)
    for candidate in candidates:
        passed = 0
        try:
            for case in all_cases:
                case(candidate)
                passed += 1
        except (Differs, BadInput) as difference:
            if passed > furthest:
                furthest, reason = passed, str(difference)
        else:
            return candidate
    raise Differs(reason)
