"""Lazy imports of what transformers' modelling code asks for and no process here uses: torch's compiler, DTensor, FSDP, scipy, accelerate.

They would be half of what a process that loads a model imports. While a module of transformers is imported, stand-ins take their place.
What it imports from a stand-in is looked up in the real package when it is first used, and that package is imported then.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

DEFERRED = (
    "accelerate",
    "scipy.optimize",
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""The packages that are imported when something of them is first used. One that is imported already is left as it is."""
_COMPILER = "torch._dynamo"


class Deferred:
    """Something of a package that is not imported yet, or what a call of that returns.

    It can be called, asked for attributes, and used as a class or as an instance of its class.
    """

    def __init__(self, finder: DeferringFinder, look: Callable[[], Any], *, marks: bool = False) -> None:
        self.__dict__.update(_finder=finder, _look=cache(look), _marks=marks)

    def __call__(self, *given: Any, **options: Any) -> Any:
        if not self._finder.active:
            return self._real()(*given, **options)
        if (
            self._marks
        ):  # a function for the compiler, which is not here to read it: @disable, @allow_in_graph and the like
            return given[0] if given and isinstance(given[0], FunctionType) else _unmarked
        return Deferred(self._finder, lambda: self._real()(*given, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] (nobody assigns it)
        return Deferred if self._finder.active else type(self._real())

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def _real(self) -> Any:
        self._finder.end()
        return self._look()


def _unmarked(function: Any) -> Any:
    return function


class StandIn(ModuleType):
    """A package that is not imported yet. Each of its names is `Deferred`."""

    def __init__(self, name: str, finder: DeferringFinder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = self.__name__
        return Deferred(self._finder, lambda: getattr(importlib.import_module(own), name), marks=own == _COMPILER)


class DeferringFinder(MetaPathFinder, Loader):
    """Finds stand-ins for the packages `deferred` while a module of the package `within` is imported, in the thread that imports it.

    All else is left to the other finders.
    """

    def __init__(self, within: str, deferred: Sequence[str]) -> None:
        self._within, self._deferred = f"{within}.", tuple(f"{each}." for each in deferred)
        self._thread: int | None = None
        self._loaders: dict[str, Loader] = {}

    @property
    def active(self) -> bool:
        """True while this thread imports a module of `within`."""
        return self._thread == threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A stand-in's spec, or that of a module of `within`, whose loader this one wraps."""
        if fullname.startswith(self._within) and self._thread is None:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._loaders[fullname], spec.loader = spec.loader, self
            return spec
        if self.active and f"{fullname}.".startswith(self._deferred):
            inside = f"{fullname}." not in self._deferred
            if inside or PathFinder.find_spec(fullname, path, target) is not None:
                return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """A stand-in; None for a usual module."""
        return None if spec.name in self._loaders else StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Execute a module of `within` beside stand-ins, which have nothing to execute themselves."""
        loader = self._loaders.pop(module.__name__, None)
        if loader is None or module.__spec__ is None:
            return
        module.__spec__.loader = module.__loader__ = loader
        self._thread = threading.get_ident()
        try:
            loader.exec_module(module)
        finally:
            self.end()

    def end(self) -> None:
        """From now on the real packages are imported."""
        self._thread = None
        for name, module in [*sys.modules.items()]:
            if type(module) is StandIn and vars(module)["_finder"] is self:
                del sys.modules[name]
                parent, _, own = name.rpartition(".")
                vars(sys.modules.get(parent, module)).pop(own, None)


FINDER = DeferringFinder("transformers", DEFERRED)


def defer() -> None:
    """Have `DEFERRED` imported lazily by all that is imported of transformers from now on."""
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
