"""Holds all transports of an instance, and chooses the one by which it reads from another instance.

Memory of the same machine is mapped (`shm`) rather than read over a network, and where the network is trusted a fast
engine (`mooncake`) goes before a socket (`tcp`). If mapping fails for good (another
user's process, another container), that sender is read over the socket from then on. Parts of devices go by `device`
alone: a sender offers them to a receiver that said that it reads them (`reads_device`), and else offers host blocks.
The rows of such a block are parts of shared memory, and go by one of the others. Knows no messages and no blocks.
Called by the services of `fdasync_fleet/instance`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.store.base import Outcome
from fdasync.errors import FdasyncError, InvariantBroken, PluginError, RunnerError
from fdasync.ipc.shared_memory import DEVICE_REGION
from fdasync_fleet.transfer.base import CopySpec, Transport, checksum_parts
from fdasync_fleet.transfer.validation import refused

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fdasync.ipc.shared_memory import Part, SharedRegion
    from fdasync_fleet.messages import Source
    from fdasync_fleet.transfer.device import DeviceTransport
    from fdasync_fleet.transfer.process.proxy import TransferProcess

Sources = tuple[tuple[str, "Source"], ...]


class Transports:
    """See the module.

    Args:
        transports: the transports, in order of preference; this object closes them.
        process: the process that these are in; None: they are on this loop.
        optional: names of transports that are left out where they do not open.

    Attributes:
        problems: why transports were left out, by name.
        device_problem: why blocks do not go from device to device, though that was asked for; "" if they do.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        process: TransferProcess | None = None,
        optional: Collection[str] = (),
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._process = process
        self._regions: Sequence[SharedRegion] = ()
        self._unfit: set[bytes] = set()
        self._optional = frozenset(optional)
        self.problems: dict[str, str] = {}
        self._device: DeviceTransport | None = None
        self.device_problem = ""

    async def open(self, regions: Sequence[SharedRegion], device: DeviceTransport | None = None) -> None:
        """See `Transport.open`. `device` is closed by this object; where the devices show no memory, blocks go by way
        of the host, and `device_problem` says why."""
        self._regions = regions
        for name, transport in list(self._transports.items()):
            try:
                await transport.open(regions)
            except (FdasyncError, OSError) as error:
                if name not in self._optional:
                    raise
                self.problems[name] = error.problem if isinstance(error, PluginError) else str(error)
                del self._transports[name]
                await transport.aclose()
        if device is None:
            return
        self._device = device
        try:
            await device.open(())
        except RunnerError as error:
            self.device_problem = str(error)
            self._device = None
            await device.aclose()

    def sources(self) -> Sources:
        """The sources of all transports, for `Hello`."""
        every = [*self._transports.items(), *([] if self._device is None else [(self._device.name, self._device)])]
        return tuple([(name, transport.source()) for name, transport in every])

    def told(self, sources: Sources) -> str:
        """In words: by which ways blocks come from another instance, best first, and why not by a faster one."""
        theirs = dict(sources)
        ways = [name for name, _, _ in self._ways(sources)]
        missing = [name for name in self._transports if name in self._optional and name not in theirs]
        lacks = [f"not by {name}: it offers none (--trusted-network on both sides)" for name in missing]
        return "; ".join([f"by {', '.join(ways)}" if ways else "by no way in common", *lacks])

    def _ways(self, sources: Sources) -> list[tuple[str, Transport, Source]]:
        """Transports that both have and that the route can have, best first."""
        theirs = dict(sources)
        return [
            (name, transport, theirs[name])
            for name, transport in self._transports.items()
            if name in theirs and (name != "shm" or theirs[name].machine == transport.source().machine)
        ]

    async def checksums(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """XXH3-64 of parts of shared memory. The caller sees to it that no process writes to the parts until this
        returns. Other instances can then read all parts that `offer` put on offer before this call.

        Raises InvariantBroken for a part outside of the regions, and as `TransferProcess.checksums`.
        """
        if self._process is not None:
            return await self._process.checksums(parts)
        return await checksum_parts(self._regions, parts)

    def offer(self, parts: Sequence[Part]) -> None:
        """See `Transport.offer`."""
        memory, devices = _apart(parts)
        for transport in self._transports.values():
            transport.offer(memory)
        if devices:
            self._devices.offer(devices)

    def withdraw(self, parts: Sequence[Part]) -> None:
        """See `Transport.withdraw`."""
        memory, devices = _apart(parts)
        for transport in self._transports.values():
            transport.withdraw(memory)
        if devices:
            self._devices.withdraw(devices)

    # -- devices ------------------------------------------------------------------------------------

    @property
    def _devices(self) -> DeviceTransport:
        if self._device is None:
            raise InvariantBroken("a part of a device, and no transport between devices")
        return self._device

    def prepare(self, sources: Sources) -> None:
        """Find out whether another instance's devices can be read here."""
        if self._device is not None and self._device.name in dict(sources):
            self._device.prepare(dict(sources)[self._device.name])

    def reads_device(self, sources: Sources) -> bool | None:
        """Whether they can; None: that is being found out."""
        source = dict(sources).get("device")
        return False if self._device is None or source is None else self._device.reads(source)

    async def prepared(self, sources: Sources, limit_s: float) -> bool:
        """As `reads_device`, after waiting for it, bounded."""
        source = dict(sources).get("device")
        return self._device is not None and source is not None and await self._device.prepared(source, limit_s)

    async def receive(self, sources: Sources, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        """See `Transport.receive`. A copy spec whose first part is of a device is copied from device to device, and its
        other parts beside that."""
        if not any(_is_device(copy_spec) for copy_spec in copy_specs):
            return await self._receive(sources, copy_specs, deadline)
        source = dict(sources).get("device")
        if self._device is None or source is None or not all(map(_is_between_devices, copy_specs)):
            return [refused("blocks of a device come to this device alone")] * len(copy_specs)
        firsts = [_cut(copy_spec, slice(0, 1)) for copy_spec in copy_specs]
        others = [_cut(copy_spec, slice(1, None)) for copy_spec in copy_specs]
        # both end before this returns, whatever becomes of one of them
        blocks, rows = await asyncio.gather(
            self._device.receive(source, firsts, deadline),
            self._receive(sources, others, deadline),
            return_exceptions=True,
        )
        for found in (blocks, rows):
            if isinstance(found, BaseException):
                raise found
        assert isinstance(blocks, list)
        assert isinstance(rows, list)
        return [block if block.status != "done" else row for block, row in zip(blocks, rows, strict=True)]

    async def _receive(self, sources: Sources, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        """Receive by shared memory or a socket; all outcomes are "failed" if no transport fits."""
        theirs = dict(sources)
        outcomes = [Outcome("failed", f"no transport in common: it has {', '.join(theirs) or 'none'}")] * len(
            copy_specs
        )
        ways = self._ways(sources)
        for number, (_, transport, source) in enumerate(ways):
            last = number == len(ways) - 1
            if source.token in self._unfit and not last:
                continue
            outcomes = await transport.receive(source, copy_specs, deadline)
            hopeless = all(outcome.status == "failed" and not outcome.transient for outcome in outcomes)
            if last or not copy_specs or not hopeless:
                # on the last way, or after any success, the failure is of these blocks: say, withdrawn meanwhile
                return outcomes
            self._unfit.add(source.token)
        return outcomes

    def forget(self, sources: Sources) -> None:
        """See `Transport.forget`."""
        for name, source in sources:
            self._unfit.discard(source.token)
            transport = self._transports.get(name)
            if transport is not None:
                transport.forget(source)
            elif self._device is not None and name == self._device.name:
                self._device.forget(source)

    async def aclose(self) -> None:
        if self._device is not None:
            await self._device.aclose()
        for transport in self._transports.values():
            await transport.aclose()


def _is_device(copy_spec: CopySpec) -> bool:
    return bool(copy_spec.parts) and copy_spec.parts[0].region == DEVICE_REGION


def _is_between_devices(copy_spec: CopySpec) -> bool:
    """Whether the first part comes from a device, too: a sender may name any part as the source."""
    return _is_device(copy_spec) and copy_spec.ref_parts[0].region == DEVICE_REGION


def _apart(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Parts of shared memory, and parts of devices as the transport between devices numbers them."""
    memory = [part for part in parts if part.region != DEVICE_REGION]
    return memory, [_of_devices(part) for part in parts if part.region == DEVICE_REGION]


def _of_devices(part: Part) -> Part:
    """A part of a device, in the numbers of the transport between devices, which has one region."""
    return msgspec.structs.replace(part, region=0)


def _cut(copy_spec: CopySpec, which: slice) -> CopySpec:
    """Some parts of a copy spec, the first one as that of a device."""
    theirs, ours = copy_spec.ref_parts[which], copy_spec.parts[which]
    if which.start == 0:
        theirs, ours = tuple(map(_of_devices, theirs)), tuple(map(_of_devices, ours))
    return CopySpec(theirs, ours, copy_spec.checksums[which])
