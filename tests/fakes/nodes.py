"""A cluster's nodes in this process: the node's side of a worker is real, and its place can come late, be lost, or refuse."""

import asyncio
import contextlib
import os

from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S

from ostinato.core.errors import Unavailable
from ostinato.launch.placing.ray_cluster import NodeKeeper, Order
from ostinato.launch.placing.supervision import Supervisor
from ostinato.placing_config import SuperviseConfig

PROGRAM = """
import json, os, signal, sys, time
pipe, home, command = int(os.environ["OSTINATO_PULSE_FD"]), os.path.dirname(sys.argv[-1]), sys.argv[1]
def there(name):
    return os.path.exists(os.path.join(home, name))
def serve(url):
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    with open(os.path.join(home, "gateway.partial"), "w") as file:
        file.write(f"{url}\\n{os.getpid()} {fields[19]}\\n")
    os.replace(os.path.join(home, "gateway.partial"), os.path.join(home, "gateway.url"))
serving = False
while not there("fail"):
    os.write(pipe, json.dumps({"doing": "working", "ready": True}).encode() + b"\\n")
    if command == "serve" and there("serving") and not serving:
        serving = True
        serve(open(os.path.join(home, "serving")).read())
    time.sleep(0.02)
os.write(pipe, json.dumps({"doing": "x", "failed": "BadConfig: no such model", "certain": True}).encode() + b"\\n")
sys.exit(2)
"""
"""A worker that works until a file `fail` exists. As `serve` it publishes the address in the file `serving`, as the gateway does."""
LIMITS = SuperviseConfig(silence_s=PATIENT_S, stop_s=PATIENT_S, tries=3, window_s=60.0, longest_wait_s=0.05)


class Node:
    """A place in this process. `there` is set once the place is available, `gone` means that its node was lost, `broken` is
    raised at each start, and `full` makes its disk refuse files.
    """

    def __init__(self, host="10.0.0.7"):
        self.keeper, self._inner = self, NodeKeeper(host)
        self.there, self.gone, self.left, self.broken = asyncio.Event(), False, False, None
        self.full, self.disk, self.node_name = False, None, ""

    async def wanting(self):
        return "waiting for room"

    def leave(self):
        self.left = True

    def _check(self):
        if self.gone:
            raise Unavailable("its node is gone")

    async def here(self):
        await self.there.wait()
        self.node_name = f"node of {await self._inner.here()}"
        return await self._inner.here()

    async def start(self, order):
        if self.broken is not None:
            raise self.broken
        if self.disk is not None:
            order = order | {"home": str(self.disk)}
        return await self._inner.start(order)

    async def look(self):
        self._check()
        return await self._inner.look()

    async def tell(self, url):
        self._check()
        await self._inner.tell(url)

    async def put(self, name, text):
        self._check()
        if self.full:
            raise OSError(28, "no room")
        await self._inner.put(name, text)

    async def stop(self, grace_s):
        self._check()
        return await self._inner.stop(grace_s)

    async def kill(self):
        self._check()
        await self._inner.kill()


class Nodes:
    """Opens a new node at each request, available at once if `ready`. `host`: the host of all nodes; otherwise each has its own. `disks`: a
    folder in which each node has its own directory for the run, as on several machines.
    """

    def __init__(self, *, ready=True, host="", broken=None, disks=None):
        self.made, self._ready, self._host, self._broken, self._disks = [], ready, host, broken, disks
        self.taken = set()

    def place_for(self, name, kind):
        """Like a cluster's method of this name."""
        return self.open

    async def leaving(self):
        """The names in `taken`."""
        return frozenset(self.taken)

    def open(self):
        node = Node(self._host or f"10.0.0.{len(self.made) + 1}")
        if self._disks is not None:
            node.disk = self._disks / f"node-{len(self.made) + 1}"
        node.broken = self._broken
        if self._ready:
            node.there.set()
        self.made.append(node)
        return node


def order(home, name="train", command=None):
    return Order(
        name=name,
        command=command or name,
        settings='{"a": "secret"}',
        home=str(home),
        admin_key="k" * 43,
        cwd=str(home),
    )


@contextlib.asynccontextmanager
async def supervised(*workers):
    """Supervise workers inside the block. Yields the watched workers, or the only one, and the list of messages."""
    said = []
    supervisor = Supervisor(workers, LIMITS, lambda who, what: said.append(what))
    running = asyncio.create_task(supervisor.run())
    try:
        yield (supervisor.watched[0] if len(workers) == 1 else supervisor.watched), said
    finally:
        supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


async def until(ask, timeout_s=WHOLE_PROGRAM_S):
    async with asyncio.timeout(timeout_s):
        while not (found := ask()):
            await asyncio.sleep(0.01)
        return found


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
