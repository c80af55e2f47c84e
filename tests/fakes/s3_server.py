"""moto's S3 server: the real API over HTTP, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import boto3
from moto.server import ThreadedMotoServer

KNOWN = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
REGION, BUCKET = "us-east-1", "weights"


@contextlib.contextmanager
def s3_server() -> Generator[str]:
    """Its URL, until the end of the block. It has the bucket `BUCKET`."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        boto3.client("s3", endpoint_url=url, region_name=REGION, **KNOWN).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        server.stop()


def s3_options(url: str) -> dict[str, str]:
    """obstore's settings for it."""
    return {"aws_endpoint": url, "aws_region": REGION, **KNOWN}
