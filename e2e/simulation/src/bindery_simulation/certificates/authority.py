"""Authority: a certificate authority for tests that need more than the certificates of this folder, such as rotations.

Files are replaced by rename, as tools that renew certificates do.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Signs certificates. `directory`: where its own certificate and those that it signs are written."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(self._name, self._name, self._key, _END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.ca_file = directory / f"{name}.pem"
        replace(self.ca_file, self.pem)

    def issue(
        self,
        name: str,
        *,
        common_name: str = "",
        hosts: Sequence[str] = ("localhost", "127.0.0.1"),
        uris: Sequence[str] = (),
        expires: datetime.datetime = _END,
        passphrase: bytes | None = None,
    ) -> tuple[Path, Path]:
        """Write, or replace, the files of a certificate and its key. `common_name`: default `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name or name)])
        names = [*(_host(host) for host in hosts), *(x509.UniformResourceIdentifier(uri) for uri in uris)]
        builder = _builder(subject, self._name, key, expires)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        encryption = (
            serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
        )
        certificate_file, key_file = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        pem = serialization.Encoding.PEM
        replace(key_file, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        replace(certificate_file, certificate.public_bytes(pem))
        return certificate_file, key_file


def in_one_file(certificate_file: Path, key_file: Path) -> Path:
    """Return a new file with the key and its certificate, as ZooKeeper's servers need it."""
    path = certificate_file.with_suffix(".pem")
    replace(path, key_file.read_bytes() + certificate_file.read_bytes())
    return path


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    os.replace(new, path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, expires: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_START)
        .not_valid_after(expires)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
