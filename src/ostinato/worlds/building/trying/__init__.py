"""Running a package's tests in a sandbox: as it is, and changed."""
