"""Words, numbers and identifiers that tasks hide and ask for; drawn by a seeded generator, each once."""

import functools
import random
import uuid
from collections.abc import Iterator

import wonderwords


@functools.cache
def words() -> tuple[list[str], list[str]]:
    """(adjectives, nouns): plain lower-case English words."""
    lists = wonderwords.RandomWord()
    found = (lists.filter(include_parts_of_speech=[part]) for part in ("adjectives", "nouns"))
    adjectives, nouns = (
        sorted({word for word in part if word.isascii() and word.islower() and word.isalpha()}) for part in found
    )
    return adjectives, nouns


def pairs(rng: random.Random) -> Iterator[str]:
    """Adjective-noun pairs in random order, such as calm-harbour."""
    adjectives, nouns = words()
    return _once(lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}")


def single_words(rng: random.Random) -> Iterator[str]:
    """Words in random order; pairs once there are no more."""
    plain = sorted({*words()[0], *words()[1]})
    rng.shuffle(plain)
    yield from plain
    yield from pairs(rng)


def numbers(rng: random.Random, digits: int = 7) -> Iterator[str]:
    """Numbers of so many digits."""
    return _once(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Identifiers of 32 hexadecimal digits."""
    return _once(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def letters(rng: random.Random, length: int, alphabet: str) -> Iterator[str]:
    """Words of random letters."""
    return _once(lambda: "".join(rng.choice(alphabet) for _ in range(length)))


def _once(draw) -> Iterator[str]:
    seen = set()
    while True:
        word = draw()
        if word not in seen:
            seen.add(word)
            yield word
