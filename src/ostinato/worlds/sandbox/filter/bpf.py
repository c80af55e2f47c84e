"""Compiles the allow-list into classic BPF: a bisection over call numbers, so that any call costs about eight comparisons.

Pure: numbers and names in, bytes out. A linear list would cost 2.5 times as much to install and up to 200 comparisons a call.
Instructions are `struct sock_filter` {u16 code, u8 jt, u8 jf, u32 k} over `struct seccomp_data` {nr, arch, instruction pointer, args[6]}.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence

from ostinato.worlds.sandbox.filter.calls import (
    ANSWERED,
    PLAIN,
    RULES,
    SOCKET_HINTS,
    SOCKET_LEVEL,
    SOCKET_OPTIONS,
    TCP_LEVEL,
    TCP_OPTIONS,
    Argument,
)

Instruction = tuple[int, int, int, int]
LOAD, MASK, EQUAL, AT_LEAST, JUMP, RETURN = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _argument(index: int) -> Instruction:
    return LOAD, 0, 0, 16 + 8 * index  # the low half, on little-endian machines


def _answer(error: int) -> Instruction:
    return RETURN, 0, 0, ERROR | error


def _condition(argument: Argument) -> list[Instruction]:
    """Falls through if the condition holds, otherwise returns its error."""
    values, count = argument.values, len(argument.values)
    code = [_argument(argument.index)]
    if argument.mask != 0xFFFFFFFF:
        code.append((MASK, 0, 0, argument.mask))
    if argument.among:
        code += [(EQUAL, count - place, 0, value) for place, value in enumerate(values)]
        return [*code, _answer(argument.error)]
    code += [(EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    return [*code, (JUMP, 0, 0, 1), _answer(argument.error)]


def _socket_options() -> list[Instruction]:
    """`setsockopt` by level and name: 26 is a filter at the socket level, but a harmless option at the IPv6 level."""
    code: list[Instruction] = []
    refused = [
        (SOCKET_LEVEL, SOCKET_OPTIONS, errno.EPERM),
        (SOCKET_LEVEL, SOCKET_HINTS, 0),
        (TCP_LEVEL, TCP_OPTIONS, errno.EPERM),
    ]
    for level, options, error in refused:
        names = _condition(Argument(index=2, values=options, among=False, error=error))
        code += [_argument(1), (EQUAL, 0, len(names), level), *names]
    return [*code, (RETURN, 0, 0, ALLOW)]


def _leaf(name: str) -> list[Instruction]:
    if name in ANSWERED:
        return [_answer(ANSWERED[name])]
    if name == "setsockopt":
        return _socket_options()
    code = [instruction for argument in RULES.get(name, ()) for instruction in _condition(argument)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def _bisect(pieces: Sequence[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """`pieces` are (first number, code), ascending; each piece applies up to the next one's first number."""
    if len(pieces) == 1:
        return pieces[0][1]
    middle = len(pieces) // 2
    low, high = _bisect(pieces[:middle]), _bisect(pieces[middle:])
    first = pieces[middle][0]
    if len(low) <= 255:
        return [(AT_LEAST, len(low), 0, first), *low, *high]
    return [(AT_LEAST, 0, 1, first), (JUMP, 0, 0, len(low)), *low, *high]


def compile_filter(numbers: Mapping[str, int], architecture: str) -> bytes:
    """The filter program for the calls whose numbers are given. A call without a number does not exist on this architecture.

    Example: ``compile_filter({"read": 0, "write": 1}, "x86_64")`` allows two calls and answers all others with ENOSYS.
    Raises KeyError for an architecture that has no entry in `ARCHITECTURES`.
    """
    names = {number: name for name, number in numbers.items() if name in {*PLAIN, *ANSWERED, *RULES, "setsockopt"}}
    unknown = [_answer(errno.ENOSYS)]
    pieces: list[tuple[int, list[Instruction]]] = [(0, unknown)]
    for number in range(max(names, default=0) + 2):
        code = _leaf(names[number]) if number in names else unknown
        if code != pieces[-1][1]:
            pieces.append((number, code))
    if pieces[1:] and pieces[1][0] == 0:
        pieces.pop(0)
    head: list[Instruction] = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[architecture]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0),
    ]  # fmt: skip
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*head, *_bisect(pieces)])
