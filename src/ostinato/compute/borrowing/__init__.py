"""Lending replicas of the serving fleet to rollouts while traffic is low: when to lend and to return them, and a simulation."""
