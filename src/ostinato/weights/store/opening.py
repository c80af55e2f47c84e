"""From a URL to the weight store behind it."""

from __future__ import annotations

from pathlib import Path

from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.interface import KeptStore
from ostinato.weights.store.readonly import HttpStore


def open_url(config: BucketConfig) -> KeptStore:
    """The store that `config.url` names: a directory, a bucket, or a relay (http, https), which can only be read. Raises BadConfig."""
    url = config.url
    if "://" not in url or url.startswith("file://"):
        return DirectoryStore(Path(url.removeprefix("file://")).expanduser())
    return HttpStore(config) if url.startswith(("http://", "https://")) else BucketStore(config)
