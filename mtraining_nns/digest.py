"""sha256 of files of any size, and of a model folder."""

import hashlib
from pathlib import Path

BLOCK_BYTES = 1 << 20


def feed(digest, stream) -> int:
    """Hash a stream from where it stands to its end; returns the number of bytes."""
    count = 0
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
        count += len(block)
    return count


def of_stream(stream) -> str:
    """sha256 of the rest of a stream, in hexadecimal."""
    digest = hashlib.sha256()
    feed(digest, stream)
    return digest.hexdigest()


def of_model(model_dir: str | Path) -> str:
    """sha256 over config.json, the safetensors index and all weights: reads every byte of them."""
    folder, digest = Path(model_dir), hashlib.sha256()
    names = [folder / name for name in ("config.json", "model.safetensors.index.json")]
    for path in [*filter(Path.is_file, names), *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            feed(digest, stream)
    return digest.hexdigest()
