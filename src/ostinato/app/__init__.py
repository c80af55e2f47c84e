"""The composition root, by subject: configuration in, wired objects out. The only place that knows both sides of a seam.

A worker opens its run once (`storage.open_run`) and hands it down; each object that a process needs is built from the run in one place.
"""
