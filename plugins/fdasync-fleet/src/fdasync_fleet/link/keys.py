"""The keys of a fleet: a file that its machines share, made by `fdasync keys new`.

A fleet key has two CURVE pairs: the server pair of listeners, and the client pair of dialers. The first key of the file
is in use. A second key is valid beside it, so that keys can be replaced while processes with the old and the new file
talk to each other: a listener lets in the client keys of both, and a dialer tries the server keys of both. Knows no
sockets. Called by `zmq_wire.py`, instances, routers and the command line.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Annotated

import msgspec
import zmq
import zmq.utils.z85
from msgspec import Meta

from fdasync.errors import ConfigError
from fdasync.registry.mapping import struct_of

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 1
_MAX_NBYTES = 64 << 10
_Z85 = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE pair: 40 characters of Z85 each. Its repr does not show the secret."""

    public: _Z85
    secret: _Z85

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class FleetKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    server: the pair of processes that listen.
    client: the pair of processes that dial.
    """

    server: KeyPair
    client: KeyPair


class FleetKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds.

    Attributes:
        version: of the file's format.
        keys: the key in use, and the key that is valid beside it.
        allow: public keys of other clients that may connect.
    """

    version: int
    keys: Annotated[tuple[FleetKey, ...], Meta(min_length=1, max_length=2)]
    allow: Annotated[tuple[_Z85, ...], Meta(max_length=1024)] = ()

    @property
    def allowed(self) -> frozenset[bytes]:
        """Public keys, in 32 bytes each, of the clients that a listener lets in."""
        texts = [*(key.client.public for key in self.keys), *self.allow]
        return frozenset(zmq.utils.z85.decode(text) for text in texts)


def new_key() -> FleetKey:
    return FleetKey(_new_pair(), _new_pair())


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def new_keys() -> FleetKeys:
    return FleetKeys(_VERSION, (new_key(),))


def add_key(keys: FleetKeys) -> FleetKeys:
    """A second key, not in use yet. Raises ConfigError if there are two."""
    if len(keys.keys) > 1:
        raise ConfigError("keys", "the file has two keys already", hint="`fdasync keys drop FILE` drops the old one")
    return msgspec.structs.replace(keys, keys=(*keys.keys, new_key()))


def rotate_keys(keys: FleetKeys) -> FleetKeys:
    """The second key comes into use, the first one holds beside it. Raises ConfigError if there is one."""
    if len(keys.keys) < 2:
        raise ConfigError("keys", "the file has one key", hint="`fdasync keys add FILE` comes first, on all machines")
    return msgspec.structs.replace(keys, keys=keys.keys[::-1])


def drop_key(keys: FleetKeys) -> FleetKeys:
    """The key in use alone. Raises ConfigError if there is no other."""
    if len(keys.keys) < 2:
        raise ConfigError("keys", "the file has one key", hint="a fleet needs it")
    return msgspec.structs.replace(keys, keys=keys.keys[:1])


def load_keys(path: str | Path) -> FleetKeys:
    """Read a file of keys. Raises ConfigError naming the file, the field and the way out."""
    try:
        # blocking: a small file, once
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError("keys", f"{path} is no file")
            if found.st_mode & 0o077:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                raise ConfigError("keys", f"others may use {path}: its mode is {mode}", hint=f"chmod 600 {path}")
            if found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    "keys", f"{path} belongs to user {found.st_uid}", hint="copy it to a file of your own"
                )
            data = file.read(_MAX_NBYTES + 1)
    except OSError as error:
        hint = f"`fdasync keys new {path}` makes one"
        raise ConfigError("keys", f"{path} cannot be read: {error.strerror}", hint=hint) from None
    if len(data) > _MAX_NBYTES:
        raise ConfigError("keys", f"{path} is too long for a file of keys", limit=f"{_MAX_NBYTES} bytes")
    try:
        keys = struct_of(FleetKeys, msgspec.json.decode(data), error=ConfigError, root="keys")
    except ConfigError as wrong:
        raise ConfigError(wrong.field, f"{path} is no file of keys: {wrong.problem}", hint=_HINT) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError("keys", f"{path} is no file of keys: no JSON", hint=_HINT) from None
    if keys.version != _VERSION:
        raise ConfigError("keys.version", f"{path} has version {keys.version}", limit=_VERSION, hint=_HINT)
    for number, key in enumerate(keys.keys):
        for name, pair in (("server", key.server), ("client", key.client)):
            if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
                where = f"keys.keys[{number}].{name}"
                raise ConfigError(where, f"{path}: the public key is not that of the secret", hint=_HINT)
    return keys


_HINT = "copy it again from another machine of the fleet, or make a new one: `fdasync keys new FILE`"


def save_keys(path: str | Path, keys: FleetKeys, *, replace: bool) -> None:
    """Write a file of keys with mode 0600, at once or not at all; with `replace`, in the place of the file that is
    there. Raises ConfigError."""
    data = msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n"
    draft = f"{path}.{os.getpid()}.new"
    try:
        # blocking: a command's file, once
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(draft, path)
            else:
                # unlike a rename, it never replaces
                os.link(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
    except FileExistsError:
        hint = "`fdasync keys add` adds a key to it; remove it for a new fleet"
        raise ConfigError("keys", f"{path} is there already", hint=hint) from None
    except OSError as error:
        raise ConfigError("keys", f"{path} cannot be written: {error.strerror}") from None


def keys_of(keys: FleetKeys | str | Path | None) -> FleetKeys | None:
    """Keys, from the file if a path is given. Raises ConfigError."""
    return keys if keys is None or isinstance(keys, FleetKeys) else load_keys(keys)
