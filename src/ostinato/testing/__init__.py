"""Public fakes and the tiny model, for tests of Ostinato and of products that use it."""
