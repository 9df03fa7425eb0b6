"""Text out of the ids of another tokenizer, for corpora that are published tokenised.

    ids  ->  without control tokens  ->  text  ->  ids of this run's tokenizer
                     └ text encodes to the same ids? else the document is named in the manifest, and kept

Ids that came from text come back. A sequence that was cut inside a character or a word may not, nor may one whose
tokenizer normalises text: its text is then the nearest there is.
"""

import numpy as np

from mtraining_nns.data import tokenizer
from mtraining_nns.errors import UserError


class SourceTokenizer:
    """Decodes the ids of the tokenizer in a folder or of a HuggingFace name."""

    def __init__(self, path_or_name: str):
        self.name = path_or_name
        self._tokenizer = tokenizer.load(path_or_name)
        self._encoder = tokenizer.Encoder(self._tokenizer)
        self.fingerprint = tokenizer.fingerprint(self._tokenizer)

    def decode(self, ids: np.ndarray, name: str) -> tuple[str, bool]:
        """Text of the ids [n] of the document `name`, and whether it encodes to them again, control tokens apart.

        UserError for an id beyond the vocabulary: then another tokenizer made the ids.
        """
        size = self._encoder.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise UserError(
                f"{name} has ids {ids.min()} to {ids.max()}, the vocabulary of {self.name} has {size}; give the"
                " tokenizer that made them as --source-tokenizer"
            )
        ids = self._encoder.without_control_tokens(ids)
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        (again,) = self._encoder.encode([text])
        return text, np.array_equal(again, ids)
