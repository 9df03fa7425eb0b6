"""Sparse ring attention in plain torch and Triton: knows no trainer, no nnScaler and no HuggingFace."""
