"""The Java client.properties an operator already has works here, or says in one line why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorila.errors import UsageError
from gorila.kafka.client_properties import parse_properties, read_client_properties, translate


def test_the_properties_format_is_javas():
    text = "# comment\n! another\na=1\nb : two words \n c   3\nd=x\\=y\nlong=one,\\\n    two\nempty=\n"
    assert parse_properties(text) == {"a": "1", "b": "two words", "c": "3", "d": "x=y", "long": "one,two", "empty": ""}


def test_scram_over_tls_is_translated():
    java = """
    security.protocol=SASL_SSL
    sasl.mechanism=SCRAM-SHA-512
    sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required username="ann" password="p=w\\\\"d";
    ssl.truststore.type=PEM
    ssl.truststore.location=/etc/ca.pem
    ssl.endpoint.identification.algorithm=
    request.timeout.ms=9000
    """
    assert translate(parse_properties(java), "f") == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "ann",
        "sasl.password": 'p=w\\"d',
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "socket.timeout.ms": "9000",
    }


def test_mutual_tls_with_pem_or_pkcs12_is_translated():
    pem = translate({"ssl.keystore.type": "PEM", "ssl.keystore.location": "/k.pem", "ssl.key.password": "s"}, "f")
    assert pem == {"ssl.certificate.location": "/k.pem", "ssl.key.location": "/k.pem", "ssl.key.password": "s"}
    p12 = translate(
        {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": "/k.p12", "ssl.keystore.password": "s"}, "f"
    )
    assert p12 == {"ssl.keystore.location": "/k.p12", "ssl.keystore.password": "s"}


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"ssl.truststore.location": "/t.jks"}, "PEM"),
        ({"ssl.keystore.location": "/k.jks"}, "PKCS12"),
        ({"sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required;"}, "PlainLoginModule"),
        ({"interceptor.classes": "a.B"}, "interceptor.classes"),
        ({"enable.auto.commit": "true"}, "enable.auto.commit"),
    ],
)
def test_what_cannot_be_translated_is_one_line_naming_file_and_key(properties: dict[str, str], words: str):
    with pytest.raises(UsageError, match=words) as caught:
        translate(properties, "client.properties")
    message = str(caught.value)
    assert message.startswith(f"client.properties: {next(iter(properties))}")
    assert "\n" not in message


def test_an_unreadable_file_is_one_line(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        read_client_properties(str(tmp_path / "none"))


def test_java_s_unicode_escapes_are_read():
    assert parse_properties(r"ssl.ca.location=/donn\u00e9es/ca.pem") == {"ssl.ca.location": "/données/ca.pem"}
