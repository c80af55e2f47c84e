"""Certificates for tests: an authority, and certificates that it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Signed:
    certificate: str
    key: str


class Authority:
    """Signs certificates for 127.0.0.1, with any common name."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name)
        made = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.file = str(directory / f"{name}.pem")
        Path(self.file).write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, days: int = 1) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = _builder(_subject(name), self._name, key, days).add_extension(place, critical=False)
        plain = "".join(char for char in name if char.isalnum())[:20]
        stem = self._directory / f"{Path(self.file).stem}-{plain}-{key.private_numbers().private_value % 10**9}"
        stem.with_suffix(".pem").write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        stem.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Signed(str(stem.with_suffix(".pem")), str(stem.with_suffix(".key")))


def _subject(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject, issuer, key, days=1):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
