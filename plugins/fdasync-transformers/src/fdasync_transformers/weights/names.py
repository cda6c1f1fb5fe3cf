"""Turns the names of a checkpoint's tensors into names of the model that is built.

By the library's own conversion table (`transformers.conversion_mapping`). A checkpoint whose language model stands
inside a multimodal one has the names of the whole: they go by the whole model, built on the meta device, and what lies
beside the language model is left out. Knows names alone. Made by `loading.py` and `update.py`; used by `mapping.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fdasync_transformers.mtp import names as mtp_names
from fdasync_transformers.mtp.head import head_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedModel

    from fdasync_transformers.parallel.cuts import Cut

# where the library puts a language model inside a multimodal one, and the same place in the language model alone
_INSIDE = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)


class Names:
    """The names of a model's checkpoints.

    Args:
        model: that is built; may be on the meta device.
        whole: the multimodal model that its checkpoints are of, on the meta device; None: they are its own.

    Attributes:
        model, whole: as given; `whole` is the model itself where it was None.
        state: of the whole.
        shapes: the model's tensors as it was given, on the meta device: a rank of a group holds parts of them.
        cuts: of the tensors that this rank holds a part of; set after the model was cut.
        has_mtp: whether the model has its multi-token prediction (MTP) layers.
    """

    def __init__(self, model: PreTrainedModel, whole: PreTrainedModel | None = None) -> None:
        self.model = model
        self.whole: PreTrainedModel = model if whole is None else whole
        self.state: dict[str, torch.Tensor] = self.whole.state_dict()
        self.shapes = {name: torch.empty_like(held, device="meta") for name, held in model.state_dict().items()}
        self.cuts: Mapping[str, Cut] = {}
        self.has_mtp = head_of(model) is not None
        self._hidden_layers = int(getattr(model.config, "num_hidden_layers", 0) or 0)
        self._told_mtp = mtp_names.told_layers(model.config) > 0
        rules = get_model_conversion_mapping(self.whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._rule_of = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def read(self, key: str) -> tuple[str, str | None]:
        """A stored name as the library reads it: the name of a tensor of `state` ("": there is none), and the pattern
        of the rule that makes it (None: it is stored as it is).

        Call it in the library's order (`dot_natural_key`): some rules need that.
        """
        stored = key
        if self.has_mtp:
            key = mtp_names.own_name(key, self._hidden_layers)
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self.whole.base_model_prefix, self.state
        )
        if name not in self.state:
            return (stored if stored in self.state else ""), None
        return name, pattern

    def number(self, key: str, pattern: str) -> int | None:
        """The number in a stored name at the pattern's star (the expert); None where there is none."""
        # patterns are regular expressions but for their star
        numbered = re.compile(pattern.replace("*.", r"(\d+)\."))
        found = numbered.search(key)
        if found is None:
            for rule in self._renamings:
                key, _ = rule.rename_source_key(key)
            found = numbered.search(key)
        return int(found.group(1)) if found and numbered.groups else None

    def rule(self, pattern: str) -> WeightConverter:
        """The rule that a pattern belongs to."""
        return self._rule_of[pattern]

    def own(self, name: str) -> str | None:
        """The model's name of a tensor of the whole; None for parts beside the language model."""
        if self.whole is self.model:
            return name
        for inside, alone in _INSIDE:
            if name.startswith(inside) and alone + name.removeprefix(inside) in self.shapes:
                return alone + name.removeprefix(inside)
        return None

    def is_beside(self, name: str) -> bool:
        """Whether a name that has no place in the model is of a part beside the language model."""
        return self.whole is not self.model and not name.startswith(tuple(inside for inside, _ in _INSIDE))

    def ignores(self, key: str) -> bool:
        """Whether the library leaves a name out that has no place."""
        if self.has_mtp:
            if mtp_names.is_of_mtp(key, self._hidden_layers):
                return mtp_names.is_copy(key, self._hidden_layers)
        elif self._told_mtp and mtp_names.is_of_mtp(key, self._hidden_layers):
            return True
        patterns = [r"rotary_emb\.inv_freq$"]
        for model in (self.model, self.whole):
            patterns += model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, key) for pattern in patterns)

    def needed(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """The part of `shapes` that a checkpoint of these names must fill: a checkpoint without any MTP tensor leaves
        these layers as they are, as trainers' checkpoints do."""
        if not self.has_mtp or self.mtp_among(keys):
            return self.shapes
        return {name: held for name, held in self.shapes.items() if not name.startswith(mtp_names.PREFIX)}

    def mtp_among(self, keys: Iterable[str]) -> bool:
        """Whether one of these names is of an MTP layer, beside copies of the model's own tensors."""
        layers = self._hidden_layers
        return any(mtp_names.is_of_mtp(key, layers) and not mtp_names.is_copy(key, layers) for key in keys)
