"""Runs inside of a gVisor sandbox: standard library only, files that find each other by path."""
