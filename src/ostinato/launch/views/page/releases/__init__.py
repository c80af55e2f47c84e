"""The evidence for one release, gathered from the ledger, the index, the turns and the weight store."""
