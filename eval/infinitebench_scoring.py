"""InfiniteBench's metrics: each compares one answer with its references and gives a share of 1.

first_digits    passkey, number_string    the first digits of the answer are the reference
word            kv_retrieval              the reference is a word of the answer
last_number     code_run                  the last word of the answer is the reference
stated_choice   code_debug                the answer begins with the right option, or states it
choice          longbook_choice_eng       the same, or the first letter of an option in the answer is the right one
first_number    math_find                 the first number of the answer is the reference
leading_values  math_calc                 share of the values that come before the first wrong one
name            longdialogue_qa_eng       the answer holds one of the names
f1              longbook_qa_eng           F1 of words, of the closest reference
f1_characters   longbook_qa_chn           F1 of characters, of the closest reference
rouge_lsum      longbook_sum_eng          ROUGE-Lsum, of the closest reference

Source: src/compute_scores.py of github.com/OpenBMB/InfiniteBench, commit 88b3daa. docs/evaluation.md lists where these
differ on purpose.
"""

import re
import string
from collections import Counter
from itertools import takewhile

from mtraining_nns.errors import UserError

BLANKS = r"[\s:\"'.,?!{}]+"  # what separates words of JSON and of sentences
OPENING_LETTER = r"\(?([ABCD])([.:)\n]|$)"
ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The official list, which lacks 〈, 〉, 《 and ．
CHINESE_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~–—‘’‛“”„‟…‧、-〃》-】〔-〟〰〾〿﹏！-－／：-＠［-｀｛-､]")


def first_digits(answer: str, references: list[str]) -> float:
    """1.0 if the first run of digits is the reference.

    >>> first_digits("The pass key is 71432, not 9.", ["71432"])
    1.0
    """
    return float(re.findall("[0-9]+", answer)[:1] == references[:1])


def word(answer: str, references: list[str]) -> float:
    """1.0 if the reference is a word, with what punctuates JSON and sentences as blanks.

    >>> word('{"key": "c14c-b8ba"}', ["c14c-b8ba"])
    1.0
    """
    return float(references[0] in re.split(BLANKS, answer))


def last_number(answer: str, references: list[str]) -> float:
    """1.0 if the last word is the reference, a whole number; quotes, dots and colons are blanks.

    >>> last_number("It calls func_2(3), so it returns `-1`.", ["-1"])
    1.0
    """
    last = re.sub(r"[.`'\":]", " ", answer).split()[-1:]
    whole = bool(last) and re.fullmatch("[+-]?[0-9]+", last[0]) is not None
    return float(whole and _plain(last[0]) == _plain(references[0]))


def first_number(answer: str, references: list[str]) -> float:
    """1.0 if the first number, decimal or not, equals the reference.

    >>> first_number("49, or 50", ["49.0"])
    1.0
    """
    found = re.search(r"[0-9]+(\.[0-9]+)?", answer)
    return float(found is not None and float(found[0]) == float(references[0]))


def leading_values(answer: str, references: list[str]) -> float:
    """Share of the references that the answer's numbers repeat before the first difference. Signs do not count.

    >>> leading_values("[4, 8, 5, 1]", ["4", "8", "6", "1"])
    0.5
    """
    pairs = zip(map(_plain, re.findall("[0-9]+", answer)), map(_plain, references))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(references)


def _plain(number: str) -> str:
    """A whole number without plus and leading zeros. Not an int, which Python refuses to make of 4,301 digits.

    >>> _plain("+007"), _plain("-0")
    ('7', '0')
    """
    digits = number.lstrip("+-0") or "0"
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits


def name(answer: str, references: list[str]) -> float:
    """1.0 if one of the names occurs as whole words, in any case.

    >>> name("It is Jonah King!", ["JONAH KING"])
    1.0
    """
    text, *names = (f" {' '.join(re.split(BLANKS, one.upper()))} " for one in (answer, *references))
    return float(any(one in text for one in names))


def choice(answer: str, references: list[str]) -> float:
    """1.0 if the option is right that the answer begins with, else states, else names first by its letter.

    >>> choice("C. Snowfield", ["Snowfield", "C"]), choice("Based on the book, I would say C", ["Snowfield", "C"])
    (1.0, 1.0)
    """
    letter, answer = references[1], answer.strip()
    first = re.match(OPENING_LETTER, answer)
    if first is not None or answer == references[0]:
        return float(first is None or first[1] == letter)
    stated = _stated(answer, references, ("answer is:", "answer:", "answer is", "option is"))
    return float(re.findall(r"\b[ABCD]\b", answer)[:1] == [letter] if stated is None else stated)


def stated_choice(answer: str, references: list[str]) -> float:
    """1.0 if the answer begins with the letter of the right option or states it after a phrase such as `answer is:`.

    >>> stated_choice("D. _parser", ["_parser", "D"]), stated_choice("The faulty one is: `_parser`.", ["_parser", "D"])
    (1.0, 1.0)
    """
    first = re.match(OPENING_LETTER, answer.strip())
    begins = first is not None and first[1] == references[1]
    return float(begins or bool(_stated(answer, references, ("answer is:", "is:", "answer:"))))


def _stated(answer: str, references: list[str], phrases: tuple[str, ...]) -> bool | None:
    """Whether the right option, text or letter, follows the first of these phrases that occurs; None if none does."""
    rest = next((answer.partition(phrase)[2] for phrase in phrases if phrase in answer), None)
    if rest is None:
        return None
    text, letter = map(re.escape, references)
    return re.match(rf"\W*([Oo]ption\s+)?({letter}\b|{text})", rest) is not None


def f1(answer: str, references: list[str]) -> float:
    """F1 of words without case, punctuation and articles (SQuAD's), of the closest reference.

    >>> f1("The stockings, brown", ["stockings", "a hat"])
    0.6666666666666666
    """
    return max(_f1(_words(answer), _words(reference)) for reference in references)


def f1_characters(answer: str, references: list[str]) -> float:
    """F1 of characters without case, blanks and punctuation, of the closest reference.

    >>> f1_characters("胡一刀。", ["胡一刀，马行空"])
    0.6666666666666666
    """
    return max(_f1(_characters(answer), _characters(reference)) for reference in references)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(ASCII_PUNCTUATION)).split()


def _characters(text: str) -> str:
    return "".join(CHINESE_PUNCTUATION.sub("", text.lower()).split())


def _f1(answer, reference) -> float:
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def rouge_lsum(answer: str, references: list[str]) -> float:
    """F-measure of ROUGE-Lsum without stemming, of the closest reference: what the package evaluate calls rougeLsum."""
    return rouge().score_multi(references, answer)["rougeLsum"].fmeasure


def rouge():
    """The scorer of the package rouge-score; UserError if it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            "longbook_sum_eng is scored by rouge-score, which is not installed;"
            " pip install 'mtraining-nns[infinitebench]', or name other --tasks"
        ) from error
    return RougeScorer(["rougeLsum"])


METRICS = {
    metric.__name__: metric
    for metric in (
        first_digits,
        word,
        last_number,
        first_number,
        leading_values,
        name,
        choice,
        stated_choice,
        f1,
        f1_characters,
        rouge_lsum,
    )
}
