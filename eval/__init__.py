"""Evaluation of long-context causal language models.

text         where evaluation text comes from: files, folders, the held-out part of a prepared data folder
niah         a needle in a haystack, depth x length
perplexity   sliding-window perplexity by position
huggingface  the engine that generates and scores, with dense or with the trained sparse attention
report       manifest, results file, printed tables

The tasks know an engine only by two methods: `generate(prompts, max_new_tokens)` and `nll(token_ids)`.
This package imports no trainer: an exported folder and a text are all it needs.
"""
