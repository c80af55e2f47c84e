"""How answers are got for a measurement: with patience, from the version that is meant, in one answer or in a whole rollout."""
