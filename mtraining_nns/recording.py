"""The file of recorded indices: what each layer of a model kept on a text.

    index.safetensors      layer_00.hit bool [B, N, n]   layer_00.position int32 [B, N, C]   layer_00.count int32 [B, N]
                           or layer_00.mask int32 [B, N, n, W]   layer_00.row_bits int32 [B, N, S, W], W = ceil(m / 32)
    metadata               format, block, seq_len, layers (their numbers), about (JSON: what record.py ran and measured)

Layers of `DistanceIndex` without columns have no position and no count. Those of `RowIndex` have a mask of one bit a
span, the tokens of a span as layer_00.span int64 [], and row bits where the pattern chooses rows. safetensors holds
tensors and text only, so a file from elsewhere runs no code; what it says is checked before it is used.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mtraining_nns import permissions
from mtraining_nns.errors import UserError
from mtraining_nns.ops.index import NO_COLUMN, ColumnIndex, DistanceIndex, Index, RowIndex, packed, unpacked

FORMAT = "1"
FIX = "; record it again: mtraining record --help"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Indices by layer of one global sequence, and what they came from: plain JSON values."""

    indices: dict[int, Index]
    seq_len: int
    about: dict

    @property
    def block(self) -> int:
        return next(iter(self.indices.values())).block

    def save(self, path: str | Path) -> None:
        """Write the file. UserError where that cannot be."""
        tensors = {}
        for layer, index in self.indices.items():
            tensors |= {f"{_name(layer)}.{part}": x.cpu().contiguous() for part, x in _parts(index).items()}
        metadata = {
            "format": FORMAT,
            "block": str(self.block),
            "seq_len": str(self.seq_len),
            "layers": json.dumps(list(self.indices)),
            "about": json.dumps(self.about),
        }
        try:
            save_file(tensors, path, metadata)
            permissions.as_opened(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write {path} ({error}); choose another --out") from error

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Read and check a file. UserError for one that is missing, broken, or no recording."""
        try:
            with safe_open(path, "pt") as file:
                metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is no readable safetensors file ({error}){FIX}") from error
        if metadata.get("format") != FORMAT:
            got = metadata.get("format", "none")
            raise UserError(f"{path} is no recording of format {FORMAT}, got format {got}{FIX}")
        try:
            seq_len, block = int(metadata["seq_len"]), int(metadata["block"])
            layers, about = json.loads(metadata["layers"]), json.loads(metadata["about"])
            indices = {layer: _index(tensors, layer, seq_len, block) for layer in layers}
            if not indices or type(about) is not dict:
                raise ValueError(f"expected layers and what they came from, got {layers!r} and {about!r}")
        except (KeyError, ValueError, TypeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
            raise UserError(f"{path} {reason}{FIX}") from error
        return cls(indices=indices, seq_len=seq_len, about=about)


def _parts(index: Index) -> dict[str, torch.Tensor]:
    if isinstance(index, RowIndex):
        spans = index.mask.shape[-1]
        parts = {
            "mask": packed(torch.nn.functional.pad(index.mask, (0, -spans % 32))),
            "span": torch.tensor(index.span),
        }
        return parts if index.row_bits is None else parts | {"row_bits": index.row_bits}
    if index.columns is None:
        return {"hit": index.hit}
    return {"hit": index.hit, "position": index.columns.position, "count": index.columns.count}


def _index(tensors: dict[str, torch.Tensor], layer: int, seq_len: int, block: int) -> Index:
    """A layer's index; KeyError or ValueError for what no operator could have made."""
    if seq_len < 1 or block < 1:
        raise ValueError(f"seq_len and block must be at least 1, got {seq_len} and {block}")
    name = _name(layer)
    parts = {part.removeprefix(f"{name}."): x for part, x in tensors.items() if part.startswith(f"{name}.")}
    return (_row_index if "mask" in parts else _distance_index)(name, parts, seq_len, block)


def _distance_index(name: str, parts: dict[str, torch.Tensor], seq_len: int, block: int) -> DistanceIndex:
    if "hit" not in parts:
        raise KeyError(f"{name}.hit")
    hit, blocks = parts["hit"], -(-seq_len // block)
    if hit.dtype != torch.bool or hit.dim() != 3 or hit.shape[2] < blocks or not hit[..., 0].all():
        raise ValueError(
            f"{name}.hit must be bool [B, N, at least {blocks}] with distance 0 kept, got {hit.dtype} {list(hit.shape)}"
        )
    columns = None
    if "position" in parts:
        if "count" not in parts:
            raise KeyError(f"{name}.count")
        _check_columns(name, parts["position"], parts["count"], hit, seq_len)
        columns = ColumnIndex(position=parts["position"], count=parts["count"], hit=hit, block=block)
    return DistanceIndex(hit=hit, block=block, columns=columns)


def _row_index(name: str, parts: dict[str, torch.Tensor], seq_len: int, block: int) -> RowIndex:
    if "span" not in parts:
        raise KeyError(f"{name}.span")
    mask, span, blocks = parts["mask"], int(parts["span"]), -(-seq_len // block)
    if span < 1 or span % block:
        raise ValueError(f"{name}.span must be a multiple of block {block}, got {span}")
    spans = -(-blocks * block // span)
    words = -(-spans // 32)
    if mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[2:] != (blocks, words):
        raise ValueError(f"{name}.mask must be int32 [B, N, {blocks}, {words}], got {mask.dtype} {list(mask.shape)}")
    bits = parts.get("row_bits")
    if bits is not None and (bits.dtype != torch.int32 or bits.shape != (*mask.shape[:2], seq_len, words)):
        raise ValueError(
            f"{name}.row_bits must be int32 {[*mask.shape[:2], seq_len, words]}, got {bits.dtype} {list(bits.shape)}"
        )
    starts = torch.arange(0, blocks * block, block, dtype=torch.int32)
    return RowIndex(mask=unpacked(mask)[..., :spans], starts=starts, block=block, span=span, row_bits=bits)


def _check_columns(name: str, position, count, hit, seq_len: int) -> None:
    for part, x, shape in (("position", position, [*hit.shape[:2], "C"]), ("count", count, list(hit.shape[:2]))):
        if x.dtype != torch.int32 or x.dim() != len(shape) or x.shape[:2] != hit.shape[:2]:
            raise ValueError(f"{name}.{part} must be int32 {shape}, got {x.dtype} {list(x.shape)}")
    real = position != NO_COLUMN
    if not torch.equal(real.sum(-1, dtype=torch.int32), count) or ((position < 0) | (position >= seq_len))[real].any():
        raise ValueError(f"{name}.position must hold count columns from 0 to {seq_len - 1} a head")


def _name(layer: int) -> str:
    return f"layer_{layer:02d}"
