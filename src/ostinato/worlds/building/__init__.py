"""Tasks out of published packages: a package's own tests say what a change broke, and when it is mended."""
