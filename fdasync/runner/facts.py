"""What a model is and how much fits, told once: by a runner, by an engine, by a router, and in handshakes.

`Facts` is the public part of a runner's `Capacity`; `ModelFacts` is what `Generator.facts` returns. Bounds stand in the
types, since facts cross links. Pure data.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec

from fdasync.cache.aux import ROUTING, AuxSpec
from fdasync.request import MAX_VERSION_CHARS, Numerics
from fdasync.stats import cut

Meta = msgspec.Meta
_Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Small = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Words = Annotated[str, Meta(max_length=4096)]
# no model has more layers with experts
_Layers = Annotated[tuple[_Small, ...], Meta(max_length=4096)]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the limits of what computes it.

    Attributes:
        model: name for people.
        vocab_size: token ids are below it.
        eos_ids: token ids that end a sample.
        max_context_tokens: most tokens of one sample, prompt and output; on a router, of the instance that takes the
            longest.
        block_tokens: tokens of a KV block.
        num_blocks: KV blocks on the device.
        block_nbytes: bytes of a block's KV over all layers.
        kv_layout, kv_dtype: names; blocks of other layouts or dtypes are never mixed.
        aux_specs: all data that each step writes per token (`AuxArena.scatter`), among them the routing where it is
            captured.
        moe_layer_ids: hidden-layer numbers of the routing's rows; () where none is captured.
        num_hidden_layers: of the model, dense ones included; 0: not told.
        num_experts, top_k: of the routing; 0 where none is captured.
        top_k_by_layer: where layers differ (docs/design.md, rule 3), else None.
        tokenizer: entry-point name in `fdasync.tokenizers`: of a runner, the one that fits; of a generator, the one
            that was made of `model_path`. "": there is none, or an object was given instead.
        grammars: samples are drawn under the `Grammar` that a sequence asks for (`SamplerSpec.grammar`).
        processors: names of the logits processors that a sequence may ask for (`SamplerSpec.processors`).
        scores_prompts: steps return the log-probs of prompts' tokens that sequences ask for (`StepOutput.scores`).
        routing_debug: rows name positions, not experts, as `RunnerLimits` asked.
        dtype: that the model computes in ("bfloat16"); "": not told.
        tensor_parallel: how many ranks compute each step, as `RunnerLimits` asked; all that is told of blocks
            (`block_nbytes`, `kv_layout`) is of the whole model and does not depend on it. On a router 0: instances may
            differ in it.
        numerics: what the runner promises of its numbers. "fixed": every number of a token depends on its prefix and
            the weights alone, to the last bit. A runner says so only where `RunnerLimits` asked for it and every path
            of this model keeps it, else "default": the engine then refuses to start. A runner may also refuse by
            itself, with a ConfigError that says which part of the model stands in the way.
        sum_slices: of fixed numerics, as `RunnerLimits` asked: with them the numbers do not depend on the ranks.
        no_sleep: why the memory cannot be released (`Runner.release_memory`); "": it can.
    """

    model: _Words
    vocab_size: _Count
    eos_ids: Annotated[tuple[_Count, ...], Meta(max_length=4096)]
    max_context_tokens: _Count
    block_tokens: _Small
    num_blocks: _Count
    block_nbytes: _Count
    kv_layout: _Words
    kv_dtype: _Words
    aux_specs: Annotated[tuple[AuxSpec, ...], Meta(max_length=64)] = ()
    moe_layer_ids: _Layers = ()
    num_hidden_layers: _Small = 0
    num_experts: _Small = 0
    top_k: _Small = 0
    top_k_by_layer: _Layers | None = None
    tokenizer: _Words = ""
    grammars: bool = False
    processors: Annotated[tuple[_Words, ...], Meta(max_length=64)] = ()
    scores_prompts: bool = False
    routing_debug: bool = False
    dtype: _Words = ""
    tensor_parallel: _Small = 1
    numerics: Numerics = "default"
    sum_slices: _Small = 1
    no_sleep: _Words = "this runner cannot release its memory"

    @property
    def captures_routing(self) -> bool:
        """Results have expert routing."""
        return any(spec.name == ROUTING for spec in self.aux_specs)

    @property
    def aux(self) -> tuple[str, ...]:
        """Names of the data besides routing that results have for each token, in order."""
        return tuple([spec.name for spec in self.aux_specs if spec.name != ROUTING])

    @property
    def can_sleep(self) -> bool:
        """`sleep` can release memory; on a router: at every instance."""
        return not self.no_sleep


class ModelFacts(Facts, frozen=True, kw_only=True):
    """The model behind a generator, and its limits. They stay the same from the start on, but for `weight_version`,
    `num_instances`, and on a router `max_context_tokens`.

    Attributes:
        model_path: checkpoint folder, as configured; "" where the runner needs none.
        takes_text: prompts may be text, and results have text.
        max_step_tokens, max_requests: as in `EngineConfig`; on a router, of one instance.
        weight_version: the caller's label of the weights in use.
        num_instances: engines that serve it: 1, or on a router the instances that it has a link to.
    """

    model_path: _Words = ""
    takes_text: bool = False
    max_step_tokens: _Count = 0
    max_requests: _Count = 0
    weight_version: Annotated[str, Meta(max_length=MAX_VERSION_CHARS)] = "0"
    num_instances: _Count = 1

    @classmethod
    def of(cls, facts: Facts, **more: Any) -> Self:
        """What a runner tells, and what an engine knows besides."""
        told: dict[str, Any] = {name: getattr(facts, name) for name in Facts.__struct_fields__} | more
        for name, value in told.items():
            # a runner may say more than a link carries
            told[name] = cut(value) if isinstance(value, str) else value
        return cls(**told)
