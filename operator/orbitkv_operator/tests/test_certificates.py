"""Certificates of the report server: made, renewed, rotated."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from orbitkv_operator.certificates import (
    ANNOUNCED,
    BUNDLE,
    CA_LIFE,
    CERT,
    KEY,
    SERVER_LIFE,
    CertificateError,
    read,
    renewed,
)

NAMES = ("orbitkv-reports.orbitkv-system.svc",)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
Data = dict[str, str]


def made(data: Data | None = None, now: datetime = NOW) -> Data:
    found = renewed(data, NAMES, now)
    assert found is not None
    return found


def trusted_by(bundle: bytes, certificate: bytes, now: datetime) -> bool:
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(NAMES[0]))
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate), [])
    except VerificationError:
        return False
    return True


def test_new_certificate_is_trusted_under_its_name() -> None:
    found = read(made())
    assert trusted_by(found.bundle, found.certificate, NOW)
    assert found.expires == NOW + SERVER_LIFE


def test_nothing_changes_until_it_is_due() -> None:
    data = made()
    assert renewed(data, NAMES, NOW) is None
    assert renewed(data, NAMES, NOW + SERVER_LIFE * 0.6) is None


def test_certificate_is_renewed_at_two_thirds_and_agents_need_nothing_new() -> None:
    before = made()
    after = made(before, NOW + SERVER_LIFE * 0.7)
    assert read(after).expires > read(before).expires
    assert after[BUNDLE] == before[BUNDLE]
    assert trusted_by(read(before).bundle, read(after).certificate, NOW + SERVER_LIFE * 0.7)


def test_expired_certificate_is_renewed() -> None:
    late = NOW + SERVER_LIFE * 3
    found = read(made(made(), late))
    assert trusted_by(found.bundle, found.certificate, late)


def test_new_ca_is_announced_before_it_signs() -> None:
    before = made()
    due = NOW + CA_LIFE * 0.7
    announced = made(before, due)
    assert len(x509.load_pem_x509_certificates(read(announced).bundle)) == 2
    assert trusted_by(read(before).bundle, read(announced).certificate, due)  # still signed by the old one
    assert renewed(announced, NAMES, due + ANNOUNCED / 2) is None
    later = due + ANNOUNCED + timedelta(minutes=1)
    switched = made(announced, later)
    assert trusted_by(read(announced).bundle, read(switched).certificate, later)
    assert not trusted_by(read(before).bundle, read(switched).certificate, later)


def test_old_ca_stays_trusted_until_it_expires() -> None:
    due = NOW + CA_LIFE * 0.7
    switched = made(made(made(), due), due + 2 * ANNOUNCED)
    assert len(x509.load_pem_x509_certificates(read(switched).bundle)) == 2
    cleared = made(switched, NOW + CA_LIFE + timedelta(days=1))
    assert len(x509.load_pem_x509_certificates(read(cleared).bundle)) == 1


def test_expired_ca_is_replaced_at_once() -> None:
    late = NOW + CA_LIFE * 2
    found = read(made(made(), late))
    assert trusted_by(found.bundle, found.certificate, late)


@pytest.mark.parametrize("damage", [CERT, KEY, BUNDLE])
def test_damaged_secret_is_made_anew(damage: str) -> None:
    data = made() | {damage: base64.b64encode(b"nonsense").decode()}
    with pytest.raises(CertificateError):
        read(data if damage != BUNDLE else data | {BUNDLE: ""})
    found = read(made(data))
    assert trusted_by(found.bundle, found.certificate, NOW)


def test_key_behind_a_password_is_made_anew_too() -> None:
    locked = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    data = made() | {KEY: base64.b64encode(locked).decode()}
    with pytest.raises(CertificateError, match="cannot be read"):
        read(data)
    assert read(made(data)).key != locked


def test_another_name_makes_another_certificate() -> None:
    assert renewed(made(), ("orbitkv-reports.elsewhere.svc",), NOW) is not None


def test_secret_of_cert_manager_that_is_not_ready_says_what_it_lacks() -> None:
    with pytest.raises(CertificateError, match=r"lacks tls.crt, tls.key, ca.crt"):
        read({})


def test_key_of_another_certificate_is_refused() -> None:
    with pytest.raises(CertificateError, match="not the key"):
        read(made() | {KEY: made()[KEY]})
