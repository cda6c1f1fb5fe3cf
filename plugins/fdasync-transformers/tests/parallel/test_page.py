"""The page on tensor parallelism says of every family what cutting it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fdasync_transformers.model.refusals import refuse_unservable
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.tiny.checkpoints import tiny_config
from fdasync_transformers.tiny.families import FAMILIES
from fdasync_transformers.weights.architecture import _text_class

from fdasync.errors import ConfigError, UnsupportedModel

PAGE = Path(__file__).parents[4] / "docs" / "tensor-parallel.md"


def built(family: str) -> Any:
    config = tiny_config(family)
    kind: Any = _text_class(config)
    with torch.device("meta"):
        return kind._from_config(config)


def width(family: str, ranks: int) -> tuple[str, Sharded | None]:
    model = built(family)
    try:
        refuse_unservable(model)
        return "yes", Sharded(model, 0, ranks, latent=True)
    except ConfigError as error:
        return "no: its tiny sizes do not divide" if "cannot part" in str(error) else f"no: {error}", None
    except UnsupportedModel as error:
        return "no: no plan" if "no plan" in error.reason else "no: heads differ by layer", None


def row(family: str) -> str:
    (two, sharded), (four, _) = width(family, 2), width(family, 4)
    attention = ""
    if sharded is not None:
        latent = any(layer.latent_rank for layer in sharded._layers.values())
        cut = any(".self_attn" in name for name in sharded.cuts)
        attention = ("latents whole, heads cut" if cut else "whole, latents") if latent else "cut" if cut else "whole"
    return f"| {family} | {two} | {four} | {attention} |"


@pytest.mark.nightly
def test_the_page_has_every_family() -> None:
    entries = {name: entry for name, entry in FAMILIES.items() if not entry.quantised and entry.vision is None}
    wanted = [row(name) for name, entry in entries.items() if not entry.refused and not entry.whole_only]
    table = PAGE.read_text().partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == wanted
