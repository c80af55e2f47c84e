"""What becomes of an answer that Ray does not give. Ray itself is a fake here."""

import asyncio
from types import SimpleNamespace

import pytest

from ostinato.core.errors import BadConfig, StorageFull, Unavailable
from ostinato.launch.placing.nodes import cluster
from ostinato.launch.placing.nodes.cluster import RayCluster
from ostinato.placing_config import RayConfig


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class RayTaskError(RayError):
    """As Ray passes on what an actor's method raised."""

    def __init__(self, cause):
        super().__init__(f"ray::OnRay.look() (pid=1)\\n{cause!r}")
        self.cause = cause


class Actor:
    """Each method gives what it was made with: an answer, an error, or nothing, ever."""

    def __init__(self, given):
        self._given = given

    def __getattr__(self, _):
        return SimpleNamespace(remote=self._remote)

    async def _remote(self, *_):
        if self._given is None:
            await asyncio.Event().wait()
        if isinstance(self._given, Exception):
            raise self._given
        return self._given


class Ray:
    """The little of Ray that a cluster asks for."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)
    util = SimpleNamespace(placement_group=lambda bundles, strategy: bundles, remove_placement_group=lambda group: None)

    def __init__(self, given=None, *, init=None):
        self.given, self._init, self.asked = given, init, []

    def init(self, **_):
        if self._init is not None:
            raise self._init

    def remote(self, _):
        return self

    def options(self, **options):
        self.asked.append(options)
        return SimpleNamespace(remote=lambda: Actor(self.given))

    def available_resources(self):
        return {"CPU": 1.0}

    def cluster_resources(self):
        return {"CPU": 4.0, "GPU": 2.0}


def placed(monkeypatch, ray, **config):
    monkeypatch.setattr(cluster, "_ray", lambda: ray)
    return RayCluster(RayConfig(**config), ("serve",)).place_for("rollout-2", "rollout")()


@pytest.mark.parametrize(
    ("given", "expected", "what"),
    [
        (RayActorError("The actor died.\nmore"), Unavailable, "its node or its actor is gone: The actor died.$"),
        (RayError(), Unavailable, "Ray: RayError"),
        (RayTaskError(OSError("no room")), OSError, "^no room$"),
        (RayTaskError(StorageFull("a full disk")), StorageFull, "^a full disk$"),
        (RayTaskError(KeyError("x")), Unavailable, "^Ray: KeyError: 'x'$"),
        (None, Unavailable, "did not answer for 0.05 s"),
    ],
)
async def test_no_answer_is_an_error_that_the_supervisor_knows(monkeypatch, given, expected, what):
    place = placed(monkeypatch, Ray(given), patience_s=0.05)
    with pytest.raises(expected, match=what):
        await place.keeper.look()


async def test_an_answer_is_passed_on(monkeypatch):
    assert await placed(monkeypatch, Ray((7, "10.0.0.1"))).keeper.start({}) == (7, "10.0.0.1")


def test_a_worker_asks_for_what_its_kind_takes_and_says_what_there_is(monkeypatch):
    ray = Ray()
    place = placed(monkeypatch, ray, cpus={"rollout": 3}, resources={"rollout": {"GPU": 1, "fast_disk": 2}})
    (asked,) = ray.asked
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (3, 1, {"fast_disk": 2})
    assert asked["scheduling_strategy"] == "SPREAD"
    assert place.wanting() == (
        "waiting for Ray to place it: it takes 3 CPU, 1 GPU, 2 fast_disk; free are 1 of 4 CPU, 0 of 2 GPU, 0 of 0 fast_disk"
    )


def test_a_cluster_that_is_not_there_is_named_with_a_way_out(monkeypatch):
    with pytest.raises(BadConfig, match=r"ray.address '10.0.0.1:6379': nobody.*ray start --head"):
        placed(monkeypatch, Ray(init=ConnectionError("nobody")), address="10.0.0.1:6379")
