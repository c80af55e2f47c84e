"""Code corpora for continued pretraining: licence and content filters, deduplication, token shards, and their reading order."""
