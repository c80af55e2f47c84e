"""One model's training state divided over processes: FSDP2, balanced micro-batches, checkpoints by rank."""
