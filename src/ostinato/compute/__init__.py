"""Accounting and allocation of compute: operations by phase, cycle planning, workers that sample or train, borrowed replicas."""
