"""The certificates of a cluster: one authority, and a key and certificate for each of its parts, in one folder."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=30)
MARGIN = datetime.timedelta(minutes=5)
"""Validity begins this much before now, for clocks that are behind."""


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(data)


class Authority:
    """Signs certificates; its own is `ca.crt` in the folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "orbitkv-test-cluster")])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key = self._write_key("ca", self._key)

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """The authority that was made in a folder before."""
        authority = cls.__new__(cls)
        authority.folder = folder
        authority.certificate = folder / "ca.crt"
        authority.key = folder / "ca.key"
        key = serialization.load_pem_private_key(authority.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        authority._key = key
        authority._name = x509.load_pem_x509_certificate(authority.certificate.read_bytes()).subject
        return authority

    def sign(self, name: str, common_name: str, organization: str = "", addresses: tuple[str, ...] = ()) -> Pair:
        """Makes `name`.crt and `name`.key for a client and server, in place of earlier ones.

        `addresses` are IP addresses and DNS names.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            self._builder(x509.Name(attributes), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if addresses:
            names = x509.SubjectAlternativeName([alternative_name(address) for address in addresses])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return Pair(path, self._write_key(name, key))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - MARGIN)
            .not_valid_after(now + VALID)
        )

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> Path:
        path = self.folder / f"{name}.key"
        encoding = serialization.Encoding.PEM
        # the form that Kubernetes reads keys of ServiceAccount tokens in, too
        data = key.private_bytes(encoding, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
        write_private(path, data)
        return path


def usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """What a key may be used for: that of the authority, or any other."""
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def alternative_name(address: str) -> x509.GeneralName:
    """An IP address, or a DNS name, as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
