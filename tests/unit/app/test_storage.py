from ostinato.app.storage import open_store
from ostinato.config import load
from ostinato.weights.store.bucket import BucketStore
from ostinato.weights.store.directory import DirectoryStore


def test_weights_lie_in_the_run_unless_a_url_says_otherwise(tmp_path):
    run = f"run.directory={tmp_path / 'run'}"
    inside = open_store(load(None, [run]))
    assert isinstance(inside, DirectoryStore)
    assert (tmp_path / "run" / "weights" / "objects").is_dir()
    for url in (str(tmp_path / "elsewhere"), f"file://{tmp_path / 'there'}"):
        assert isinstance(open_store(load(None, [run, f"weights.url={url}"])), DirectoryStore)
    assert (tmp_path / "elsewhere" / "objects").is_dir()
    assert (tmp_path / "there" / "objects").is_dir()
    bucket = load(None, [run, "weights.url=s3://versions/run-7", "weights.options.aws_region=eu-west-1"])
    assert isinstance(open_store(bucket), BucketStore)
