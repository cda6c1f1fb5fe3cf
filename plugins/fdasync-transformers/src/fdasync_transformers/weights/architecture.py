"""Finds the library's class for a config.json: for names that the library does not know, and inside multimodal models.

Reads no tensors and builds nothing. Called by `loading.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from fdasync.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel


class Alias(NamedTuple):
    """Another model type of the library that computes the same.

    Attributes:
        model_type: of the library.
        reason: why it computes the same.
        fixed: config values that the other type has and this one computes by.
    """

    model_type: str
    reason: str
    fixed: tuple[tuple[str, Any], ...] = ()


#: model types that the library has no causal language model for, by name
ALIASES = {
    "kimi_k2": Alias("deepseek_v3", "its published code is DeepSeek-V3's under another name"),
    "qwen3_vl_moe_text": Alias(
        "qwen3_moe",
        "a text token has one position on all rotary axes, and only image tokens get deepstack features",
        (("norm_topk_prob", True),),
    ),
    "glm4v_moe_text": Alias("glm4_moe", "a text token has one position on all rotary axes", (("use_qk_norm", False),)),
}
# keys of config.json that the model is built without
_NOT_BUILT = ("quantization_config", "compression_config", "attn_implementation", "_attn_implementation")


@dataclass(frozen=True)
class Architecture:
    """What is built for a checkpoint.

    Attributes:
        config: of the language model, without what config.json says of quantisation.
        model_class: of the language model.
        whole: config and class of the multimodal model around it; None: the checkpoint is the language model.
        renamed: the library's automatic classes do not find the model class by the name in config.json.
        notes: for people.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    whole: tuple[PreTrainedConfig, type[PreTrainedModel]] | None
    renamed: bool
    notes: tuple[str, ...]


def read_architecture(raw: Mapping[str, Any], config_file: Path) -> Architecture:
    """What to build for a config.json.

    Raises CheckpointError for a config that is not valid; UnsupportedModel for a type that the library does not know,
    and for one without a causal language model.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(str(config_file), "has no model_type")
    notes: list[str] = []
    config = _config(_plain(raw), model_type, "auto_map" in raw, config_file, notes)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(str(config_file), f"architectures {architectures!r} is no list")
    text = config.get_text_config()
    if text is config:
        if architectures and not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
            raise UnsupportedModel(model_type, f"the checkpoint is a {architectures[0]}, not a causal language model")
        renamed = bool(notes) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        return Architecture(config, _text_class(config), None, renamed, tuple(notes))
    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if whole is None:
        raise UnsupportedModel(model_type, "the library has no class for the whole of this model and its other parts")
    # which tensors are tied is said of the whole
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    if text.dtype is None:
        text.dtype = config.dtype
    if text.model_type in ALIASES:
        text = _config(_plain(text.to_dict()), text.model_type, False, config_file, notes)
    notes.append(f"the text half of {model_type}: images, sound and video are not served")
    return Architecture(text, _text_class(text), (config, whole), True, tuple(notes))


def _config(
    raw: Mapping[str, Any], model_type: str, has_code: bool, config_file: Path, notes: list[str]
) -> PreTrainedConfig:
    alias = ALIASES.get(model_type)
    known = alias.model_type if alias is not None else model_type
    fixed = dict(alias.fixed) if alias is not None else {}
    if alias is not None:
        notes.append(f"{model_type} is built as {known}: {alias.reason}")
    if known not in CONFIG_MAPPING:
        why = "transformers does not know this model type"
        if has_code:
            why += "; the code that the checkpoint brings is not run"
        raise UnsupportedModel(model_type, why)
    try:
        # infinity and NaN stand in files of the library as objects
        values: Any = PreTrainedConfig._decode_special_floats({**raw, **fixed, "model_type": known})
        config: PreTrainedConfig = CONFIG_MAPPING[known].from_dict(values)
    except Exception as error:  # the library checks configs with errors of many types
        problem = " ".join(str(error).split())
        raise CheckpointError(str(config_file), f"is no valid {known} config: {problem}") from error
    return config


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without quantisation: the model that is built is plain, and so is its fingerprint. And without the attention that
    a config may ask for: the runner has its own, and the library builds no model whose attention is not installed."""
    return {
        key: _plain(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in raw.items()
        if key not in _NOT_BUILT
    }


def _text_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The causal language model of a config. Raises UnsupportedModel."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        # the library's table leaves some of its classes out (Mistral4ForCausalLM)
        module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        classes = [value for name, value in vars(module).items() if name.endswith("ForCausalLM")]
        found = next((each for each in classes if each.config_class is type(config)), None)
    if found is None:
        raise UnsupportedModel(str(config.model_type), "the library has no causal language model of this type")
    model_class: type[PreTrainedModel] = found
    return model_class
