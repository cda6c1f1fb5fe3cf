"""What a runner can say of a model before it loads it: whether it would be served, and how much memory it would take.

Pure data. Made by `Runner.examine`; shown by `fdasync doctor --model`.
"""

from __future__ import annotations

import msgspec

from fdasync.request import Numerics


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was looked at without loading it.

    Attributes:
        model: its folder, or another name.
        family: the library's name of its architecture; "" where it could not be read.
        served: whether an engine would start with it, as far as can be told without its weights.
        reason: why not; "" if it would be served.
        model_class: the class that would compute it; "" where it is not known.
        dtype: of weights and KV; "" where it is not known.
        numerics, sum_slices: what `Capacity.numerics` and `Capacity.sum_slices` would answer.
        tensor_parallel: what `Capacity.tensor_parallel` would answer.
        stored_nbytes: of the files that hold its tensors.
        weights_nbytes: of the weights in memory; with several ranks, of the rank that holds most.
        kv_token_nbytes: KV of one token over all layers, likewise; 0: not known.
        state_nbytes: recurrent state of one sequence; 0: the model has none.
        aux_token_nbytes: routing (and other data) of one token, in host memory.
        max_context_tokens: most tokens of one sequence; 0: not known.
        num_hidden_layers, moe_layers, num_experts, top_k: of the model; 0 of a dense one.
        device: that it would run on, for people.
        device_nbytes: memory of the device; 0: not known.
        notes: for people: parts that are skipped, dequantised or converted.
        replaced: by kind, how many modules kernels replace on a GPU, if a proof at the start finds them alike.
        kept: for people: modules that no kernel would replace, and why, a line each.
    """

    model: str
    family: str = ""
    served: bool
    reason: str = ""
    model_class: str = ""
    dtype: str = ""
    numerics: Numerics = "default"
    sum_slices: int = 1
    tensor_parallel: int = 1
    stored_nbytes: int = 0
    weights_nbytes: int = 0
    kv_token_nbytes: int = 0
    state_nbytes: int = 0
    aux_token_nbytes: int = 0
    max_context_tokens: int = 0
    num_hidden_layers: int = 0
    moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    device: str = ""
    device_nbytes: int = 0
    notes: tuple[str, ...] = ()
    replaced: dict[str, int] = {}
    kept: tuple[str, ...] = ()
