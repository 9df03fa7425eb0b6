"""Training data: text to a packed token stream, fixed-length sequences from it, and the shard of each rank."""
