"""Evaluation of long-context causal language models.

text         where evaluation text comes from: files, folders, the held-out part of a prepared data folder
fetch        public evaluation data by name: sources.yaml, each file with its sha256
questions    what a suite asks an engine; prompts: prompts of an exact length; scoring: metrics of answers
ruler        RULER's 13 tasks at any length: ruler.yaml, ruler_tasks (what prompts hold), ruler_sources (what they read)
infinitebench  InfiniteBench's 12 tasks: infinitebench.yaml, infinitebench_rows (its files), infinitebench_scoring
niah         a needle in a haystack, depth x length
perplexity   sliding-window perplexity by position
model_folder what a model folder says of itself, and its weights
huggingface  an engine that generates and scores, with dense or with the trained sparse attention; vllm: another one
runner       asks everything, keeps every answer, goes on where it was stopped
report       manifest, results, printed tables; html: one page; plots: the heat map
compare      two evaluations side by side

Suites know an engine only as `questions.Engine`.
This package imports no trainer: an exported folder and a text are all it needs.
"""
