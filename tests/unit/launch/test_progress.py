import resource

from ostinato.launch.views.progress import Lines, Progress


def test_lines_that_a_kill_or_a_full_disk_tore_are_lost_alone(tmp_path):
    path = tmp_path / "serve.jsonl"
    progress, lines = Progress(path), Lines(path)
    progress.write("one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        progress.write("lost")
        progress.write("lost too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    progress.write("two")
    with path.open("a") as file:
        file.write('{"kind": "to')  # its writer was killed
    Progress(path).write("three")
    assert [line["kind"] for line in lines.new()] == ["one", "two", "three"]
    assert lines.new() == []
