"""Signatures of versions: Ed25519 (RFC 8032) over the manifest, whose root binds every weight.

Hashes show that bytes match their manifest. A signature shows that the manifest comes from a trusted publisher, even if others can write to
the bucket or intercept traffic. It does not protect against replay: a ref that an attacker moved back to an older signed version looks like
a rollback.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ostinato.core.errors import BadConfig, Corrupt, StorageFull
from ostinato.core.files import sync_directory
from ostinato.weights.version.content import is_hash
from ostinato.weights.version.manifest import Manifest, Signature, to_bytes

_DOMAIN: Final = b"ostinato manifest\n"
_CHECKPOINT: Final = b"ostinato checkpoint\n"
_CERTIFICATE: Final = b"ostinato erasure certificate\n"


class Signer:
    """Signs manifests, checkpoints and certificates with a private key from a file.

    Example: ``Signer.load(Path("publisher.key")).sign(manifest)``
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read the key, 64 hex digits, from a file. Raises BadConfig."""
        try:
            with path.open("rb") as file:
                text = file.read(100).decode("ascii", "replace").strip()
        except OSError as error:
            raise BadConfig(f"publish.key {path}: {error.strerror}; `ostinato weights key {path}` makes one") from error
        if not is_hash(text):
            raise BadConfig(f"publish.key {path}: does not hold 64 hex digits; `ostinato weights key` makes a key")
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))

    @classmethod
    def create(cls, path: Path) -> Signer:
        """Generate a key, and write it to a new file that only its owner may read. The file is durable on return, because what the key has
        signed is refused under any other key. Raises BadConfig if the file exists, StorageFull.
        """
        key = Ed25519PrivateKey.generate()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise BadConfig(f"{path}: {error.strerror}; give a new file") from error
        try:
            with os.fdopen(fd, "w") as file:
                file.write(key.private_bytes_raw().hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(path.parent)
        except OSError as error:
            path.unlink(missing_ok=True)  # or the next attempt would find that the file exists
            raise StorageFull(f"{path} was not written: {error.strerror}; free space, then try again") from error
        return cls(key)

    @property
    def public(self) -> str:
        """The public key, 64 hex digits, for `follow.trusted` of followers."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with its signature."""
        return manifest.model_copy(update={"signature": self._signature(_signed(manifest))})

    def sign_checkpoint(self, manifest: bytes, batch: str) -> Signature:
        """Sign a checkpoint's manifest, which holds the hashes of its files, together with the digest of the last batch in its weights."""
        return self._signature(_checkpoint(manifest, batch))

    def sign_certificate(self, body: bytes) -> Signature:
        """Sign the canonical form of an erasure certificate (`certificate`)."""
        return self._signature(_CERTIFICATE + body)

    def _signature(self, message: bytes) -> Signature:
        return Signature(key=self.public, value=self._key.sign(message).hex())


def check_checkpoint(manifest: bytes, batch: str, signature: Signature | None, trusted: Sequence[str]) -> None:
    """Raise Corrupt for a checkpoint that none of the `trusted` public keys signed for this batch. Without keys accept any."""
    _check(_checkpoint(manifest, batch), signature, trusted, "the checkpoint")


def check_certificate(body: bytes, signature: Signature | None, trusted: Sequence[str]) -> None:
    """Raise Corrupt for a certificate that none of the `trusted` public keys signed. Without keys accept any."""
    _check(_CERTIFICATE + body, signature, trusted, "the certificate")


def check_signature(manifest: Manifest, hash: str, trusted: Sequence[str]) -> None:
    """Raise Corrupt for a manifest that none of the `trusted` public keys signed. Without keys accept any."""
    _check(_signed(manifest), manifest.signature, trusted, f"manifest {hash}: version {manifest.policy}")


def _check(message: bytes, signature: Signature | None, trusted: Sequence[str], what: str) -> None:
    if not trusted:
        return
    if signature is None or signature.key not in trusted:
        by, remedy = "nobody", "follow.trusted is for a run whose publish.key was set before its first start"
        if signature is not None:
            by, remedy = (
                f"{signature.key[:16]}, who is not in follow.trusted",
                "If that key was this run's, list it there, too",
            )
        raise Corrupt(f"{what} is signed by {by}; refused. {remedy}")
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(bytes.fromhex(signature.value), message)
    except (InvalidSignature, ValueError) as error:
        raise Corrupt(f"{what}: the signature of {signature.key[:16]} is not valid for it; refused") from error


def _checkpoint(manifest: bytes, batch: str) -> bytes:
    return _CHECKPOINT + batch.encode() + b"\n" + manifest


def _signed(manifest: Manifest) -> bytes:
    return _DOMAIN + to_bytes(manifest.model_copy(update={"signature": None}))
