"""Read GGUF files, the format of llama.cpp's models: metadata, and tensors as float32, in NumPy alone.

A file is a header, key-value pairs, a table of tensors, and their data, each tensor aligned. Most matrices are stored
in blocks of 32 or 256 numbers with a common scale; the formulas are those of
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.
"""

import math
from collections import namedtuple

import numpy as np

SCALARS = dict(enumerate(["u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"])) | {10: "u8", 11: "i8", 12: "f8"}
STRING, ARRAY = 8, 9

Tensor = namedtuple("Tensor", "type shape at")


class GGUF:
    """The file at `path`: `metadata`, a dictionary, and `tensors`, from names to types, shapes and places.

    The file is mapped into memory: a tensor costs nothing until it is read.
    """

    def __init__(self, path):
        self.data = np.memmap(path, mode="r", dtype=np.uint8)
        self.at = 0
        magic, version = self._take(4).tobytes(), self._scalar("u4")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        tensors, pairs = self._scalar("u8"), self._scalar("u8")
        self.metadata = {self._string(): self._value(self._scalar("u4")) for _ in range(pairs)}
        table = [self._entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        self.tensors = {name: Tensor(kind, shape, start + at) for name, kind, shape, at in table}

    def read(self, name):
        """A tensor as float32, in C order: the file's first axis, which runs fastest, is the last one."""
        kind, shape, at = self.tensors[name]
        if kind not in TYPES:
            raise ValueError(f"tensor {name} has type {kind}, which is not among those read here, {sorted(TYPES)}")
        numbers, size, decode = TYPES[kind]
        blocks = math.prod(shape) // numbers
        return decode(self.data[at : at + blocks * size].reshape(blocks, size)).reshape(shape)

    def _take(self, size):
        self.at += size
        return self.data[self.at - size : self.at]

    def _scalar(self, dtype):
        return self._take(np.dtype(dtype).itemsize).view("<" + dtype if dtype != "?" else dtype)[0].item()

    def _string(self):
        return self._take(self._scalar("u8")).tobytes().decode("utf-8", errors="replace")

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(SCALARS[kind])
        kind, count = self._scalar("u4"), self._scalar("u8")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return self._take(count * dtype.itemsize).view(dtype)
        return [self._value(kind) for _ in range(count)]

    def _entry(self):
        name = self._string()
        shape = tuple(self._scalar("u8") for _ in range(self._scalar("u4")))[::-1]
        kind = self._scalar("u4")
        return name, kind, shape, self._scalar("u8")


def half(blocks, at):
    """The float16 number at byte `at` of every block, as a column of float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def nibbles(packed):
    """Low halves of the bytes, then high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def plain(dtype):
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def q4_0(blocks):
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks):
    return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)


def fifth_bit(blocks, at):
    """Bits 0 to 31 of the word at byte `at`, each as 16 or 0."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def q5_0(blocks):
    return half(blocks, 0) * ((nibbles(blocks[:, 6:]) | fifth_bit(blocks, 2)).astype(np.float32) - 16)


def q5_1(blocks):
    return half(blocks, 0) * (nibbles(blocks[:, 8:]) | fifth_bit(blocks, 4)) + half(blocks, 2)


def q8_0(blocks):
    return half(blocks, 0) * blocks[:, 2:].view(np.int8)


def scales_and_minima(packed):
    """Eight scales and eight minima of 6 bits each, in 12 bytes, times the block's two common factors."""
    d, least, packed = half(packed, 0), half(packed, 2), packed[:, 4:16]
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return (d * scales)[:, :, None], (least * minima)[:, :, None]


def q4_k(blocks):
    scales, minima = scales_and_minima(blocks)
    numbers = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scales * numbers - minima


def q5_k(blocks):
    scales, minima = scales_and_minima(blocks)
    numbers = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return scales * (numbers | high << 4) - minima


def q6_k(blocks):
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = (low | high << 4).astype(np.float32) - 32
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scales[:, :, None] * numbers.reshape(-1, 16, 16)


# By the file's numbers of types: how many numbers a block holds, its bytes, and how it is read.
TYPES = {
    0: (1, 4, plain("<f4")),
    1: (1, 2, plain("<f2")),
    2: (32, 18, q4_0),
    3: (32, 20, q4_1),
    6: (32, 22, q5_0),
    7: (32, 24, q5_1),
    8: (32, 34, q8_0),
    12: (256, 144, q4_k),
    13: (256, 176, q5_k),
    14: (256, 210, q6_k),
}
