"""Authority: a certificate authority that signs the certificates of one cluster.

| certificate | valid for            | extensions                                                                      |
|-------------|----------------------|---------------------------------------------------------------------------------|
| authority   | AUTHORITY_DAYS       | signs certificates of services and clients, but no other authority              |
| server      | what the caller says | names and addresses (subjectAltName); may also be presented to other servers    |
| client      | what the caller says | its role is the common name                                                     |

Keys are EC on P-256. No certificate outlives its authority. Each begins an hour before it is made, because the clocks
of machines differ. Source: RFC 5280 section 4.2.
"""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bindery_core.errors import BadRequest

AUTHORITY_DAYS: Final = 3650
"""Days that the certificate of an authority is valid. Its replacement is a change of all clients, so it is long."""
CLOCK_MARGIN: Final = datetime.timedelta(hours=1)
COMMON_NAME_SIZE_MAX: Final = 64
"""Maximum characters of a common name. Source: RFC 5280 appendix A.1."""
DNS_NAME_SIZE_MAX: Final = 253
"""Maximum characters of a DNS name. Source: RFC 1035 section 2.3.4."""
_DNS_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What a certificate says. Times in seconds since 1970. `hosts`: DNS names and addresses."""

    common_name: str
    issuer: str
    hosts: tuple[str, ...]
    begins_at_s: float
    expires_at_s: float
    is_authority: bool

    def is_near_its_end(self, now_s: float) -> bool:
        """Return whether less than a third of its validity is left."""
        return self.expires_at_s - now_s < (self.expires_at_s - self.begins_at_s) / 3


class Authority:
    """The certificate and the key of an authority."""

    def __init__(self, certificate: Any, key: Any) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, common_name: str, *, now_s: float) -> "Authority":
        """Return a new authority."""
        from cryptography import x509

        key, name = _new_key(), _name(common_name)
        builder = _builder(name, name, key.public_key(), now_s, now_s + AUTHORITY_DAYS * 86_400)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        return cls(_signed(builder, key), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> "Authority":
        """Return the authority in two PEM files.

        Raises BadRequest if they are not a certificate of an authority and its key.
        """
        loaded, loaded_key = _certificate(certificate), _private_key(key)
        if not facts(certificate).is_authority:
            raise BadRequest("the certificate is not that of an authority (CA:TRUE)")
        if loaded.public_key() != loaded_key.public_key():
            raise BadRequest("the key does not belong to the certificate of the authority")
        return cls(loaded, loaded_key)

    @property
    def certificate_pem(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        return bytes(self._certificate.public_bytes(Encoding.PEM))

    @property
    def key_pem(self) -> bytes:
        return _pem_of_key(self._key)

    def issue(
        self, key: bytes, *, common_name: str, hosts: Sequence[str] = (), now_s: float, lifetime_s: float
    ) -> bytes:
        """Return a certificate (PEM) for a private key (PEM): of a server with `hosts`, of a client without.

        Raises BadRequest for a name or an address that is none.
        """
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        public = _private_key(key).public_key()
        end_s = min(now_s + lifetime_s, self._certificate.not_valid_after_utc.timestamp())
        if end_s <= now_s:
            raise BadRequest("the certificate of the authority has expired")
        builder = _builder(_name(common_name), self._certificate.subject, public, now_s, end_s)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts:
            usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return _pem(_signed(builder.add_extension(issuer, critical=False), self._key))

    def has_issued(self, certificate: bytes, key: bytes) -> bool:
        """Return whether this authority signed `certificate`, and whether it is that of `key`."""
        from cryptography.exceptions import InvalidSignature

        loaded = _certificate(certificate)
        try:
            loaded.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return bool(loaded.public_key() == _private_key(key).public_key())


def new_private_key() -> bytes:
    """Return a new private key of a server or client, in PEM."""
    return _pem_of_key(_new_key())


def facts(certificate: bytes) -> CertificateFacts:
    """Return what the first certificate of a PEM file says. Raises BadRequest."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    loaded = _certificate(certificate)

    def common_name(name: Any) -> str:
        found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(found[0].value) if found else name.rfc4514_string()

    try:
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    except x509.ExtensionNotFound:
        hosts = ()
    try:
        is_authority = loaded.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    return CertificateFacts(
        common_name=common_name(loaded.subject),
        issuer=common_name(loaded.issuer),
        hosts=hosts,
        begins_at_s=loaded.not_valid_before_utc.timestamp(),
        expires_at_s=loaded.not_valid_after_utc.timestamp(),
        is_authority=is_authority,
    )


def normal_host(host: str) -> str:
    """Return a DNS name or an address in the form in which certificates have it. Raises BadRequest."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > DNS_NAME_SIZE_MAX or not _DNS_NAME.fullmatch(host):
            raise BadRequest(
                "a host of a certificate is a DNS name, such as broker-0.example.com or *.example.com, or an address",
                given=host,
            ) from None
        return host.lower()


def _host(host: str) -> Any:
    from cryptography import x509

    normal = normal_host(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(normal))
    except ValueError:
        return x509.DNSName(normal)


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    if not common_name.isprintable() or not 0 < len(common_name) <= COMMON_NAME_SIZE_MAX:
        raise BadRequest("the common name of a certificate must be printable text", size_max=COMMON_NAME_SIZE_MAX)
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: Any, issuer: Any, public_key: Any, now_s: float, end_s: float) -> Any:
    from cryptography import x509

    def time(at_s: float) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(int(at_s), datetime.UTC)

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(time(now_s) - CLOCK_MARGIN)
        .not_valid_after(time(end_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _pem_of_key(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _certificate(content: bytes) -> Any:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise BadRequest("not a certificate: give a PEM file that begins with -----BEGIN CERTIFICATE-----") from None


def _private_key(content: bytes) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(content, None)
    except Exception:  # the library raises errors of many types, some with parts of the key
        raise BadRequest("not a private key: give a PEM file of a key without a password") from None
