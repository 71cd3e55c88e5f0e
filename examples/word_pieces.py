"""Text to tokens as BERT's lower-case models do it: words and punctuation, then the longest pieces that are known."""

import re
import unicodedata

import numpy as np


class WordPieces:
    def __init__(self, pieces):
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.known = {}

    def encode(self, text):
        """Token ids between [CLS] and [SEP], an array."""
        ids = [self.ids["[CLS]"]]
        for word in words(text):
            if word not in self.known:
                self.known[word] = self._pieces(word)
            ids += self.known[word]
        return np.array([*ids, self.ids["[SEP]"]], dtype=np.int64)

    def _pieces(self, word):
        found, at = [], 0
        while at < len(word) <= 100:
            lead = "##" if at else ""
            end = next((end for end in range(len(word), at, -1) if lead + word[at:end] in self.ids), None)
            if end is None:
                break
            found.append(self.ids[lead + word[at:end]])
            at = end
        return found if at == len(word) else [self.ids["[UNK]"]]


def words(text):
    """Lower case without accents; punctuation and Chinese characters stand alone."""
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(_spaced(c) for c in text if unicodedata.category(c) not in ("Mn", "Cc", "Cf") or c.isspace())
    return text.split()


def _spaced(c):
    ascii_sign = c.isascii() and re.match(r"[!-/:-@\[-`{-~]", c)
    alone = ascii_sign or unicodedata.category(c).startswith("P") or "\u4e00" <= c <= "\u9fff"
    return f" {c} " if alone else c
