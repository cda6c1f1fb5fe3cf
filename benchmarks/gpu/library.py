"""The library's own continuous batching on the model of `gpu_serving`: a process of its own, for it may fail.

    python -m benchmarks.gpu.library FOLDER REQUESTS NEW_TOKENS OUT --model NAME [--tiny]

Draws the same weights (one seed), sends all requests at once, greedy, without an end token, and writes what it found
to OUT as JSON after every round, so that whoever stops it has the rounds before: `{"rates": [...], "notes": {...}}`,
rates in new tokens per second, prefill included. The library chooses its own settings; attention is torch's own
(`sdpa`) unless flash attention is installed, since nothing is downloaded. Its graphs are captured before the clock
starts. The first round warms up, and counts only if it is all there is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from fdasync_transformers.weights import loading
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.gpu.scale import large, tiny

# no further round after this long
_ENOUGH_S = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("requests", type=int)
    parser.add_argument("new_tokens", type=int)
    parser.add_argument("out")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    scale = tiny(args.model) if args.tiny else large(args.model)
    out = Path(args.out)
    found: dict[str, Any] = {"rates": [], "notes": {"transformers": transformers.__version__}}
    checkpoint = loading.read_checkpoint(args.folder, with_tensors=False)
    model: Any = loading.draw(checkpoint, scale.dtype, torch.device(scale.device))
    flash = importlib.util.find_spec("flash_attn") is not None
    chosen = "flash_attention_2" if flash else "sdpa"
    settings: dict[str, Any] = {}
    if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__:
        settings["auto_switch_to_flash"] = flash
    else:
        # before 5.18 it looks for flash attention on its hub, unless the name says that a paged one was chosen
        chosen = f"paged|{chosen}"
    if args.tiny:
        # without the package psutil it takes a CPU for one without memory
        settings |= {"num_blocks": 16, "max_batch_tokens": 64}
    model.set_attn_implementation(chosen)
    # no id is -1
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    config = ContinuousBatchingConfig(**settings)
    started = time.perf_counter()
    for seed in (100, 101, 102):
        if found["rates"] and time.perf_counter() - started > _ENOUGH_S:
            break
        prompts = scale.prompts(args.requests, seed)
        # the manager with its graphs stays from one round to the next; the first one makes it
        began = time.perf_counter()
        results = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=config,
            progress_bar=False,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - began
        made = sum(len(result.generated_tokens) for result in results.values())
        if made != args.requests * args.new_tokens:
            errors = {str(result.error)[:500] for result in results.values() if result.error}
            found["notes"]["problem"] = f"{made} of {args.requests * args.new_tokens} tokens came; {errors or ''}"
            out.write_text(json.dumps(found))
            raise SystemExit(found["notes"]["problem"])
        found["rates"].append(made / seconds)
        found["notes"] |= {
            "attention": str(model.config._attn_implementation),
            "experts": str(model.config._experts_implementation),
            "settings": {name: str(value) for name, value in vars(_chosen(model, config)).items() if value is not None},
        }
        out.write_text(json.dumps(found))
        print(f"  library: {made / seconds:.1f} tokens/s", flush=True)
    # threads and graphs end with the process
    os._exit(0)


def _chosen(model: Any, settings: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
    """The settings with what the library made of them, where it keeps them."""
    manager = getattr(model, "_cached_continuous_batching_manager", None)
    return getattr(manager, "continuous_batching_config", settings)


if __name__ == "__main__":
    main()
