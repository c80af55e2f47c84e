"""A Postgres on another host: its certificate is checked, or an operator has said that it need not be."""

import shutil
import socket
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.postgres_server import MISSING, PostgresServer, binaries

from ostinato.core.errors import BadConfig
from ostinato.record.config import RecordConfig
from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import LogServer


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann@db.example/loop",
        "postgresql://ann@10.0.0.7/loop?sslmode=require",  # encrypted, for whoever answers
        "postgresql://ann@10.0.0.7/loop?sslmode=prefer",
        "postgresql://ann@localhost,db.example/loop",  # the second one, once the first is away
        "postgresql://ann@localhost/loop?hostaddr=10.0.0.7",
        "postgresql://ann@/loop?service=away",
        "postgresql://ann@192.0.2.7,localhost/loop?hostaddr=,127.0.0.1",
        "postgresql://ann@[::ffff:10.0.0.7]/loop",
        "postgresql://ann@0.0.0.0/loop",
        "postgresql://ann@127.evil.example/loop",
        "postgresql://ann@localhost.example/loop",
    ],
)
def test_a_host_that_could_be_impersonated_is_refused(url):
    with pytest.raises(BadConfig, match=r"sslmode=verify-full.*record\.allow_unverified"):
        LogServer.of(RecordConfig(url=url), {})
    assert LogServer.of(RecordConfig(url=url, allow_unverified=True), {})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann@db.example/loop?sslmode=verify-full",
        "postgresql://ann@db.example/loop?sslmode=verify-ca&sslrootcert=/etc/ca.pem",
        "postgresql://ann@localhost/loop",
        "postgresql://ann@127.0.0.1:5433/loop",
        "postgresql://ann@[::1]/loop",
        "postgresql://ann@[::ffff:127.0.0.1]/loop",
        "postgresql://ann@LOCALHOST./loop",
        "postgresql://ann@db.example/loop?hostaddr=127.0.0.1",
        "postgresql://ann@/loop?service=away&sslmode=verify-full",
        "postgresql://ann@/loop?host=/run/postgresql",
        "postgresql:///loop",
    ],
)
def test_a_checked_certificate_or_this_machine_is_taken(url):
    assert LogServer.of(RecordConfig(url=url), {})


def test_what_the_url_leaves_out_comes_from_libpqs_variables():
    here = RecordConfig(url="postgresql:///loop")
    for environment in ({"PGHOST": "db.example"}, {"PGHOSTADDR": "10.0.0.7"}):
        with pytest.raises(BadConfig, match="sslmode=prefer does not check"):
            LogServer.of(here, environment)
        assert LogServer.of(here, environment | {"PGSSLMODE": "verify-full"})


def test_an_address_in_a_variable_outdoes_a_host_in_the_url():
    with pytest.raises(BadConfig, match="leads to another host"):
        LogServer.of(RecordConfig(url="postgresql://ann@localhost/loop"), {"PGHOSTADDR": "192.0.2.1"})


def test_a_service_outdoes_the_variables():
    with pytest.raises(BadConfig, match="leads to another host"):
        LogServer.of(RecordConfig(url="postgresql:///loop"), {"PGSERVICE": "away", "PGSSLMODE": "verify-full"})


@pytest.fixture
def encrypted_server(tmp_path):
    """A server on 127.0.0.1 with a certificate; yields its port and the file of the authority that signed it."""
    found = binaries()
    if found is None:
        pytest.skip(MISSING)
    authority, server = Authority(tmp_path), PostgresServer(found)
    signed = authority.sign("postgres")
    places = [shutil.copy(file, server.directory) for file in (signed.certificate, signed.key)]
    for place in places:
        Path(place).chmod(0o600)
        shutil.chown(place, server.directory.stat().st_uid)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        server.start(
            listen_addresses="127.0.0.1", port=str(port), ssl="on", ssl_cert_file=places[0], ssl_key_file=places[1]
        )
        yield f"postgresql://{server.owner}@127.0.0.1:{port}/postgres", authority.file
    finally:
        server.remove()


async def test_only_the_authority_that_is_named_is_believed(encrypted_server, tmp_path):
    url, authority = encrypted_server
    (tmp_path / "other").mkdir()
    verified = f"{url}?sslmode=verify-full&sslrootcert="
    for name, said in (("stranger", "certificate verify failed"), ("ca", "signature failure")):
        with pytest.raises(BadConfig, match=said):
            PostgresLog.open(RecordConfig(url=verified + Authority(tmp_path / "other", name).file))
    with pytest.raises(BadConfig, match=r"root certificate file .* does not exist"):
        PostgresLog.open(RecordConfig(url=verified + str(tmp_path / "absent.pem"), append_s=0.5))
    with PostgresLog.open(RecordConfig(url=verified + authority)) as log:
        assert log.newest() == 0
