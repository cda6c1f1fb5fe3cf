"""Replaces the weights of a model in use, from a folder or tensor by tensor; always in place, so that addresses stay.

All checks come before the first byte changes (WeightsRejected). A later failure leaves weights that no step may use
(WeightsBroken), until an update has replaced all of them. Knows no KV and no steps. Made by `opened_runner.py`.
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync.errors import CheckpointError, FdasyncError, InvariantBroken, WeightsBroken, WeightsRejected
from fdasync_transformers.model.kept.kept import Kept, kept_forms, logical_state
from fdasync_transformers.parallel.whole import agree
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.deltas.delta import bytes_of, checked_metas, is_delta, read_manifest, tensors_of
from fdasync_transformers.weights.deltas.tensors import DTYPES
from fdasync_transformers.weights.groups.receiving import Incoming
from fdasync_transformers.weights.kept.arriving import pairs_of, places_of
from fdasync_transformers.weights.mapping import destination, locate, meeting, misfit, place
from fdasync_transformers.weights.placement import Placement
from fdasync_transformers.weights.ties import settle, tied_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from fdasync.request import WeightsFingerprint
    from fdasync.runner.base import TensorMeta
    from fdasync_transformers.parallel.collectives import Collectives
    from fdasync_transformers.weights.deltas.delta import Manifest
    from fdasync_transformers.weights.kept.arriving import Pair
    from fdasync_transformers.weights.kept.targets import Place
    from fdasync_transformers.weights.mapping import Located
    from fdasync_transformers.weights.names import Names
    from fdasync_transformers.weights.shards import StoredTensor
    from fdasync_transformers.weights.ties import Settled

_log = logging.getLogger("fdasync.transformers.weights")

# drafts stay exact whatever the layers' weights, as each is verified
MTP_LEFT = "no multi-token prediction tensors: these layers keep their weights, and fewer drafts may be accepted"


class _Placed(NamedTuple):
    """Tensors that were checked, and their places.

    Attributes:
        metas: the tensors, as they were announced.
        addresses: of the model's tensors by then.
        incoming, replaced: with their places; the places.
    """

    metas: tuple[TensorMeta, ...]
    addresses: dict[str, int]
    incoming: tuple[Incoming, ...]
    replaced: frozenset[Placement]


class LiveWeights:
    """The weights of one model. Methods that have the name of a verb of `Runner` do what it says, and block.

    Of a rank of a group, it writes the parts that this rank holds. All ranks make the same calls; what one of them
    rejects or breaks, all do, but for `write_tensor`, which no rank waits in.

    Args:
        names: of its checkpoints; their model is in use between updates, never during one.
        facts: `identity.config_facts` of its checkpoint.
        collectives: of the group; None: this process holds all.
        drawn: the folder whose weights were drawn, as it has a config alone; "": they came from their folder.

    Attributes:
        broken: places that a failed or unfinished update may have left half-written; while there are any, no step may
            use the model.
    """

    def __init__(
        self, names: Names, facts: Mapping[str, Any], collectives: Collectives | None = None, drawn: str = ""
    ) -> None:
        self._checkpoint_names = names
        self._drawn = drawn
        self._collectives = collectives
        self._model: PreTrainedModel = names.model
        self._facts = dict(facts)
        self._names = _first_names(logical_state(self._model))
        self._forms = kept_forms(self._model)
        self.broken: frozenset[Placement] = frozenset()
        self._incoming: tuple[Incoming, ...] | None = None
        self._placed: _Placed | None = None
        self._written: list[int] = []
        self._replaced: frozenset[Placement] = frozenset()
        # of the weights in use, where it is known
        self._id = ""
        # of an update in several parts: what they replaced so far, and what they must replace by its end
        self._covered: frozenset[Placement] = frozenset()
        self._owed: frozenset[Placement] = frozenset()
        self._dropped = False

    def forget_weights(self) -> None:
        """The weights are lost, or nobody wants them: no step may use the model until an update has brought all."""
        self._incoming = None
        self._dropped, self._id = True, ""
        self.broken = frozenset(Placement(name) for name in self._names.values())

    def load_folder(self, path: str) -> str:
        """Replace all weights by a checkpoint folder, as the library would load it; returns the weights id.

        Weights that were drawn from the folder's config are drawn again.

        The folder may be plain or quantised, whatever the one before was; the log says which (level INFO).

        A folder of changed tensors (`deltas/delta.py`) is applied to the weights that it names, and to no others.

        Raises WeightsRejected, also for a folder with different values for tied tensors that share memory in the model;
        WeightsBroken.
        """
        self._incoming = None
        if path == self._drawn:
            loading.draw_weights(self._checkpoint_names)
            self._id, self.broken, self._dropped = "", frozenset(), False
            self._settle()
            return identity.DRAWN_ID
        if is_delta(path):
            return self._load_delta(path)
        notes, tensors, settled = self._read(path)
        self._id = ""
        self.broken = frozenset(Placement(name) for name in self._names.values())
        with self._agreed(path, "new weights were read", WeightsBroken):
            loading.stream(self._checkpoint_names, tensors, settled.placements)
            state = self._model.state_dict()
            for name, other in settled.copies.items():
                state[name].copy_(state[other])
        # raises where ranks have read different bytes
        weights_id = identity.whole_weights_id(self._checkpoint_names, self._collectives)
        self.broken, self._dropped = frozenset(), False
        self._id = weights_id
        self._settle()
        _log.info("%s: new weights, %s", path, "; ".join(notes) or "stored plain")
        return weights_id

    def _load_delta(self, path: str) -> str:
        names, collectives = self._checkpoint_names, self._collectives
        held = self._id or (not self.broken and identity.whole_weights_id(names, collectives)) or ""
        # libraries raise errors of many types for bad files; nothing has changed
        with self._agreed(path, "a delta was checked", WeightsRejected):
            manifest = read_manifest(path)
            if manifest.base != held:
                have = f"the weights in use are {held}" if held else "those in use are broken"
                raise WeightsRejected(f"{path}: is a delta to weights {manifest.base}, and {have}")
            metas = checked_metas(path, manifest)
        self.begin_tensors(metas)
        with self._agreed(path, "a delta was read", WeightsBroken):
            for number, (_, tensor) in enumerate(tensors_of(path, manifest)):
                # a parameter may have no elements
                self.write_tensor(number, 0, bytes_of(tensor))
        self.end_tensors()
        found = identity.whole_weights_id(names, collectives)
        if found != manifest.result:
            self.broken = frozenset(Placement(name) for name in self._names.values())
            raise WeightsBroken(f"{path}: gives the weights {found}, and says that it gives {manifest.result}")
        self._id = found
        _log.info("%s: %d tensors of new weights", path, len(metas))
        return found

    def fingerprint_weights(self, with_tensors: bool = False) -> WeightsFingerprint:
        """The fingerprint of the weights in use; with each tensor's digest, where they are asked for."""
        return identity.whole_fingerprint(self._checkpoint_names, self._collectives, with_tensors)

    def delta_base(self, path: str) -> str:
        """As `Runner.delta_base`."""
        return _manifest_of(path).base if is_delta(path) else ""

    def read_weights_id(self, path: str) -> str:
        """The weights id that `load_folder` would return; changes nothing. Holds one tensor of the model at a time.

        Raises WeightsRejected.
        """
        if is_delta(path):
            return _manifest_of(path).result
        _, folder_tensors, settled = self._read(path)
        # by the first name of the memory that they go to
        stored: dict[str, dict[str, Placement]] = {}
        for key, where in settled.placements.items():
            stored.setdefault(self._names[where.target], {})[key] = where

        names, collectives = self._checkpoint_names, self._collectives

        def tensors() -> Iterator[tuple[str, torch.Tensor | Kept]]:
            for name, tensor in sorted(logical_state(self._model).items()):
                placements = stored.get(self._names[settled.copies.get(name, name)])
                if placements is not None:
                    form = self._forms.get(name)
                    yield name, loading.assemble(names.shapes[name], folder_tensors, placements, form)
                    continue
                # the folder leaves out tensors that loading keeps; none of them is cut (`_read`)
                yield name, tensor

        with self._agreed(path, "a folder was compared", WeightsRejected):
            # every rank sees the same folder: rank 0 reads it
            found = "" if collectives is not None and collectives.rank else identity.digest(tensors())
        return found if collectives is None else collectives.tell(found.encode(), "weights id")[0].decode()

    def _read(self, path: str) -> tuple[tuple[str, ...], dict[str, StoredTensor], Settled]:
        """Notes for people, tensors of a folder that fits the model, and their places. Raises WeightsRejected."""
        # the library raises errors of many types for bad folders; nothing has changed
        with self._agreed(path, "a folder was checked", WeightsRejected):
            names = self._checkpoint_names
            checkpoint = loading.read_checkpoint(path)
            self._check_config(checkpoint)
            placed = place(names, checkpoint.tensors, checkpoint.folder)
            notes = loading.placed_notes(checkpoint, placed, self._model.dtype, self._forms)
            if names.has_mtp and not names.mtp_among(placed.tensors):
                notes = (*notes, MTP_LEFT)
            if left := sorted(names.cuts.keys() - {where.target for where in placed.placements.values()}):
                raise WeightsRejected(f"{path}: holds no {left[0]}, which ranks hold parts of")
            settled = settle(self._model, placed.tensors, placed.placements)
            if self._dropped:
                held = {self._names[where.target] for where in settled.placements.values()}
                held |= {self._names[name] for name in settled.copies}
                own = {self._names[name] for name, _ in self._model.named_parameters() if name in self._names}
                if missing := sorted(own - held):
                    raise WeightsRejected(f"{path}: holds no {missing[0]}, and a sleep dropped it")
            return notes, placed.tensors, settled

    @contextmanager
    def _agreed(self, what: str, label: str, kind: type[WeightsRejected | WeightsBroken]) -> Iterator[None]:
        """An error in the context is one of this kind, on all ranks of the group."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # raised below, behind the agreement: other ranks must hear of any error
            failed = error
        if problem := agree(self._collectives, _problem(what, failed), label):
            raise kind(problem) from failed

    def begin_tensors(self, tensors: Sequence[TensorMeta], *, first: bool = True, last: bool = True) -> None:
        """Check the tensors to come; changes nothing. Raises WeightsRejected, naming one.

        Args:
            first, last: of the tensors of an update. One in several parts has replaced what an earlier one broke, and
                may be used, once its last part has come.
        """
        self._incoming = None
        if first:
            self._covered, self._owed = frozenset(), self.broken
        with self._agreed("the tensors", "an update was checked", WeightsRejected):
            placed = self._placed
            metas = tuple(tensors)
            addresses = {name: tensor.data_ptr() for name, tensor in self._model.state_dict().items()}
            # what an update that failed has left at its places is forgotten with them
            if placed is None or self.broken or placed.metas != metas or placed.addresses != addresses:
                # thousands of names take longer than their bytes: the next update has the same names
                placed = self._placed = _Placed(metas, addresses, *self._place(tensors))
            if last and (left := self._left(placed.replaced)):
                raise WeightsRejected(left)
        self._incoming = placed.incoming
        self._written = [0] * len(placed.incoming)
        self._replaced = placed.replaced
        names = [tensor.name for tensor in tensors] if self._checkpoint_names.has_mtp else []
        if names and not self._checkpoint_names.mtp_among(names):
            _log.info("new tensors: %s", MTP_LEFT)

    @property
    def incoming(self) -> tuple[Incoming, ...]:
        """The tensors of `begin_tensors` with their places, the same object for the same tensors at the same places.
        Raises InvariantBroken where none are to come."""
        if self._incoming is None:
            raise InvariantBroken("tensors came before they were announced")
        return self._incoming

    def _place(self, tensors: Sequence[TensorMeta]) -> tuple[tuple[Incoming, ...], frozenset[Placement]]:
        """The tensors with their places, and the places. Raises WeightsRejected."""
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsRejected(f"{twice} is given twice")
        pairs = pairs_of(tensors)
        shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.name not in pairs}
        shapes |= {pair.name: pair.shape for pair in pairs.values()}
        try:
            located = locate(self._checkpoint_names, shapes)
        except Exception as error:  # the library's own errors about names; nothing has changed
            raise WeightsRejected(str(error)) from error
        if located.unknown:
            some = ", ".join(located.unknown[:3])
            raise WeightsRejected(f"the model has no place for {len(located.unknown)} of the tensors: {some}")
        state = logical_state(self._model)
        placements = {**located.placements, **self._converted_already(located, shapes)}
        quantised = {
            pair.name: self._check_pair(pair, placements.get(pair.name), state)
            for pair in dict.fromkeys(pairs.values())
        }
        incoming = [
            quantised[pair.name][pair.scales.name == tensor.name]
            if (pair := pairs.get(tensor.name))
            else self._check(tensor, placements.get(tensor.name), state)
            for tensor in tensors
        ]
        return tuple(incoming), frozenset(self._check_overlap(placements))

    def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        """Write the next bytes of a tensor, converted to the model's dtype. Raises WeightsBroken."""
        incoming = self.incoming
        if not 0 <= number < len(incoming):
            raise WeightsBroken(f"bytes came for tensor {number} of {len(incoming)}")
        self.touch()
        name, dtype, nbytes, target = incoming[number]
        if offset_nbytes != self._written[number] or len(data) % dtype.itemsize:
            raise WeightsBroken(f"{name}: {len(data)} bytes came for offset {offset_nbytes}, out of order or torn")
        if offset_nbytes + len(data) > nbytes:
            raise WeightsBroken(f"{name}: more than its {nbytes} bytes came")
        self._written[number] += len(data)
        if target is None or not len(data):
            return
        # torch takes no read-only buffer
        source = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
        try:
            target.put_flat(offset_nbytes // dtype.itemsize, source)
        except Exception as error:
            raise WeightsBroken(f"{name}: {error}") from error

    def touch(self) -> None:
        """The places of the tensors to come are about to change."""
        self._id = ""
        self.broken |= self._replaced

    def received(self, problem: str, *, last: bool) -> None:
        """All tensors that `begin_tensors` checked were received in their places, or there was a problem. `last`: the
        update has ended. Raises WeightsBroken where a rank had a problem."""
        self._settle()
        self._incoming = None
        if problem := agree(self._collectives, problem, "new weights were received"):
            raise WeightsBroken(problem)
        self._covered |= self._replaced
        if last:
            self.broken, self._dropped = frozenset(), False

    def end_received(self) -> None:
        """End an update in several parts; none was called the last. Raises WeightsBroken where they leave out what an
        earlier update broke."""
        if left := self._left(self._covered):
            raise WeightsBroken(left)
        self.broken, self._dropped = frozenset(), False

    def end_tensors(self) -> None:
        """End the update. Raises WeightsBroken where not every byte was written."""
        incoming, self._incoming = self.incoming, None
        came = zip(incoming, self._written, strict=True)
        short = [f"{one.name}: {count} of its {one.nbytes} bytes came" for one, count in came if count != one.nbytes]
        if problem := agree(self._collectives, "".join(short[:1]), "new weights were written"):
            raise WeightsBroken(problem)
        self._settle()
        # `begin_tensors` checked that this update replaces all places that an earlier one broke
        self.broken, self._dropped = frozenset(), False

    def _settle(self) -> None:
        """Wait for the new weights: they were written on another stream than the next step's."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # blocking: no step is in flight, in a worker process

    def _check_config(self, checkpoint: loading.Checkpoint) -> None:
        facts = identity.config_facts(checkpoint.config)
        for key in sorted(facts.keys() | self._facts.keys()):
            new, old = (json.dumps(held.get(key), sort_keys=True, default=str) for held in (facts, self._facts))
            if new != old:
                raise WeightsRejected(
                    f"{checkpoint.folder / 'config.json'}: {key} is {new}, the loaded model has {old}"
                )

    def _converted_already(self, located: Located, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Placement]:
        """Places of tensors whose name is both a conversion's source and its result, if they have the result's shape.

        Raises WeightsRejected for the sources of conversions, which come one by one here, and for another shape.
        """
        found: dict[str, Placement] = {}
        for name, _, key in located.conversions:
            own = self._checkpoint_names.own(name)
            if own is None or key not in (name, own):
                raise WeightsRejected(
                    f"{key} is one of several that the library makes {name} of: give that tensor itself, or a folder"
                )
            if shapes[key] != (whole := tuple(self._checkpoint_names.shapes[own].shape)):
                problem = f"{key} has shape {shapes[key]}, the model has {whole}"
                raise WeightsRejected(f"{problem}: give it as the model has it, or a folder")
            found[key] = Placement(own)
        return found

    def _check_pair(
        self, pair: Pair, placement: Placement | None, state: Mapping[str, torch.Tensor | Kept]
    ) -> tuple[Incoming, Incoming]:
        """Check a pair; returns where its values and its scales come."""
        names = self._checkpoint_names
        places: tuple[Place | None, Place | None] = None, None
        if placement is not None:
            if problem := misfit(pair.shape, True, placement, names.shapes[placement.target]):
                raise WeightsRejected(f"{pair.name} {problem}")
            target = state[placement.target]
            places = places_of(pair, destination(placement, target, names.cuts.get(placement.target)))
        values, scales = (
            Incoming(meta.name, dtype, math.prod(meta.shape) * dtype.itemsize, place)
            for meta, dtype, place in zip((pair.values, pair.scales), map(_dtype_of, pair[3:]), places, strict=True)
        )
        return values, scales

    def _check(
        self, tensor: TensorMeta, placement: Placement | None, state: Mapping[str, torch.Tensor | Kept]
    ) -> Incoming:
        dtype = _dtype_of(tensor)
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        if placement is None:
            return Incoming(tensor.name, dtype, nbytes, None)
        names = self._checkpoint_names
        target = state[placement.target]
        problem = misfit(tensor.shape, dtype.is_floating_point, placement, names.shapes[placement.target])
        if not problem and not dtype.is_floating_point and dtype != target.dtype:
            problem = f"is {tensor.dtype}, the model has {str(target.dtype).removeprefix('torch.')}"
        if problem:
            raise WeightsRejected(f"{tensor.name} {problem}")
        where = destination(placement, target, names.cuts.get(placement.target))
        return Incoming(tensor.name, dtype, nbytes, where)

    def _check_overlap(self, placements: Mapping[str, Placement]) -> set[Placement]:
        """Every place, under one name for tied tensors. Raises WeightsRejected for two tensors of one place, and where
        only some of the tensors are given that the config ties and the model has apart."""
        if met := meeting(placements, self._names):
            problem = f"{met[0]} and {met[1]} are the same memory of the model: give one of them"
            if placements[met[0]].target != placements[met[1]].target:
                problem += " (the config makes them one, and they cannot come apart in an update)"
            raise WeightsRejected(problem)
        replaced = {placement._replace(target=self._names[placement.target]) for placement in placements.values()}
        whole = {where.target for where in replaced}
        for names in tied_groups(self._model):
            own = dict.fromkeys(self._names[name] for name in names)
            left = [name for name in own if name not in whole]
            if left and len(left) < len(own):
                raise WeightsRejected(
                    f"{left[0]} is left out: the config makes {' and '.join(own)} one, the loaded model has them apart,"
                    " and nothing says which is meant: give all of them"
                )
        return replaced

    def _left(self, replaced: frozenset[Placement]) -> str:
        """Words for people about tensors that an earlier update may have broken, and that an update which replaces
        these places, too, leaves out; "": it leaves none."""
        if not self._owed:
            return ""
        replaced |= self._covered
        state = logical_state(self._model)
        pieces: dict[str, int] = {}
        for where in replaced:
            pieces[where.target] = pieces.get(where.target, 0) + 1
            if where.row < 0 or pieces[where.target] == state[where.target].shape[0] * where.parts:
                pieces[where.target] = -1
        left = sorted(where.target for where in self._owed - replaced if pieces.get(where.target) != -1)
        if not left:
            return ""
        return f"an update failed half-way, and this one leaves out {len(left)} tensors of it: {', '.join(left[:3])}"


def _dtype_of(tensor: TensorMeta) -> torch.dtype:
    """Raises WeightsRejected."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WeightsRejected(f"{tensor.name} has dtype {tensor.dtype!r}, which is none of {', '.join(DTYPES)}")
    return dtype


def _manifest_of(path: str) -> Manifest:
    try:
        return read_manifest(path)
    except CheckpointError as error:
        raise WeightsRejected(str(error)) from error


def _first_names(state: Mapping[str, torch.Tensor | Kept]) -> dict[str, str]:
    """The first name of every tensor's memory, which tied tensors share."""
    firsts: dict[tuple[int, tuple[int, ...]], str] = {}
    names = {}
    for name, tensor in state.items():
        where = (tensor.data_ptr(), tuple(tensor.shape))
        names[name] = firsts.setdefault(where, name) if tensor.numel() else name
    return names


def _problem(path: str, error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, WeightsRejected):
        return error.problem
    return str(error) if isinstance(error, FdasyncError) else f"{path}: {error!r}"
