"""MTraining on nnScaler: long-context training with dynamic sparse attention over a ring of GPUs.

This module holds the version and imports nothing, so that `import mtraining_nns` is instant and always works.
"""

__version__ = "0.1.0"
