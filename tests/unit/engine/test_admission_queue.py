"""Who starts next."""

from ostinato.engine.embedded.scheduler import WaitingSamples


def queue(*samples: tuple[str, str]) -> WaitingSamples[str]:
    waiting: WaitingSamples[str] = WaitingSamples()
    for client, sample in samples:
        waiting.put(client, sample)
    return waiting


def started(waiting: WaitingSamples[str], clients: dict[str, str]) -> list[str]:
    order: list[str] = []
    while (sample := waiting.next()) is not None:
        waiting.start(clients[sample], sample)
        order.append(sample)
    return order


def test_one_asker_is_served_in_the_order_of_arrival():
    waiting = queue(("ann", "a1"), ("ann", "a2"), ("ann", "a3"))
    assert started(waiting, dict.fromkeys(("a1", "a2", "a3"), "ann")) == ["a1", "a2", "a3"]
    assert len(waiting) == 0


def test_askers_take_turns_however_much_one_of_them_sends():
    flood = [f"a{i}" for i in range(100)]
    waiting = queue(*(("ann", each) for each in flood), ("bob", "b1"), ("bob", "b2"))
    order = started(waiting, dict.fromkeys(flood, "ann") | dict.fromkeys(("b1", "b2"), "bob"))
    assert order[:5] == ["a0", "b1", "a1", "b2", "a2"]


def test_who_has_fewer_running_goes_first():
    waiting = queue(("ann", "a1"), ("ann", "a2"), ("bob", "b1"))
    waiting.start("bob", "b1")
    waiting.put("bob", "b2")
    assert waiting.next() == "a1"
    waiting.end("bob")
    waiting.start("ann", "a1")
    assert waiting.next() == "b2"


def test_what_was_put_back_is_its_askers_next():
    waiting = queue(("ann", "a1"), ("ann", "a2"))
    waiting.start("ann", "a1")
    waiting.end("ann")
    waiting.put("ann", "a1", first=True)
    assert [*waiting] == ["a1", "a2"]
    waiting.discard("ann", "a1")
    waiting.discard("ann", "a1")
    assert [*waiting] == ["a2"]
