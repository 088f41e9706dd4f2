"""The certificate of the report server: made and renewed here, or by cert-manager and only read.

Self-managed: one Secret holds a CA, the server's certificate, and in `ca.crt` all CAs that agents are to trust. A new
CA is announced there before anything is signed with it, and the old one stays until it has expired: agents read the
file again in their own time, and none of them is ever shown a certificate that it cannot know.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFE: Final = timedelta(days=3650)
SERVER_LIFE: Final = timedelta(days=90)
RENEW_AT: Final = 2 / 3
"""Share of its life after which a certificate is renewed."""
_SKEW: Final = timedelta(minutes=5)
"""How much clocks may differ: certificates are valid from that long ago."""
ANNOUNCED: Final = timedelta(minutes=10)
"""How long a new CA is in agents' files before it signs: a kubelet brings a ConfigMap within two minutes."""

CA_CERT, CA_KEY, NEXT_CERT, NEXT_KEY = "ca-signing.crt", "ca-signing.key", "ca-next.crt", "ca-next.key"
BUNDLE, CERT, KEY = "ca.crt", "tls.crt", "tls.key"


_UNUSABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm)
"""What the library says of what is no certificate or key, of a key behind a password, and of a kind unknown to it."""


class CertificateError(Exception):
    """A Secret whose content cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True)
class Serving:
    """What the report server shows, and what agents are to trust."""

    certificate: bytes
    """PEM, with the chain."""
    key: bytes
    bundle: bytes
    expires: datetime


def read(data: dict[str, str] | None) -> Serving:
    """Read the Secret's data (base64, as the API has it).

    Raises:
        CertificateError: something is missing or not what it should be.
    """
    try:
        found = {name: base64.b64decode(text) for name, text in (data or {}).items()}
        missing = [name for name in (CERT, KEY, BUNDLE) if not found.get(name)]
        if missing:
            raise CertificateError(f"it lacks {', '.join(missing)}")
        certificate = x509.load_pem_x509_certificate(found[CERT])
        key = serialization.load_pem_private_key(found[KEY], None)
        if key.public_key() != certificate.public_key():
            raise CertificateError(f"{KEY} is not the key of {CERT}")
    except _UNUSABLE as error:
        raise CertificateError(f"it cannot be read: {error}") from None
    return Serving(found[CERT], found[KEY], found[BUNDLE], certificate.not_valid_after_utc)


def renewed(data: dict[str, str] | None, names: Sequence[str], now: datetime | None = None) -> dict[str, str] | None:
    """Return the Secret's data as it should be (base64), or None if it is as it should be.

    Args:
        data: what is there; nothing, or something that cannot be used, is made anew.
        names: DNS names of the server, the common one first.
    """
    moment = now or datetime.now(UTC)
    try:
        present = _Content.read(data)
    except (*_UNUSABLE, KeyError):
        present = None
    wanted = _next_content(present, names, moment)
    return None if wanted is present else wanted.write()


@dataclass(frozen=True)
class _Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> _Pair:
        loaded = serialization.load_pem_private_key(key, None)
        pair = cls(x509.load_pem_x509_certificate(certificate), loaded)  # type: ignore[arg-type]
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != pair.certificate.public_key():
            raise ValueError("not the certificate's key")
        return pair

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def due(self, now: datetime) -> bool:
        """Whether it is time to renew it."""
        begin, end = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return now >= begin + (end - begin) * RENEW_AT

    def expired(self, now: datetime) -> bool:
        return now >= self.certificate.not_valid_after_utc


@dataclass(frozen=True)
class _Content:
    """What the Secret holds."""

    ca: _Pair
    following: _Pair | None
    """The CA that will sign next."""
    server: _Pair
    trusted: tuple[x509.Certificate, ...]

    @classmethod
    def read(cls, data: dict[str, str] | None) -> _Content:
        found = {name: base64.b64decode(text) for name, text in (data or {}).items()}
        following = _Pair.read(found[NEXT_CERT], found[NEXT_KEY]) if found.get(NEXT_CERT) else None
        return cls(
            _Pair.read(found[CA_CERT], found[CA_KEY]),
            following,
            _Pair.read(found[CERT], found[KEY]),
            tuple(x509.load_pem_x509_certificates(found[BUNDLE])),
        )

    def write(self) -> dict[str, str]:
        content = {
            CA_CERT: self.ca.certificate_pem(),
            CA_KEY: self.ca.key_pem(),
            CERT: self.server.certificate_pem(),
            KEY: self.server.key_pem(),
            BUNDLE: b"".join(it.public_bytes(serialization.Encoding.PEM) for it in self.trusted),
        }
        if self.following is not None:
            content |= {NEXT_CERT: self.following.certificate_pem(), NEXT_KEY: self.following.key_pem()}
        return {name: base64.b64encode(value).decode() for name, value in content.items()}


def _next_content(present: _Content | None, names: Sequence[str], now: datetime) -> _Content:
    """Return what the Secret should hold; `present` itself if nothing is to be changed."""
    if present is None or present.ca.expired(now):
        # Nothing to overlap with: agents take the new CA as soon as they see it.
        ca = _make_ca(now)
        return _Content(ca, None, _make_server(ca, names, now), (ca.certificate,))
    ca, following, server = present.ca, present.following, present.server
    if following is not None and now >= following.certificate.not_valid_before_utc + _SKEW + ANNOUNCED:
        ca, following = following, None
        server = _make_server(ca, names, now)
    elif following is None and ca.due(now):
        following = _make_ca(now)
    if server is present.server and (server.due(now) or not _fits(server, ca, names)):
        server = _make_server(ca, names, now)
    trusted = tuple(
        {
            it.fingerprint(hashes.SHA256()): it
            for it in (ca.certificate, *((following.certificate,) if following else ()), *present.trusted)
            if it.not_valid_after_utc > now
        }.values()
    )
    same = (ca, following, server) == (present.ca, present.following, present.server)
    return present if same and set(trusted) == set(present.trusted) else _Content(ca, following, server, trusted)


def _fits(server: _Pair, ca: _Pair, names: Sequence[str]) -> bool:
    try:
        server.certificate.verify_directly_issued_by(ca.certificate)
        found = server.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False
    except Exception:  # cryptography's InvalidSignature derives from nothing narrower
        return False
    return set(found.get_values_for_type(x509.DNSName)) == set(names)


def _make_ca(now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each has a name of its own: agents that trust two must find the right one.
    name = _name(f"orbitkv CA {now:%Y-%m-%d %H:%M:%S}")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key, now, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Pair(certificate, key)


def _make_server(ca: _Pair, names: Sequence[str], now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(names[0][:64]), ca.certificate.subject, key, now, SERVER_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()),
            critical=False,
        )
        .sign(ca.key, hashes.SHA256())
    )
    return _Pair(certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
