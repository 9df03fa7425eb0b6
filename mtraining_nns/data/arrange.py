"""Documents of a prepared folder to sequences of one length: what the manifest says of them, and another choice later.

Tokens and boundaries serve every length. A stream is cut where it is read; best-fit packing is a file of its own beside
them, so another length or another way costs seconds and no tokenising.
"""

from pathlib import Path

from mtraining_nns import digest
from mtraining_nns.data import packing, store

WAYS = ("stream", "best_fit")
FIELDS = ("seq_len", "sequences", "remainder", "packing")


def arranged(folder: Path, manifest: dict, way: str, seq_len: int | None) -> dict:
    """The manifest with the sequences of a folder at its end; writes the file of a packed one."""
    kept = {key: value for key, value in manifest.items() if key not in FIELDS}
    kept["sha256"] = {name: manifest["sha256"][name] for name in (store.TOKENS, store.BOUNDARIES)}
    if way == "stream":
        sequences, remainder = divmod(manifest["tokens"], seq_len) if seq_len else (None, None)
        return kept | {"seq_len": seq_len, "sequences": sequences, "remainder": remainder}
    name = f"packing-{seq_len}.npy"
    found = packing.write(folder, name, store.read_boundaries(folder, manifest), seq_len)
    with open(folder / name, "rb") as file:
        kept["sha256"][name] = digest.of_stream(file)
    return kept | found


def rearrange(folder: Path, way: str, seq_len: int | None) -> bool:
    """Give a finished folder other sequences; False where it has these already.

    Every file is replaced in one move and the manifest names the one that counts, so a kill leaves the old or the new.
    """
    manifest = store.read_manifest(folder)
    had = manifest["packing"]["kind"] if "packing" in manifest else "stream"
    seq_len = seq_len or manifest["seq_len"]
    changes = (way, seq_len) != (had, manifest["seq_len"])
    if changes:
        manifest = store.write_manifest(folder, arranged(folder, manifest, way, seq_len))
    for file in folder.glob("packing-*.npy*"):
        if file.name not in manifest["sha256"]:
            file.unlink()
    return changes
