"""How a model is cut over ranks, by the library's own table (`base_model_tp_plan` of a config).

The table names a style for modules and parameters. Column-parallel weights are cut along their outputs, row-parallel
ones along their inputs, whose partial outputs are summed over the ranks. Experts are cut over their width, each of them
on every rank. Embedding, norms, routers and head stay whole, and so does all that the table does not name. Keys and
values are cut by the KV heads that a rank stores (`model/kv.py`). Knows modules of the library; knows no processes.
Called by `shard.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fdasync.errors import ConfigError, UnsupportedModel
from fdasync_transformers.model.kv import KVLayout
from fdasync_transformers.parallel.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from fdasync_transformers.model.kv import LayerSpec

# styles that cut nothing here: modules of these styles are whole on every rank. Vocabularies, and projections whose
# outputs every rank needs whole: it computes them itself, instead of asking the others
_WHOLE = frozenset(
    {"embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input"}
    | {"rowwise_rep", "replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params"}
)
_CUT = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise"})
# of modules whose outputs are parts of a sum
_SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
# of a module inside of such a one, which is whole on every rank: its input is divided by the number of ranks
_DIVIDED = "moe_identity_expert"
# names of projections whose outputs are keys and values, one head after the other
_KEYS_VALUES = ("k_proj", "v_proj")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
# decoder layers inside of multi-token prediction layers, as the library's `MtpLayer` has them
_MTP = "mtp.layers.*.mtp_block."


@dataclass(frozen=True)
class Plan:
    """The cuts of one rank.

    Attributes:
        cuts: by name of the model's tensor; others are whole.
        rows: names of row-parallel linear modules.
        summed: names of further modules whose outputs are summed over the ranks.
        divided: names of modules whose inputs are divided by the number of ranks.
        heads: whether the KV heads are divided among the ranks; False: every rank has all of them.
    """

    cuts: Mapping[str, Cut]
    rows: tuple[str, ...]
    summed: tuple[str, ...]
    divided: tuple[str, ...]
    heads: bool


def read_plan(
    model: PreTrainedModel, layers: Mapping[str, LayerSpec], rank: int, ranks: int, dtype: torch.dtype
) -> Plan:
    """The plan of a whole model, which may be on the meta device.

    Args:
        layers: its attention layers, by the name of their module.
        dtype: of keys and values.

    Raises UnsupportedModel for a family without a plan, or whose plan asks for an unknown style; ConfigError for sizes
    that the number of ranks does not divide.
    """
    kind = str(model.config.model_type)
    table = _table_of(model, kind)
    modules = dict(model.named_modules())
    named = {name: table[generic] for name in modules if (generic := _generic(name)) in table}
    rows = tuple(name for name, style in named.items() if style == "rowwise")
    for name in rows:
        linear = modules[name]
        if not isinstance(linear, torch.nn.Linear) or type(linear).forward is not torch.nn.Linear.forward:
            raise UnsupportedModel(kind, f"tensor parallel: {name} ({type(linear).__name__}) is no plain linear module")
    summed = tuple(name for name, style in named.items() if style in _SUMMED)
    styles = {name: _style_of(name, table) for name in model.state_dict()}
    cut = {name: style for name, style in styles.items() if style in _CUT}
    attention = {name: any(one.startswith(f"{name}.") for one in cut) for name in layers}
    if len(set(attention.values())) > 1:
        raise UnsupportedModel(kind, "tensor parallel: its plan cuts the attention of some layers only")
    heads = all(attention.values())
    layout = KVLayout(tuple(layers.values()), dtype, rank, ranks) if heads else None
    cuts = {}
    for name, style in cut.items():
        tensor = model.get_parameter(name)
        found = _cut(name, style, tensor, rank, ranks, in_module=_generic(name) not in table)
        if found is None:
            continue
        owner, _, last = name.rpartition(".")[0].rpartition(".")
        if layout is not None and owner in layers and last in _KEYS_VALUES:
            count = min(ranks, layout.shares)
            found = Cut(found.dim, count, rank * count // ranks)
        size = tensor.shape[found.dim]
        if size % (found.pieces * found.count):
            each = size // found.pieces
            raise ConfigError("tensor_parallel", f"{ranks} ranks cannot part the {each} of {name}")
        if _generic(name) in table and style.endswith("rowwise") and not _is_summed(name, summed, rows):
            raise UnsupportedModel(kind, f"tensor parallel: its plan cuts {name}, and sums nothing behind it")
        cuts[name] = found
    divided = tuple(name for name, style in named.items() if style == _DIVIDED)
    return Plan(cuts, rows, summed, divided, heads)


def _table_of(model: PreTrainedModel, kind: str) -> dict[str, str]:
    table = {str(name): str(style) for name, style in (getattr(model, "tp_plan", None) or {}).items()}
    unknown = sorted(set(table.values()) - _WHOLE - _CUT - _SUMMED - {_DIVIDED})
    if unknown:
        raise UnsupportedModel(kind, f"tensor parallel: its plan has a style that is not known: {', '.join(unknown)}")
    if not any(style in _CUT for style in table.values()):
        raise UnsupportedModel(kind, "tensor parallel: the library has no plan for this family (base_model_tp_plan)")
    return table


def _generic(name: str) -> str:
    """A name as tables have it. A multi-token prediction layer is cut as the decoder layers that it is one of."""
    generic = _NUMBER.sub(".*", name)
    return f"model.layers.*.{generic.removeprefix(_MTP)}" if generic.startswith(_MTP) else generic


def _style_of(name: str, table: Mapping[str, str]) -> str:
    """The style of a tensor: its own, or its module's; "" where there is none."""
    own = _generic(name)
    return table.get(own) or table.get(own.rpartition(".")[0], "")


def _cut(name: str, style: str, tensor: torch.Tensor, rank: int, ranks: int, *, in_module: bool) -> Cut | None:
    """The cut of a tensor with this style; `in_module`: its module has the style, and adds a bias behind the sum."""
    last = tensor.dim() - 1
    if style == "rowwise":
        return None if in_module and name.endswith("bias") else Cut(last, ranks, rank)
    if style == "packed_rowwise":
        return Cut(last, ranks, rank, 2)
    return Cut(max(0, last - 1), ranks, rank, 2 if style == "packed_colwise" else 1)


def _is_summed(name: str, summed: tuple[str, ...], rows: tuple[str, ...]) -> bool:
    return name.rpartition(".")[0] in (*summed, *rows)
