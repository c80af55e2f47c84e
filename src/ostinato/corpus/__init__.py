"""Code corpora for continued pretraining: licences, filters, token shards, and the order in which they are read."""
