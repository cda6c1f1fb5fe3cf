"""The multi-token prediction (MTP) layers of a model: built by the library's own classes, beside the model's layers.

A layer takes the embedding of a token and the hidden state of the position before it, and its hidden state says what
comes after that token. Embedding, rotary angles and head are the model's. The layers become a part of the model, so
that loading, naming and updating weights reach them as they reach all others. Knows no steps, no KV and no checkpoints.
Built by `weights/loading.py`; run by `execution/drafts/mtp_passes.py` and `mtp/specs.py`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_layers import MtpModel

from fdasync.errors import UnsupportedModel
from fdasync_transformers.mtp.names import PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# kinds of attention layers that a paged pass knows
_ATTENTIONS = ("full_attention", "sliding_attention")


class MtpHead(torch.nn.Module):
    """See the module.

    Attributes:
        config: of the layers: a copy of the model's.
        layers: the library's `MtpLayer`s. The attention of layer k has `layer_idx` n + k in a model of n layers.
        shared_post_norm: behind each layer, in families that have one norm for all; else None.
    """

    def __init__(self, built: MtpModel, first_index: int) -> None:
        """Takes the layers of `built`; its other parts are the model's, and stay there."""
        super().__init__()
        self.config: PreTrainedConfig = built.config
        self.layers: torch.nn.ModuleList = built.layers
        self.shared_post_norm: torch.nn.Module | None = getattr(built, "shared_post_norm", None)
        for number, layer in enumerate(self.layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    # a number, which torch does not know
                    module.layer_idx = first_index + number  # type: ignore[assignment]

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The decoder layer of each."""
        library: list[Any] = list(self.layers)
        return [layer.mtp_block for layer in library]

    def kind(self, number: int) -> str:
        """The kind of a layer's attention, by the library's name."""
        kinds: Any = getattr(self.config, "layer_types", None)
        return str(kinds[number]) if kinds else "full_attention"

    def run(
        self,
        model: PreTrainedModel,
        number: int,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        **arguments: Any,
    ) -> torch.Tensor:
        """Hidden states [T, D] of layer `number` at these tokens (int64 [T]) and positions (int64 [T]).

        Args:
            model: that this is a part of.
            hidden: [T, D], of the position before each: of the model for the first layer, of layer `number` - 1 after.
            arguments: for the attention function, and the cache.
        """
        library: Any = model
        embedded = library.get_input_embeddings()(tokens[None])
        rotary = getattr(library.get_decoder(), "rotary_emb", None)
        angles = None if rotary is None else rotary(embedded, position_ids=positions[None])
        output = self.layers[number](
            embedded,
            hidden[None],
            position_embeddings=angles,
            attention_mask=arguments.pop("attention_mask", None),
            position_ids=positions[None],
            past_key_values=arguments.pop("past_key_values", None),
            **arguments,
        )
        if self.shared_post_norm is not None:
            output = self.shared_post_norm(output)
        states: torch.Tensor = output[0]
        return states


def head_of(model: torch.nn.Module) -> MtpHead | None:
    """The MTP layers of a model that has them attached."""
    found = getattr(model, PREFIX.rstrip("."), None)
    return found if isinstance(found, MtpHead) else None


def attach(model: PreTrainedModel, layers: int, dtype: torch.dtype) -> None:
    """Make this many MTP layers, on the meta device, a part of a model that is there too.

    Raises UnsupportedModel naming what keeps the library's layer from fitting.
    """
    kind = str(model.config.model_type)
    config = _layers_config(model, layers)
    try:
        with torch.device("meta"):
            plain = _with_config(model, config)
            built: Any = MtpModel(plain, layers)
    except Exception as error:  # the library raises errors of many types where its layer does not fit a family
        raise UnsupportedModel(kind, f"no MTP layer can be built: {type(error).__name__}: {error}") from error
    if getattr(built, "has_per_layer_rope", False):
        raise UnsupportedModel(kind, "its MTP layers have rotary angles of their own")
    # and not what it has of the model, whose rotary angles stay float32
    head = MtpHead(built, int(model.config.num_hidden_layers)).to(dtype)
    for number in range(layers):
        if head.kind(number) not in _ATTENTIONS:
            raise UnsupportedModel(kind, f"MTP layer {number} is of kind {head.kind(number)}")
    setattr(model, PREFIX.rstrip("."), head)


def _layers_config(model: PreTrainedModel, layers: int) -> PreTrainedConfig:
    """The model's config, with what the library asks for to make MTP layers of it.

    If the library knows no MTP layers of a family, it has none of these values: then a layer is like the model's last.
    """
    config: Any = copy.deepcopy(model.config)
    config.num_mtp_layers = layers
    for key in ("layer_types", "mlp_layer_types"):
        of_main, of_mtp = getattr(config, key, None), f"mtp_{key}"
        if of_main and not getattr(config, of_mtp, None):
            kinds = set(of_main)
            if key == "layer_types" and len(kinds) > 1:
                # an MTP layer attends: its KV follows blocks, and it keeps no state
                kinds &= set(_ATTENTIONS)
                if len(kinds) != 1:
                    raise UnsupportedModel(
                        str(config.model_type), "nothing says of which kind the attention of its MTP layers is"
                    )
            setattr(config, of_mtp, [of_main[-1] if len(kinds) > 1 else kinds.pop()] * layers)
    made: PreTrainedConfig = config
    return made


def _with_config(model: PreTrainedModel, config: PreTrainedConfig) -> Any:
    """The parts of a model that the library's MTP model looks at, with another config."""
    library: Any = model

    class Parts:
        lm_head = library.lm_head

        def __init__(self) -> None:
            self.config = config

        def get_decoder(self) -> Any:
            return library.get_decoder()

        def get_input_embeddings(self) -> Any:
            return library.get_input_embeddings()

    return Parts()
