"""The connection slots of a sandbox's port: a half-closed connection gives way to a new one, also if it ends at the same moment."""

import socket

from ostinato.worlds.sandbox.gvisor.inside import line


def full_slots():
    slots = line._ConnectionSlots()
    for _ in range(line._MAX_CONNECTIONS):
        slots.acquire()
    return slots


def test_a_half_closed_connection_is_shut_down_for_a_new_one():
    slots = full_slots()
    far, near = socket.socketpair()
    with far, near, slots.evictable(far):

        class Ends(list):
            def pop(self, at):
                slots.release()  # as the connection's thread does once its socket is shut down
                return super().pop(at)

        slots._evictable = Ends(slots._evictable)
        slots.acquire()
        assert near.recv(1) == b""


def test_a_connection_that_ends_just_before_its_eviction_does_not_end_the_port():
    slots = full_slots()

    class Ends(list):
        def pop(self, at):
            self.clear()  # its thread has removed it meanwhile
            slots.release()
            return super().pop(at)

    far, near = socket.socketpair()
    with far, near:
        slots._evictable = Ends([far])
        slots.acquire()
