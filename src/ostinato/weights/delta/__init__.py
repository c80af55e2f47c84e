"""The lossless codec of one chunk of a tensor (`codec`)."""

# imported first, so that its cache of compiled kernels also applies to the kernels of this package
import ostinato.model.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]
