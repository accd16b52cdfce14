"""How millions of named numbers are walked: in blocks, with noise, over shards, with batch-norm statistics."""
