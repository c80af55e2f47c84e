"""Public fakes and a tiny model, for tests of Ostinato and of products that use it."""
