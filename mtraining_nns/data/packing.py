"""Best-fit packing of documents into sequences, so that none is cut that fits into one.

    seq_len 8, documents of 11 3 5 2 4 tokens  ->  pieces 8+3 3 5 2 4  ->  sequences [8] [3 5] [3 4] [2]

"Fewer Truncations Improve Language Modeling" (Ding et al. 2024): a document longer than a sequence is cut into full
ones and a rest; pieces go, longest first, each into the sequence with the least room that holds it. Pieces of one
length are placed together, as many as a kind of room takes, so that ten million documents take seconds.

Within a sequence, pieces keep the order of the documents, and sequences that of their first pieces.
"""

from pathlib import Path

import numpy as np

WORD_BITS = 1024


def pack(boundaries: np.ndarray, seq_len: int) -> np.ndarray:
    """int64 [3, pieces]: sequence, first token and end of each piece, sequence by sequence.

    boundaries: int64 [documents + 1], where documents start. Every token is in exactly one piece.
    """
    starts, ends = _pieces(boundaries, seq_len)
    lengths = ends - starts
    longest_first = np.argsort(seq_len - lengths, kind="stable")
    sequence = np.empty(len(lengths), np.int64)
    sequence[longest_first] = _place(np.bincount(lengths, minlength=seq_len + 1), seq_len)
    sequence = _by_first(sequence)
    order = np.argsort(sequence, kind="stable")
    return np.stack([sequence[order], starts[order], ends[order]])


def write(folder: Path, name: str, boundaries: np.ndarray, seq_len: int) -> dict:
    """Pack the documents of a folder into its file `name`; returns what the manifest says of it."""
    packed = pack(boundaries, seq_len)
    with open(folder / f"{name}.partial", "wb") as file:
        np.save(file, packed)
    (folder / f"{name}.partial").replace(folder / name)
    sequences, tokens = int(packed[0, -1]) + 1, int(boundaries[-1])
    padding = sequences * seq_len - tokens
    packing = {
        "kind": "best_fit",
        "file": name,
        "pieces": packed.shape[1],
        "cut_documents": int((np.diff(boundaries) > seq_len).sum()),
        "padding": padding,
        "padding_share": padding / (sequences * seq_len),
    }
    return {"seq_len": seq_len, "sequences": sequences, "remainder": 0, "packing": packing}


def _pieces(boundaries: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """First token and end of each piece, in the order of the documents."""
    counts = -(-np.diff(boundaries) // seq_len)
    first = np.cumsum(counts) - counts
    turn = np.arange(counts.sum()) - np.repeat(first, counts)
    starts = np.repeat(boundaries[:-1], counts) + turn * seq_len
    return starts, np.minimum(starts + seq_len, np.repeat(boundaries[1:], counts))


def _place(count: np.ndarray, seq_len: int) -> np.ndarray:
    """Sequence of each piece, pieces from the longest to the shortest; count: pieces of each length."""
    sequence, rooms = np.empty(count.sum(), np.int64), Rooms(seq_len)
    opened = at = 0
    for length in np.flatnonzero(count)[::-1].tolist():
        left = int(count[length])
        while left:
            room = rooms.least(length)
            # the sequence with the least room stays that as long as another piece fits into it
            each = (seq_len if room is None else room) // length
            wanted = -(-left // each)
            if room is None:
                room, chosen = seq_len, np.arange(opened, opened + wanted)
                opened += wanted
            else:
                chosen = rooms.take(room, wanted)
            placed = min(left, len(chosen) * each)
            sequence[at : at + placed] = np.repeat(chosen, each)[:placed]
            full, more = divmod(placed, each)
            rooms.put(room - each * length, chosen[:full])
            rooms.put(room - more * length, chosen[full:])
            at, left = at + placed, left - placed
    return sequence


class Rooms:
    """Sequences by the room that they have left; the least room of at least some length in two looks at bit words."""

    def __init__(self, seq_len: int):
        self._sequences: dict[int, list[np.ndarray]] = {}
        self._words = [0] * (seq_len // WORD_BITS + 1)
        self._any = 0  # bit w: word w is not 0

    def least(self, length: int) -> int | None:
        """Least room >= length of any sequence."""
        word, bit = divmod(length, WORD_BITS)
        here = self._words[word] >> bit
        if here:
            return length + _lowest(here)
        later = self._any >> word + 1
        if not later:
            return None
        word += 1 + _lowest(later)
        return word * WORD_BITS + _lowest(self._words[word])

    def put(self, room: int, sequences: np.ndarray) -> None:
        """Add sequences; full ones are forgotten."""
        if room and len(sequences):
            self._sequences.setdefault(room, []).append(sequences)
            self._words[room // WORD_BITS] |= 1 << room % WORD_BITS
            self._any |= 1 << room // WORD_BITS

    def take(self, room: int, most: int) -> np.ndarray:
        """Remove and return some sequences with this room."""
        kept = self._sequences[room]
        taken = kept.pop()
        if len(taken) > most:
            kept.append(taken[most:])
        if not kept:
            del self._sequences[room]
            word = room // WORD_BITS
            self._words[word] ^= 1 << room % WORD_BITS
            if not self._words[word]:
                self._any ^= 1 << word
        return taken[:most]


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _by_first(sequence: np.ndarray) -> np.ndarray:
    """The same sequences, numbered by their first pieces."""
    first = np.empty(sequence.max() + 1, np.int64)
    first[sequence[::-1]] = np.arange(len(sequence))[::-1]
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[sequence]
