"""The cache of one value per person on a full disk."""

from pathlib import Path

import pytest

from ostinato.core.errors import StorageFull
from ostinato.record.config import Encrypt
from ostinato.record.person_cache import SqlPersonCache


def test_a_full_disk_is_said_as_such_and_leaves_what_was_there(tmp_path: Path):
    ann, crowd = ("acme", "ann"), {("acme", f"somebody {i}"): (2, None, bytes(1000)) for i in range(300)}
    cache = SqlPersonCache(tmp_path / "people.sqlite", None, Encrypt.NONE, most=1000)
    assert cache.begin("rules@1") == (0, "")
    cache.write(1, "noted", {ann: (1, None, b"of ann")})
    pages = cache._write.execute("PRAGMA page_count").fetchone()[0]
    cache._write.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StorageFull, match="free space"):
        cache.write(2, "", crowd)
    cache._write.execute(f"PRAGMA max_page_count={2**30}")
    assert (cache.begin("rules@1"), cache.load(ann)) == ((1, "noted"), b"of ann")
    cache.write(2, "", crowd)
    assert cache.count("acme") == 301
    cache.close()
