"""Replicas of the serving fleet that sample rollouts while there is little traffic: when to lend and to give back, and a simulation."""
