"""What becomes of an answer that Ray does not give. Ray itself is a fake here."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadConfig, StorageFull, Unavailable
from ostinato.launch.placing import ray_cluster
from ostinato.launch.placing.ray_cluster import NodeFailed, RayCluster
from ostinato.placing_config import RayConfig


class RayError(Exception):
    pass


class RayActorError(RayError):
    actor_init_failed = False


class NeverBegan(RayActorError):
    actor_init_failed = True


class RayTaskError(RayError):
    """As Ray passes on what an actor's method raised."""

    def __init__(self, cause):
        super().__init__(f"ray::RayKeeper.look() (pid=1)\\n{cause!r}")
        self.cause = cause


class BothErrors(RayTaskError, TimeoutError):
    """Ray's error is of its cause's kind, too."""


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

    def __init__(self, given=None, *, init=None, group=None):
        self.given, self._init, self._group, self.asked, self.looks = given, init, group, [], 0
        self.slow, self.down = threading.Event(), False
        self.slow.set()
        self.util = SimpleNamespace(placement_group=self._placed, remove_placement_group=lambda group: None)

    def _placed(self, bundles, strategy):
        if self._group is not None:
            raise self._group
        return bundles

    def shutdown(self):
        self.down = True

    def init(self, **_):
        if self._init is not None:
            raise self._init

    def remote(self, _):
        return self

    def options(self, **options):
        self.asked.append(options)
        return SimpleNamespace(remote=lambda: Actor(self.given))

    def available_resources(self):
        self.looks += 1
        self.slow.wait(WHOLE_PROGRAM_S)
        return {"CPU": 1.0}

    def cluster_resources(self):
        return {"CPU": 4.0, "GPU": 2.0}


def placed(monkeypatch, ray, **config):
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    return RayCluster(RayConfig(**config), ("serve",)).place_for("rollout-2", "rollout")()


@pytest.mark.parametrize(
    ("given", "expected", "what"),
    [
        (
            RayActorError("The actor died.\n\tpid: 7\nIts node is dead.\n"),
            Unavailable,
            "its node or its actor is gone: Its node is dead.$",
        ),
        (
            NeverBegan("The actor died.\nTraceback:\nModuleNotFoundError: no ostinato\n"),
            NodeFailed,
            "cannot keep a worker: ModuleNotFoundE",
        ),
        (RayError(), Unavailable, "Ray: RayError"),
        (RayTaskError(OSError("no room")), OSError, "^no room$"),
        (RayTaskError(StorageFull("a full disk")), StorageFull, "^a full disk$"),
        (RayTaskError(BadConfig("another version")), BadConfig, "^another version$"),
        (RayTaskError(KeyError("x")), NodeFailed, "^its node failed: KeyError: 'x'$"),
        (BothErrors(TimeoutError(110, "a slow disk")), TimeoutError, "a slow disk"),
        (None, Unavailable, "did not answer for 0.05 s"),
    ],
)
async def test_no_answer_is_an_error_that_the_supervisor_knows(monkeypatch, given, expected, what):
    place = placed(monkeypatch, Ray(given), patience_s=0.05)
    with pytest.raises(expected, match=what):
        await place.keeper.look()


@in_virtual_time
async def test_a_start_has_a_limit_and_a_wish_for_a_node_has_none(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_START_S", 0.05)
    place = placed(monkeypatch, Ray(), patience_s=0.05)
    with pytest.raises(Unavailable, match=r"did not answer for 0\.1 s"):
        await place.keeper.start({})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await place.keeper.here()


async def test_a_node_is_known_by_its_address_and_by_rays_name(monkeypatch):
    place = placed(monkeypatch, Ray(("10.0.0.7", "a1b2")))
    assert place.node_name == ""
    assert await place.keeper.here() == "10.0.0.7"
    assert place.node_name == "a1b2"


async def test_a_disk_that_times_out_under_a_start_is_said_as_it_is(monkeypatch):
    with pytest.raises(TimeoutError, match="a slow disk"):
        await placed(monkeypatch, Ray(BothErrors(TimeoutError(110, "a slow disk")))).keeper.here()


async def test_an_answer_is_passed_on(monkeypatch):
    assert await placed(monkeypatch, Ray(7)).keeper.start({}) == 7


async def test_a_worker_asks_for_what_its_kind_takes_and_says_what_there_is(monkeypatch):
    ray = Ray()
    takes = {"GPU": 1, "fast_disk": 2, "memory": 3e10}
    place = placed(monkeypatch, ray, cpus={"rollout": 3}, resources={"rollout": takes})
    (asked,) = ray.asked
    assert (asked["num_cpus"], asked["num_gpus"], asked["memory"]) == (3, 1, 3e10)
    assert asked["resources"] == {"fast_disk": 2}, "Ray refuses these names among the others"
    assert asked["scheduling_strategy"] == "SPREAD"
    assert await place.wanting() == (
        "waiting for Ray to place it: it takes 3 CPU, 1 GPU, 2 fast_disk, 3e+10 memory; "
        "free are 1 of 4 CPU, 0 of 2 GPU, 0 of 0 fast_disk, 0 of 0 memory"
    )


async def test_all_who_wait_share_one_look_and_a_slow_head_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_QUERY_INTERVAL_S", 0.2)
    ray = Ray()
    monkeypatch.setattr(ray_cluster, "_ray", lambda: ray)
    made = RayCluster(RayConfig(), ("serve",))
    places = [made.place_for(f"rollout-{number}", "rollout")() for number in range(5)]
    ray.slow.clear()
    try:
        waiting = asyncio.gather(*(place.wanting() for place in places))
        async with asyncio.timeout(PATIENT_S):  # the head is slow still
            assert {"does not answer" in what for what in await waiting} == {True}
        assert ray.looks == 1
    finally:
        ray.slow.set()
    async with asyncio.timeout(PATIENT_S):
        while "free are 1 of 4 CPU" not in await places[0].wanting():
            await asyncio.sleep(0.05)


def test_a_group_that_ray_refuses_is_named_by_its_settings(monkeypatch):
    ray = Ray(group=ValueError("Bundles cannot be empty"))
    with pytest.raises(BadConfig, match=r"ray\.cpus, ray\.resources or ray\.strategy: .*Bundles cannot be empty"):
        placed(monkeypatch, ray)
    assert ray.down


def test_a_cluster_that_is_not_there_is_named_with_a_way_out(monkeypatch):
    with pytest.raises(BadConfig, match=r"ray.address '10.0.0.1:6379': nobody.*ray start --head"):
        placed(monkeypatch, Ray(init=ConnectionError("nobody")), address="10.0.0.1:6379")
