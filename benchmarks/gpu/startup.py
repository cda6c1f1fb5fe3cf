"""One start of the runner of `gpu_serving`, timed by its parts, in a process of its own.

    python -m benchmarks.gpu.startup FOLDER OUT --model NAME [--tiny]

As in the engine of part a (weights drawn, graphs of 64 sequences and of the usual steps with prompts, capture on, no
self-check), but for the engine itself. Where compiled kernels come from is the caller's TRITON_CACHE_DIR. Writes
`{"import": s, "open": s, "bind": s}` to OUT.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

_BEGAN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()

    # what takes seconds is counted
    import uvloop
    from fdasync_transformers import TransformersConfig, TransformersRunner

    from benchmarks.gpu.scale import large, tiny
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.runner.base import RunnerLimits

    scale = tiny(args.model) if args.tiny else large(args.model)
    running = scale.library[0]
    blocks = 2 * running * scale.blocks_each
    seconds = {"import": time.perf_counter() - _BEGAN}

    async def start() -> None:
        config = TransformersConfig(**{**scale.runner_config((running,)), "graph_sizes": (running,)})
        limits = RunnerLimits(
            model=args.folder,
            capture=True,
            max_running=running,
            max_step_tokens=scale.max_step_tokens,
            block_tokens=scale.block_tokens,
            num_blocks=blocks,
            pipeline_depth=2,
        )
        runner = TransformersRunner(config, limits)
        began = time.perf_counter()
        try:
            capacity = await runner.open()
            opened = time.perf_counter()
            arena = AuxArena.create(blocks, scale.block_tokens, capacity.aux_specs)
            try:
                await runner.bind(blocks, arena)
                seconds["open"] = opened - began
                seconds["bind"] = time.perf_counter() - opened
            finally:
                arena.close()
        finally:
            await runner.aclose()

    uvloop.run(start())
    Path(args.out).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
