"""Expert rows between a result and a trainer: one function each way for each trainer's documented format.

The functions are plain numpy on the caller's thread and take tens of milliseconds to seconds for long samples
(docs/routing.md): call them in a thread of their own, not on an event loop. The package knows no
engine and no network. Users call it; docs/routing.md says which function is for which trainer.
"""

from fdasync.result import Routing
from fdasync_trainer.rows.checks import RoutingLayout, check_routing
from fdasync_trainer.rows.conversation import RoutingLog, append
from fdasync_trainer.rows.encoding import MAX_NBYTES
from fdasync_trainer.rows.layers import expand_layers, moe_layers_only
from fdasync_trainer.rows.nemo_rl import from_nemo_rl, to_nemo_rl
from fdasync_trainer.rows.prime_rl import from_prime_rl, to_prime_rl
from fdasync_trainer.rows.sglang import from_sglang, to_sglang
from fdasync_trainer.rows.skyrl import from_skyrl, to_skyrl
from fdasync_trainer.rows.verl import from_verl, to_verl
from fdasync_trainer.rows.vllm import from_vllm, to_vllm

__all__ = [
    "MAX_NBYTES",
    "Routing",
    "RoutingLayout",
    "RoutingLog",
    "append",
    "check_routing",
    "expand_layers",
    "from_nemo_rl",
    "from_prime_rl",
    "from_sglang",
    "from_skyrl",
    "from_verl",
    "from_vllm",
    "moe_layers_only",
    "to_nemo_rl",
    "to_prime_rl",
    "to_sglang",
    "to_skyrl",
    "to_verl",
    "to_vllm",
]
