"""Opens the weight store at a URL."""

from __future__ import annotations

from pathlib import Path

from ostinato.weights.store.bucket import BucketConfig, BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.interface import Fence, KeptStore, unfenced
from ostinato.weights.store.readonly import HttpStore


def open_url(config: BucketConfig, fence: Fence = unfenced) -> KeptStore:
    """The store that `config.url` names: a directory, a bucket, or a relay (http, https), which can only be read. Raises BadConfig.

    `fence` is called before each move of a ref.
    """
    url = config.url
    if "://" not in url or url.startswith("file://"):
        return DirectoryStore(Path(url.removeprefix("file://")).expanduser(), fence=fence)
    return HttpStore(config) if url.startswith(("http://", "https://")) else BucketStore(config, fence=fence)
