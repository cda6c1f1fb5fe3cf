"""The small kernels around a model's pass, for one kind of device: by Triton, or for host memory.

A runner has one of the two, and what queues its steps knows no difference. Holds nothing. Made by the plugins' models.
"""

from __future__ import annotations

from fdasync_kernels import digest, drafts, host, layout, own_drafts, states


class StepKernels:
    """By Triton: on GPUs, or on a CPU under its interpreter."""

    step_layout = staticmethod(layout.step_layout)
    scatter_updates = staticmethod(layout.scatter_updates)
    place_drafts = staticmethod(drafts.place_drafts)
    accept_drafts = staticmethod(drafts.accept_drafts)
    draft_room = staticmethod(own_drafts.draft_room)
    draft_rows = staticmethod(own_drafts.draft_rows)
    draft_noise = staticmethod(own_drafts.draft_noise)
    take_drafts = staticmethod(own_drafts.take_drafts)
    shift_states = staticmethod(states.shift_states)
    keep_states = staticmethod(states.keep_states)
    digest_rows = staticmethod(digest.digest_rows)


class HostKernels(StepKernels):
    """For tensors in host memory."""

    step_layout = staticmethod(host.step_layout)
    scatter_updates = staticmethod(host.scatter_updates)
    place_drafts = staticmethod(host.place_drafts)
    accept_drafts = staticmethod(host.accept_drafts)
    draft_room = staticmethod(host.draft_room)
    draft_rows = staticmethod(host.draft_rows)
    draft_noise = staticmethod(host.draft_noise)
    take_drafts = staticmethod(host.take_drafts)
    shift_states = staticmethod(host.shift_states)
    keep_states = staticmethod(host.keep_states)
    digest_rows = staticmethod(host.digest_rows)
