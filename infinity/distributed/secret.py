"""Secret: what all ranks of a run know and nobody else, and what is derived from it.

It signs the addresses in the ranks' store, and makes the keys of CURVE, ZeroMQ's encryption
(https://rfc.zeromq.org/spec/26): all ranks have the same pair of keys. Whoever does not know its public key
cannot complete a handshake, for that key never travels.
"""

from __future__ import annotations

import hashlib
import os
import stat

import zmq
from zmq.utils import z85

from infinity.errors import ConfigError

VARIABLE, FILE_VARIABLE = "INFINITY_SECRET", "INFINITY_SECRET_FILE"
_LEAST_BYTES = 16


class Secret:
    """The run's secret. Signs texts, and turns encryption on for sockets."""

    def __init__(self, secret: bytes) -> None:
        self._signing = hashlib.blake2b(secret, person=b"infinity sign").digest()
        self._private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"infinity curve").digest())

    @classmethod
    def of_environment(cls) -> Secret | None:
        """Return the secret of INFINITY_SECRET or of the file INFINITY_SECRET_FILE; None if neither is set.

        Raises ConfigError for a secret that is too short, and for a file that cannot be read or that other
        users may read.
        """
        text, path = os.environ.get(VARIABLE, ""), os.environ.get(FILE_VARIABLE, "")
        if not text and not path:
            return None
        secret = text.encode() if text else _content(path)
        if len(secret) < _LEAST_BYTES:
            raise ConfigError(
                f"The secret of {VARIABLE if text else path} has {len(secret)} bytes.",
                f"Give at least {_LEAST_BYTES}, such as those of `openssl rand -hex 32`.",
            )
        return cls(secret)

    def sign(self, text: str) -> str:
        """Return a MAC of the text, in hexadecimal digits."""
        return hashlib.blake2b(text.encode(), key=self._signing, digest_size=32).hexdigest()

    def secure(self, socket: zmq.Socket[bytes], *, serves: bool) -> None:
        """Have a socket speak with sockets of the same secret alone. Call it before bind or connect.

        serves: whether the socket is bound.
        """
        public = zmq.curve_public(self._private)
        socket.curve_secretkey, socket.curve_publickey = self._private, public
        if serves:
            socket.curve_server = True
        else:
            socket.curve_serverkey = public


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"Other users may read {path}, which {FILE_VARIABLE} names, or it belongs to one.",
                    f"Make it your own and private: chmod 600 {path}.",
                )
            return file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"The secret's file {path} cannot be read: {error.strerror}.",
            f"Give {FILE_VARIABLE} the path of a file that this rank can read.",
        ) from error
