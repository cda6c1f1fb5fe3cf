"""The families of the catalogue by structure: which of them stand for the others in `make test`.

A *kind* is one way in which a part of a model is built: how its routers choose, how its experts are laid out, what its
attention reads, what state its layers keep, how its weights are stored. A class is families that go through the same
code of the plugin, but for kinds that another class stands for. Its first family stands for it; in a property of some
families alone, the first of them. `test_each_family.py` plays the others every night. `test_structures.py` reads the
kinds of each family from its model: it holds each family to one class, and each kind to a family that stands for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from _pytest.mark import ParameterSet

#: families by class, the one that stands for it first
CLASSES: dict[str, tuple[str, ...]] = {
    "softmax": (
        "qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "hunyuan_v1_moe", "flex_olmo", "mellum", "qwen3_moe_swa",
        "qwen2_moe_swa",
    ),
    "softmax of prepared input, heads of two sizes": ("gemma4_text", "gemma4_text_26b"),
    "softmax of the chosen, transposed experts with biases, windows, sinks": (
        "gpt_oss", "granitemoe", "aria_text", "granitemoe_swa", "granitemoeshared", "granitemoehybrid_attention",
        "cohere2_moe",
    ),
    "softmax with a bias of the selection, experts of a layout of their own": ("longcat_flash", "ernie4_5_moe"),
    "softmax in groups, latents": ("deepseek_v2", "mistral4"),
    "slots chosen one after the other": ("phimoe",),
    "sigmoid": ("flint", "kolibri1", "cohere2_moe_sigmoid"),
    "sigmoid with a bias of the selection": ("minimax_m2", "hy_v3", "afmoe", "laguna", "minimax_m3_vl_text"),
    "sigmoid in groups, latents": (
        "deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2", "moonlight", "axk1", "beam", "dots1", "exaone_moe",
        "mimo_v2_flash", "solar_open",
    ),
    "routers that are left alone, experts without ids, chunks": ("llama4_text", "dbrx"),
    "positions picked by indexers": ("glm_moe_dsa", "deepseek_v32", "axk2", "dots3_note_text", "hy_v4"),
    "gated delta nets": ("qwen3_next", "qwen3_5_moe_text"),
    "delta attention by the channel": ("kimi_linear", "bailing_hybrid"),
    "mamba, experts without gates": ("nemotron_h", "granitemoehybrid"),
    "convolutions with state": ("lfm2_moe", "zaya"),
    "lightning attention": ("minimax",),
    "no experts": ("qwen3_dense",),
    "refused": (
        "deepseek_v4", "jamba", "inkling2_text", "inkling_text", "jetmoe", "doge", "minimax_m3_sparse",
        "qwen4_exp_text", "qwen4_exp_indexed",
    ),
    "a part of a larger model": (
        "qwen3_vl_moe", "llama4", "minimax_m3_vl", "gemma4", "glm4v_moe", "qwen3_5_moe",
    ),
    "stored with scales": (
        "qwen3_moe_fp8", "deepseek_v3_fp8", "minimax_m2_fp8", "qwen3_moe_compressed_fp8", "qwen3_moe_int8",
        "qwen3_moe_modelopt",
    ),
    "stored in blocks of four bits": ("gpt_oss_mxfp4",),
    "stored packed": ("kimi_k2_int4",),
    "stored as AWQ": ("qwen3_moe_awq", "minimax_m2_awq"),
    "stored as GPTQ": ("qwen3_moe_gptq_desc_act", "qwen3_moe_gptq"),
}  # fmt: skip


class Parted(NamedTuple):
    """Families of a property: those that `make test` and `make test-ci` play, and those of every night."""

    by_day: tuple[str, ...]
    by_night: tuple[str, ...]


def parted(names: Iterable[str], *, also: Collection[str] = (), ahead: Collection[str] = ()) -> Parted:
    """The families `names` of a property: of each class that occurs in them the first is played by day, and so are
    those of `also`, which the property is about. Those of `ahead` come first: of a test that keeps but some in
    `make test` these are kept."""
    names = tuple(names)
    assert {*ahead} <= {*names}, f"not among the families: {sorted({*ahead}.difference(names))}"
    families = (*ahead, *(name for name in names if name not in ahead))
    first = {next((one for one in members if one in families), "") for members in CLASSES.values()}.union(also)
    return Parted(*(tuple(one for one in families if (one in first) == day) for day in (True, False)))


def by_structure(
    names: Iterable[str], *, also: Collection[str] = (), ahead: Collection[str] = ()
) -> list[ParameterSet]:
    """Parameters of a property that needs more than `test_each_family.py` makes of a family: as `parted`."""
    by_day, by_night = parted(names, also=also, ahead=ahead)
    return in_turn((*by_day, *by_night), by_day)


def in_turn(names: Iterable[str], kept: Collection[str], in_ci: Collection[str] = ()) -> list[ParameterSet]:
    """Parameters of which those of `kept` stay in `make test`, those of `in_ci` in `make test-ci`, and the others are
    played every night."""

    def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
        if name in kept:
            return ()
        return (pytest.mark.ci,) if name in in_ci else (pytest.mark.nightly,)

    return [pytest.param(one, marks=marks(one)) for one in names]
