"""From a URL to the weight store behind it."""

from __future__ import annotations

from pathlib import Path

from ostinato.publish.bucket import BucketConfig, BucketStore
from ostinato.publish.readonly import HttpStore
from ostinato.publish.store import DirectoryStore, KeptStore


def open_url(config: BucketConfig) -> KeptStore:
    """The store that `config.url` names: a directory, a bucket, or a relay (http, https), which can only be read. Raises BadConfig."""
    url = config.url
    if "://" not in url or url.startswith("file://"):
        return DirectoryStore(Path(url.removeprefix("file://")).expanduser())
    return HttpStore(config) if url.startswith(("http://", "https://")) else BucketStore(config)
