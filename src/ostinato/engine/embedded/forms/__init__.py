"""Forms of a model that compute the same bits in fewer, larger calls, and the trial of this on the loaded model."""
