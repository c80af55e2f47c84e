"""Numba kernels whose bits are defined by the order of IEEE operations written here, not by a library's choice of kernel."""

from ostinato.model.kernels.cache import install

install()  # before any kernel is decorated
