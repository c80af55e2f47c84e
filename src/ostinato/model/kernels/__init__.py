"""Reproducible Numba kernels: the order of IEEE operations written here defines their bits, not a library's choice of kernel."""

from ostinato.model.kernels.cache import install

install()  # must come before any kernel is decorated
