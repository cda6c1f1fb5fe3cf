"""The identity of a block: a chained hash over namespace, parent and token ids. Pure.

Engines, instances and routers name blocks alike by these functions; this module knows no blocks and no index.
`prefix.py` indexes blocks by identity.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_NBYTES = 16


class PromptHashes(NamedTuple):
    """Identities of a prompt's full blocks.

    Attributes:
        namespace: the root that the identities are chained from, before the salt.
        block_keys: one identity for each full block, in order.
    """

    namespace: bytes
    block_keys: tuple[bytes, ...]


def root_key(*parts: bytes) -> bytes:
    """Identity of an empty prefix under these parts: the namespace, and a tenant's salt."""
    digest = blake2b(digest_size=KEY_NBYTES)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of the block of these tokens behind `parent`."""
    tokens = pack(f"{len(token_ids)}i", *token_ids)
    return blake2b(parent + tokens, digest_size=KEY_NBYTES).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_tokens: int, start: int = 0) -> list[bytes]:
    """Identities of the full blocks of `token_ids` from token `start` (a multiple of block_tokens) on, chained from
    `root`, the identity of the tokens before `start`."""
    keys = []
    for first in range(start, len(token_ids) - block_tokens + 1, block_tokens):
        root = block_key(root, token_ids[first : first + block_tokens])
        keys.append(root)
    return keys


def packed_block_keys(root: bytes, tokens: bytes, block_tokens: int) -> list[bytes]:
    """As `block_keys`, of tokens as they lie in memory (int32), without making integers of them."""
    step = 4 * block_tokens
    keys = []
    for first in range(0, len(tokens) - step + 1, step):
        root = blake2b(root + tokens[first : first + step], digest_size=KEY_NBYTES).digest()
        keys.append(root)
    return keys


def are_block_keys(keys: Sequence[bytes], parent: bytes, tokens: bytes, block_tokens: int, first: int = 0) -> bool:
    """Whether `keys` are the identities of the blocks of `tokens` (int32 as they lie in memory) from block number
    `first` on, behind `parent`."""
    step = 4 * block_tokens
    for number, key in enumerate(keys, first):
        parent = blake2b(parent + tokens[number * step : (number + 1) * step], digest_size=KEY_NBYTES).digest()
        if parent != key:
            return False
    return True
