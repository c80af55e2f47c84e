"""A suite: the held-out tasks of a task file, by id and family, on which a version is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """A held-out task, as counted, drawn and shown. Example: ``Item("add-1", "arithmetic")``"""

    id: str
    family: str


@dataclass(frozen=True, slots=True)
class Suite:
    """Items under a name, and a hash of everything that decides what is asked and how it is graded. The hash goes into every report.

    Example: ``Suite("held-out", "9f2c...", (item,))``
    """

    name: str
    hash: str
    items: tuple[Item, ...]
