"""What makes the embedded broker a secured one: TLS, SCRAM users, ACLs. All of it lies in the broker's folder, nothing leaves the machine.

<folder>/secure/ca.pem ca.key   the authority that signed the broker's certificate; made once
<folder>/secure/broker.pem      the broker's key and certificate; renewed at a start when it is about to end
<folder>/secure/users.json      every user's password, random; made once
<folder>/clients/<user>.properties   what a client needs, Java style, certificate of the authority included: one file, free to be moved

The folder has mode 0700, files with secrets 0600. No password is ever on a command line, where every user of the machine could read it.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from gorila.acls import ROLES
from gorila.errors import LocalError

ADMIN = "admin"
BROKER_USER = "broker"
CERTIFICATE_NAME = "gorila-broker"
HOSTS = ("localhost", "127.0.0.1", "::1")
RENEW_BELOW_DAYS = 30
ITERATIONS = 4096  # Kafka's least; more would not make a random 256-bit password harder to guess
_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, from its first byte on. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)


def _jaas(user: str, password: str) -> str:
    return f'{_MODULE} required username="{user}" password="{password}";'


class Secured:
    """The secured side of a broker's folder. `Secured.of(folder)` is None where the broker is a plain one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = folder / "secure"
        self.ca_file = self._files / "ca.pem"
        self.clients = folder / "clients"

    @classmethod
    def of(cls, folder: Path) -> Secured | None:
        """That of a folder which was made secure once: it stays so."""
        found = cls(folder)
        return found if found._users_file.exists() else None

    @classmethod
    def create(cls, folder: Path) -> Secured:
        """Authority and users for a folder without data. Raises OSError, LocalError (the `local` extra is missing)."""
        from gorila.local.certificates import Authority

        made = cls(folder)
        folder.chmod(0o700)  # Kafka's own log holds the users' SCRAM keys
        made._files.mkdir(exist_ok=True, mode=0o700)
        authority = Authority.create()
        write_private(made._files / "ca.key", authority.key)
        made.ca_file.write_text(authority.certificate)
        users = {name: secrets.token_urlsafe(32) for name in (BROKER_USER, ADMIN, *ROLES)}
        write_private(made._users_file, json.dumps(users, indent=1))
        return made

    @property
    def _users_file(self) -> Path:
        return self._files / "users.json"

    def users(self) -> dict[str, str]:
        """{user: password}. Raises LocalError when the file is damaged."""
        try:
            found: dict[str, str] = json.loads(self._users_file.read_text())
            return found
        except ValueError:
            raise LocalError(f"{self._users_file} is damaged: choose another --dir") from None

    def client_properties(self, user: str = ADMIN) -> Path:
        """A user's file."""
        return self.clients / f"{user}.properties"

    def renew(self, port: int) -> None:
        """Everything a start needs that may have changed: the broker's certificate, and the clients' files with its port. Raises OSError, LocalError."""
        from gorila.local.certificates import Authority, days_left

        certificate = self._files / "broker.pem"
        authority = Authority(self.ca_file.read_text(), (self._files / "ca.key").read_text())
        if not certificate.exists() or days_left(certificate.read_text()) < RENEW_BELOW_DAYS:
            write_private(certificate, authority.issue(CERTIFICATE_NAME, HOSTS))
        self.clients.mkdir(mode=0o700, exist_ok=True)
        trusted = authority.certificate.strip().replace("\n", "\\n")
        for user, password in self.users().items():
            if user != BROKER_USER:
                settings = {
                    "bootstrap.servers": f"127.0.0.1:{port}",
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanism": "SCRAM-SHA-512",
                    "sasl.jaas.config": _jaas(user, password),
                    "ssl.truststore.type": "PEM",
                    "ssl.truststore.certificates": trusted,
                }
                write_private(
                    self.client_properties(user), "".join(f"{key}={value}\n" for key, value in settings.items())
                )

    def format_arguments(self) -> Path:
        """A file of arguments for Kafka's StorageTool (`@file`) that creates every user; the caller removes it. Raises OSError."""
        path = self._files / "format.arguments"
        lines = [
            f"--add-scram\nSCRAM-SHA-512=[name={user},iterations={ITERATIONS},password={password}]\n"
            for user, password in self.users().items()
        ]
        write_private(path, "".join(lines))
        return path

    def server_properties(self, port: int, controller_port: int) -> dict[str, object]:
        """What replaces and joins the plain broker's settings. Paths are relative to the folder the JVM runs in."""
        return {
            "listeners": f"CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"CLIENTS://127.0.0.1:{port}",
            "inter.broker.listener.name": "CLIENTS",
            "listener.security.protocol.map": "CLIENTS:SASL_SSL,CONTROLLER:SSL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.clients.scram-sha-512.sasl.jaas.config": _jaas(BROKER_USER, self.users()[BROKER_USER]),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": "secure/broker.pem",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "secure/ca.pem",
            # SCRAM cannot guard the controller, which keeps SCRAM's own records: whoever connects must show the broker's certificate.
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:{BROKER_USER};User:CN={CERTIFICATE_NAME}",
            "allow.everyone.if.no.acl.found": "false",
        }
