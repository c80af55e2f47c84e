"""Tasks of simulated worlds, and their file formats: tasksets in JSONL, and Harbor task folders."""
