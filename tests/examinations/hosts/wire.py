"""The network between the hosts: carries IP packets from one host to another, with delays, or drops them.

``python -m tests.examinations.hosts.wire``

Each host's interface is a TUN device in the host's own network namespace, whose other end is here. So a cut drops packets silently, like
a cut cable: neither side is told, no connection is reset, and data arrives once the kernel retransmits it. Orders come as lines of JSON
on the standard input, each answered by a line: ``{"host": [pid, address]}``, ``{"gone": address}``,
``{"delays": [[a, b, seconds], ...]}``, ``{"cuts": [[a, b], ...]}`` (both apply in both directions and replace the earlier ones),
``{"count": true}``. When the input ends it exits, and packets in flight are lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

INTERFACE = "net0"
MTU = 16_000  # large, since a packet costs this process some ten microseconds whatever its size
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_CLONE_NEWNET = 0x40000000
_ROOM = 20_000  # most packets in flight to all hosts together; further packets are dropped, as in a router

Pair = tuple[str, str]


def open_tun(pid: int) -> int:
    """A TUN device in the network namespace of the process `pid`, as a file descriptor here. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _enter(libc, other)
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _TUN_WITHOUT_HEADER))
        finally:
            _enter(libc, own)
    finally:
        os.close(own)
        os.close(other)
    return tun


def _enter(libc: Any, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: a network namespace cannot be entered; this needs root")


class Wire:
    """All links, and the packets in flight."""

    def __init__(self) -> None:
        self._hosts: dict[str, int] = {}
        self._addresses: dict[int, str] = {}
        self._delays: dict[Pair, float] = {}
        self._cuts: set[Pair] = set()
        self._flying: list[tuple[float, int, str, bytes]] = []
        self._number = 0
        self._poll = select.epoll()
        self.carried: Counter[str] = Counter()

    def run(self) -> None:
        """Carry packets until the input ends."""
        self._poll.register(0, select.EPOLLIN)
        commands = b""
        while True:
            wait = max(0.0, self._flying[0][0] - time.monotonic()) if self._flying else -1
            for fd, _ in self._poll.poll(wait):
                if fd != 0:
                    self._read(fd)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    sys.stdout.write(json.dumps(self.obey(json.loads(line))) + "\n")
                    sys.stdout.flush()
            self._deliver()

    def obey(self, order: dict[str, Any]) -> object:
        """Carry out an order. Returns the answer."""
        if "host" in order:
            pid, address = order["host"]
            self._forget(address)
            tun = self._hosts[address] = open_tun(pid)
            self._addresses[tun] = address
            self._poll.register(tun, select.EPOLLIN)
        if "gone" in order:
            self._forget(order["gone"])
        if "delays" in order:
            self._delays = {pair: seconds for a, b, seconds in order["delays"] for pair in ((a, b), (b, a))}
        if "cuts" in order:
            self._cuts = {pair for a, b in order["cuts"] for pair in ((a, b), (b, a))}
        return dict(self.carried) if "count" in order else "done"

    def _forget(self, address: str) -> None:
        tun = self._hosts.pop(address, None)
        if tun is not None:
            del self._addresses[tun]
            self._poll.unregister(tun)
            os.close(tun)

    def _read(self, tun: int) -> None:
        source = self._addresses.get(tun)
        while source is not None:
            try:
                packet = os.read(tun, MTU)
            except BlockingIOError:
                return
            except OSError:  # the host is off
                self._forget(source)
                return
            if packet[0] >> 4 != 4:
                continue  # IPv6 neighbour discovery
            pair = source, socket.inet_ntoa(packet[16:20])
            if pair in self._cuts or len(self._flying) >= _ROOM:
                self.carried["packets lost in a cut" if pair in self._cuts else "packets lost for room"] += 1
                continue
            self._number += 1
            due = time.monotonic() + self._delays.get(pair, 0.0)
            heapq.heappush(self._flying, (due, self._number, pair[1], packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._flying)
            tun = self._hosts.get(target)
            try:
                if tun is not None:
                    os.write(tun, packet)
            except OSError:  # the host's queue is full, or the host is off
                tun = None
            self.carried["packets" if tun is not None else "packets to nobody"] += 1
            self.carried["bytes"] += len(packet) if tun is not None else 0


if __name__ == "__main__":
    if not Path("/dev/net/tun").exists():
        sys.exit("this kernel has no TUN devices (/dev/net/tun): load the module `tun`")
    Wire().run()
