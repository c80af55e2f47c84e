"""Opens the weight store at a URL."""

from __future__ import annotations

from ostinato.weights.config import BucketConfig
from ostinato.weights.store.bucket import BucketStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.interface import Fence, KeptStore, unfenced
from ostinato.weights.store.object_storage import directory_of, in_directory, is_relay
from ostinato.weights.store.readonly import HttpStore


def open_url(config: BucketConfig, fence: Fence = unfenced) -> KeptStore:
    """Return the store at `config.url`: a directory, a bucket, or a relay (http, https), which is read-only. Raises BadConfig.

    `fence` is called before each move of a ref.
    """
    if in_directory(config.url):
        return DirectoryStore(directory_of(config.url), fence=fence)
    return HttpStore(config) if is_relay(config.url) else BucketStore(config, fence=fence)
