"""Text to tokens and back, as SentencePiece's byte-pair models do it, from the vocabulary that a GGUF file carries."""

import heapq
import re

import numpy as np

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how these vocabularies write a blank
ORDINARY, USER_DEFINED, BYTE = 1, 4, 6


class SentencePieces:
    """A vocabulary: pieces, the scores by which they are merged (larger first), and what kind each one is."""

    def __init__(self, pieces, scores, kinds, bos=None):
        self.pieces, self.scores, self.kinds, self.bos = list(pieces), list(scores), list(kinds), bos
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.mergeable = {x: i for x, i in self.ids.items() if kinds[i] in (ORDINARY, USER_DEFINED)}
        self.bytes = {int(x[1:-1], 16): i for x, i in self.ids.items() if kinds[i] == BYTE}  # "<0x41>"
        whole = sorted((x for x, i in self.ids.items() if kinds[i] == USER_DEFINED), key=len, reverse=True)
        self.whole = re.compile("(" + "|".join(map(re.escape, whole)) + ")") if whole else None

    @classmethod
    def from_gguf(cls, file):
        about = {name: file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")}
        bos = file.metadata["tokenizer.ggml.bos_token_id"]
        return cls(about["tokens"], about["scores"].tolist(), about["token_type"].tolist(), bos)

    def encode(self, text, bos=True):
        """Token ids, an array; pieces that the vocabulary wants whole, such as several line ends, come first."""
        ids = [self.bos] if bos and self.bos is not None else []
        text = text.replace(" ", SPACE)
        for part in self.whole.split(text) if self.whole else [text]:
            if self.whole and self.whole.fullmatch(part):
                ids.append(self.ids[part])
            elif part:
                ids.extend(self._merged(part))
        return np.array(ids, dtype=np.int64)

    def decode(self, ids):
        """Text; bytes that make no character become the replacement sign."""
        data = bytearray()
        for i in ids:
            if self.kinds[i] == BYTE:
                data.append(int(self.pieces[i][1:-1], 16))
            elif self.kinds[i] in (ORDINARY, USER_DEFINED):
                data.extend(self.pieces[i].replace(SPACE, " ").encode("utf-8"))
        return data.decode("utf-8", errors="replace")

    def _merged(self, text):
        """Merge neighbours, the best score first and the leftmost among equals, until no pair is a piece."""
        pieces = list(text)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        heap = []

        def offer(left):
            right = after[left]
            which = self.mergeable.get(pieces[left] + pieces[right]) if right >= 0 else None
            if which is not None:
                heapq.heappush(heap, (-self.scores[which], left, right, pieces[left], pieces[right]))

        for left in range(len(pieces)):
            offer(left)
        while heap:
            _, left, right, *seen = heapq.heappop(heap)
            if [pieces[left], pieces[right]] != seen or after[left] != right:
                continue  # one of the two has been merged with another since
            pieces[left] += pieces[right]
            pieces[right], after[left] = "", after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(left)
            if before[left] >= 0:
                offer(before[left])
        return [i for piece in pieces if piece for i in self._known(piece)]

    def _known(self, piece):
        if piece in self.mergeable:
            return [self.mergeable[piece]]
        return [self.bytes[x] for x in piece.encode("utf-8")]
