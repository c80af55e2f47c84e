"""The composition root, by subject: turns the configuration into wired objects. Only this package imports both sides of a seam.

A worker opens its run once (`storage.open_run`) and passes it on. Each object that a process needs is built from the run in one place.
"""
