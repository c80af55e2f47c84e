"""The lossless codec of one chunk of a tensor (`codec`)."""

# first, so that its cache of compiled kernels holds for those of this package, too
import ostinato.model.kernels  # noqa: F401  # pyright: ignore[reportUnusedImport]
