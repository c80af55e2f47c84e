"""The composition root, by subject: configuration in, wired objects out. The only place that knows both sides of a seam.

A worker opens its run once (`storage.open_run`) and hands it down; what a process needs is built from that, in one place each.
"""
