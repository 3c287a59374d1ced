"""A certificate authority of one's own, for a broker on this machine: made in Python, no openssl or keytool needed.

Keys are ECDSA P-256: small, and every TLS library in use takes them. Files are PEM, as Kafka and librdkafka read them directly.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gorila.errors import LocalError

CA_DAYS = 3650
CERTIFICATE_DAYS = 365
CLOCK_SKEW = timedelta(minutes=5)
_MISSING = (
    "cryptography is not installed: a secured broker needs the `local` extra (pip install 'gorila-stream[local]')"
)

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise LocalError(_MISSING) from None


@dataclass(frozen=True)
class Authority:
    """Who signs: certificate and private key, both PEM."""

    certificate: str
    key: str

    @classmethod
    def create(cls, name: str = "gorila local CA") -> Authority:
        """A new one, valid for CA_DAYS."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = _builder(_name(name), _name(name), key.public_key(), now - CLOCK_SKEW, now + timedelta(days=CA_DAYS))
        uses = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))

    def issue(
        self, name: str, hosts: Sequence[str], *, days: float = CERTIFICATE_DAYS, since: datetime | None = None
    ) -> str:
        """A key and its certificate, one after the other, as Kafka's PEM key stores are.

        Args:
            name: common name; with client authentication the principal is `User:CN=<name>`.
            hosts: host names and addresses it is good for.
            days: how long from `since` (default: now).
        """
        key = ec.generate_private_key(ec.SECP256R1())
        since = since or datetime.now(UTC)
        issuer = x509.load_pem_x509_certificate(self.certificate.encode())
        signer = load_pem_private_key(self.key.encode(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(
            _name(name), issuer.subject, key.public_key(), since - CLOCK_SKEW, since + timedelta(days=days)
        )
        builder = (
            builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
        )
        return _key_pem(key) + _pem(builder.sign(signer, hashes.SHA256()))


def days_left(pem: str) -> float:
    """Until the first certificate in a PEM text ends; negative once it has."""
    certificate = x509.load_pem_x509_certificates(pem[pem.index("-----BEGIN CERTIFICATE") :].encode())[0]
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
