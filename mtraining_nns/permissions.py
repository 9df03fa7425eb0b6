"""The mode of files that others read, too: safetensors makes its files readable by their owner alone."""

import os


def as_opened(path: str | os.PathLike) -> None:
    """Give a file the mode that `open` would have given it."""
    umask = os.umask(0o077)  # there is no other way to read it
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)
