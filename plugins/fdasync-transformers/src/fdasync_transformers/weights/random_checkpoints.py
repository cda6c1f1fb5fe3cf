"""Makes small random checkpoints that look like real ones, for tests, examples and benchmarks.

A folder is like one of the hub: config.json, generation_config.json, sharded safetensors in the family's own disk
layout, and a byte-level tokenizer with a chat template. The weights are noise of a width at which greedy output wanders
instead of looping and every router uses many experts, so that a wrong block, row or position changes the tokens. Knows
nothing of engines. Called by tests, examples and benchmarks.
"""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fdasync.errors import BadInput
from fdasync_transformers.weights.quiet import no_progress_bars

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

EOS_ID = 256
PAD_ID = 259
VOCAB_SIZE = 272
# roles, as many models write them, around bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MAX_SHARD_BYTES = {"tiny": 100_000, "small": 1_000_000, "medium": 50_000_000, "deep": 100_000_000}


class _Size(msgspec.Struct, frozen=True):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dense: int
    expert: int
    experts: int
    top_k: int


SIZES = {
    "tiny": _Size(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, dense=64, expert=16, experts=8, top_k=2),
    "small": _Size(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, dense=128, expert=32, experts=16, top_k=4),
    "medium": _Size(layers=8, hidden=256, heads=8, kv_heads=2, head_dim=32, dense=512, expert=128, experts=64, top_k=8),
    "deep": _Size(layers=16, hidden=256, heads=8, kv_heads=2, head_dim=32, dense=512, expert=128, experts=64, top_k=8),
}
FAMILIES = ("qwen3_moe", "ernie4_5_moe", "glm4_moe")


def make_random_checkpoint(
    folder: str | os.PathLike[str],
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    std: float = 0.3,
    size: str = "small",
) -> Path:
    """Write a random float32 checkpoint and return its folder.

    The same arguments give the same tensor bytes with the same torch. The folder appears whole or not at
    all: it is written beside its place under a hidden name and then renamed; a killed run leaves at most
    that hidden folder. The global random state of torch is left as it was.

    Args:
        folder: must not exist yet, or be empty.
        family: a name of `FAMILIES`. qwen3_moe: every layer has experts. ernie4_5_moe: first layer dense,
            shared experts, selection bias, tied output embedding. glm4_moe: first layer dense, sigmoid
            scores, expert groups, selection bias.
        seed: of the weights.
        std: of the weights, at hidden size 64; scaled with 1/sqrt(hidden size), so that activations keep
            their width over the sizes.
        size: a name of `SIZES`.

    Raises:
        BadInput: an unknown family or size, a bad std, or a folder that is taken.
    """
    if family not in FAMILIES:
        raise BadInput("family", f"{family!r} is not known", limit=", ".join(FAMILIES))
    if size not in SIZES:
        raise BadInput("size", f"{size!r} is not known", limit=", ".join(SIZES))
    if not 0.0 < std < 100.0:
        raise BadInput("std", f"{std!r} is out of range", limit="above 0, below 100")
    with whole_folder(folder) as partial:
        model = _random_model(family, SIZES[size], seed, std)
        with no_progress_bars():
            model.save_pretrained(partial, max_shard_size=MAX_SHARD_BYTES[size])
        write_tokenizer(partial, chat_template=CHAT_TEMPLATE)
    return Path(folder).absolute()


@contextmanager
def whole_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The place to write: beside the folder, under a hidden name that is renamed at the end of the block.

    A block that fails leaves nothing, a killed one at most the hidden folder. Raises BadInput for a folder that is
    taken: one that exists and is not empty.
    """
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput("folder", f"{target} exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(target)  # replaces an empty folder, fails on any other
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _random_model(family: str, size: _Size, seed: int, std: float) -> Any:
    # imported here: transformers takes seconds to load, and reading FAMILIES should not
    hf: Any = import_module("transformers")
    config = hf.AutoConfig.for_model(family, **_config(family, size))
    with torch.random.fork_rng(devices=[]):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    width = std * (64 / size.hidden) ** 0.5
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}  # names tied weights once
    names = sorted(parameters | {name for name in state if name.endswith("e_score_correction_bias")})
    with torch.no_grad():
        for name in names:
            value = state[name]
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            if name.endswith("e_score_correction_bias"):
                # about the gap between neighbouring scores, so that it changes some selections and decides none alone
                value.copy_(noise * (0.5 / size.experts if family == "ernie4_5_moe" else 0.1))
            elif value.ndim > 1:
                value.copy_(noise * width)
            elif name.endswith("bias"):
                value.copy_(noise * 0.1)
            else:
                value.copy_(1.0 + 0.1 * noise)  # norms
    model.generation_config = hf.GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    return model


def _config(family: str, size: _Size) -> dict[str, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.dense,
        "moe_intermediate_size": size.expert,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if family == "qwen3_moe":
        return common | {
            "num_experts": size.experts,
            "num_experts_per_tok": size.top_k,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        }
    if family == "ernie4_5_moe":
        return common | {
            "moe_num_experts": size.experts,
            "moe_k": size.top_k,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        }
    return common | {
        "n_routed_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def write_tokenizer(folder: Path, *, chat_template: str = "") -> None:
    """One token per byte, id = byte; then special tokens up to the model's vocabulary. "": it has no chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{n}|>" for n in range(VOCAB_SIZE - 256 - len(_SPECIAL))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*_SPECIAL, *reserved)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[EOS_ID - 256],
        "pad_token": _SPECIAL[PAD_ID - 256],
        **({"chat_template": chat_template} if chat_template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
