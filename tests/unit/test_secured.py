"""Certificates and files of a secured broker, without the broker."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from gorila.acls import ROLES
from gorila.kafka.client_properties import read_client_properties
from gorila.kafka.trust import why_not_trusted
from gorila.local.certificates import Authority, days_left
from gorila.local.secured import Secured


def shake_hands(authority: Authority, pem: str, folder: Path, host: str) -> None:
    """A whole TLS handshake in memory. Raises ssl.SSLError."""
    (folder / "server.pem").write_text(pem)
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(folder / "server.pem")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.create_default_context(cadata=authority.certificate)
    client = asking.wrap_bio(to_client, to_server, server_hostname=host)
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_what_an_authority_issues_is_trusted_for_its_hosts(tmp_path: Path, host: str) -> None:
    authority = Authority.create()
    pem = authority.issue("broker", ["localhost", "127.0.0.1", "::1"])
    shake_hands(authority, pem, tmp_path, host)
    assert 364 < days_left(pem) <= 365


def test_another_host_and_another_authority_are_not(tmp_path: Path) -> None:
    authority = Authority.create()
    pem = authority.issue("broker", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(authority, pem, tmp_path, "kafka.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(Authority.create(), pem, tmp_path, "localhost")


def test_a_client_s_file_is_whole_and_understood(tmp_path: Path) -> None:
    secured = Secured.create(tmp_path)
    secured.renew(9092)
    passwords = set()
    for user in ROLES:
        found = read_client_properties(str(secured.client_properties(user)))
        assert found.pop("ssl.ca.pem") == secured.ca_file.read_text().strip()
        passwords.add(found.pop("sasl.password"))
        assert found == {
            "bootstrap.servers": "127.0.0.1:9092",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
        }
    assert len(passwords) == len(ROLES)
    assert min(map(len, passwords)) >= 43  # 256 bits
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in secured.clients.iterdir())


def test_a_certificate_about_to_end_is_renewed_at_a_start_and_users_stay(tmp_path: Path) -> None:
    secured = Secured.create(tmp_path)
    secured.renew(9092)
    pem, users = tmp_path / "secure" / "broker.pem", secured.users()
    authority = Authority(secured.ca_file.read_text(), (tmp_path / "secure" / "ca.key").read_text())
    first = pem.read_text()
    secured.renew(9093)
    assert pem.read_text() == first
    pem.write_text(authority.issue("gorila-broker", ["localhost"], days=7))
    secured.renew(9093)
    assert days_left(pem.read_text()) > 300
    again = Secured.of(tmp_path)
    assert again is not None
    assert again.users() == users
    assert "127.0.0.1:9093" in secured.client_properties().read_text()


def test_a_plain_folder_is_not_a_secured_one(tmp_path: Path) -> None:
    assert Secured.of(tmp_path) is None


def test_only_certificates_are_looked_into() -> None:
    assert why_not_trusted("sasl_ssl://h:1/bootstrap: SSL handshake failed: Disconnected", "h:1", {}) == ""
    assert "no TLS" in why_not_trusted("Disconnected: connecting to a PLAINTEXT broker listener?", "h:1", {})
