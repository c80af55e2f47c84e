"""What one release rests on, gathered from the ledger, the index, the turns and the weight store."""
