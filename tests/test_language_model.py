"""The example of a language model: its file reader, its tokens, its forward pass, its tables. Nothing is downloaded."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gemma
import gguf_file
import language_model
from attend import options_of
from sentence_pieces import SentencePieces

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SHAPE = gemma.Shape(layers=6, heads=4, key_heads=1, head_dim=16, window=8, base=1e6, eps=1e-6)
WIDTH, INNER = 32, 48


# A writer of GGUF files and slow readers of single blocks, both by the format's description


def string(x):
    x = x.encode()
    return struct.pack("<Q", len(x)) + x


def value(x):
    """A typed value: bool, int, float, str, or a list of one of them."""
    kinds = {bool: (7, lambda y: struct.pack("<?", y)), int: (5, lambda y: struct.pack("<i", y))}
    kinds |= {float: (6, lambda y: struct.pack("<f", y)), str: (8, string)}
    if isinstance(x, list):
        kind, pack = kinds[type(x[0])]
        return struct.pack("<IIQ", 9, kind, len(x)) + b"".join(map(pack, x))
    kind, pack = kinds[type(x)]
    return struct.pack("<I", kind) + pack(x)


def write_gguf(path, metadata, tensors):
    """`tensors` by name: type, shape in C order, bytes."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(string(name) + value(x) for name, x in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)


def half(block, at):
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def signed(byte):
    return byte - 256 if byte > 127 else byte


def slow_32(kind, block):
    """A block of 32 numbers."""
    d, numbers = half(block, 0), [0.0] * 32
    if kind == 8:
        return [d * signed(x) for x in block[2:]]
    m = half(block, 2) if kind in (3, 7) else 0.0
    at = 4 if kind in (3, 7) else 2
    bits = int.from_bytes(block[at : at + 4], "little") if kind in (6, 7) else 0
    at += 4 if kind in (6, 7) else 0
    less = {2: 8, 3: 0, 6: 16, 7: 0}[kind]
    for j in range(16):
        low, high = block[at + j] & 15, block[at + j] >> 4
        numbers[j] = d * ((low | (bits >> j & 1) << 4) - less) + m
        numbers[j + 16] = d * ((high | (bits >> (j + 16) & 1) << 4) - less) + m
    return numbers


def slow_k4_k5(kind, block):
    """A block of 256 numbers with scales and minima of 6 bits."""
    d, least, packed = half(block, 0), half(block, 2), block[4:16]
    at, numbers = (48 if kind == 13 else 16), []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            byte = block[at + group // 2 * 32 + i]
            number = byte >> 4 if group % 2 else byte & 15
            if kind == 13:
                number += 16 * (block[16 + i] >> group & 1)
            numbers.append(d * scale * number - least * minimum)
    return numbers


def slow_k6(block):
    d, numbers = half(block, 208), [0.0] * 256
    for part in range(2):
        low, high = block[part * 64 : part * 64 + 64], block[128 + part * 32 : 160 + part * 32]
        scales = [signed(x) for x in block[192 + part * 8 : 200 + part * 8]]
        for i in range(32):
            four = low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4
            for j, number in enumerate(four):
                number |= (high[i] >> 2 * j & 3) << 4
                numbers[part * 128 + 32 * j + i] = d * scales[2 * j + i // 16] * (number - 32)
    return numbers


def slow(kind, block):
    if kind in (0, 1):
        return [float(x) for x in np.frombuffer(block, "<f4" if kind == 0 else "<f2")]
    return slow_k4_k5(kind, block) if kind in (12, 13) else slow_k6(block) if kind == 14 else slow_32(kind, block)


@pytest.mark.parametrize("kind", gguf_file.TYPES)
def test_every_type_of_tensor(kind, tmp_path, rng):
    numbers, size, _ = gguf_file.TYPES[kind]
    blocks = rng.integers(0, 256, (6, size), dtype=np.uint8)
    places = {0: [], 1: [], 2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}[kind]
    for at in places:
        blocks[:, at : at + 2] = rng.standard_normal(6).astype("<f2").view(np.uint8).reshape(6, 2)
    if kind in (0, 1):
        blocks = rng.standard_normal(6).astype("<f4" if kind == 0 else "<f2").view(np.uint8).reshape(6, size)
    tensors = {"first": (0, (3,), np.ones(3, "<f4").tobytes()), "x": (kind, (3, 2 * numbers), blocks.tobytes())}
    write_gguf(tmp_path / "x.gguf", {"general.name": "x"}, tensors)
    got = gguf_file.GGUF(tmp_path / "x.gguf").read("x")
    expected = np.array([slow(kind, block.tobytes()) for block in blocks]).reshape(3, 2 * numbers)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_metadata(tmp_path):
    metadata = {"a": True, "b": -3, "c": 0.5, "d": "word \N{SNOWMAN}", "e": [1, 2, 3], "f": ["x", "", "yz"]}
    write_gguf(tmp_path / "x.gguf", metadata, {})
    got = gguf_file.GGUF(tmp_path / "x.gguf").metadata
    assert got.keys() == metadata.keys()
    assert all(np.array_equal(got[name], x) for name, x in metadata.items())


def test_refuses_other_files(tmp_path):
    (tmp_path / "x").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match="no GGUF"):
        gguf_file.GGUF(tmp_path / "x")
    write_gguf(tmp_path / "y", {}, {"x": (30, (4,), bytes(64))})
    with pytest.raises(ValueError, match="type 30"):
        gguf_file.GGUF(tmp_path / "y").read("x")


# Tokens


WORDS = ["he", "ll", "hell", "o" + SPACE, "hello", SPACE + "w", "or", SPACE + "wor", "ld", "lo", "el", SPACE + "h"]
PIECES = ["<pad>", "<eos>", "<bos>", "\n\n", *(f"<0x{i:02X}>" for i in range(256)), *WORDS, *"helowrd123\n" + SPACE]
KINDS = [3, 3, 3, 4, *[6] * 256, *[1] * (len(PIECES) - 260)]


@pytest.fixture
def pieces():
    return SentencePieces(PIECES, [-float(i) for i in range(len(PIECES))], KINDS, bos=2)


def naively_merged(pieces, text):
    """Look at all pairs again after every merge."""
    parts = list(text)
    while True:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [i for i, pair in enumerate(pairs) if pair in pieces.mergeable]
        if not known:
            return parts
        best = max(known, key=lambda i: (pieces.scores[pieces.ids[pairs[i]]], -i))
        parts[best : best + 2] = [pairs[best]]


def test_merges_as_the_naive_rule(pieces, rng):
    for _ in range(200):
        text = "".join(rng.choice(list("helowrd12 "), rng.integers(1, 40)))
        got = [PIECES[i] for i in pieces.encode(text, bos=False)]
        assert got == naively_merged(pieces, text.replace(" ", SPACE))


def test_tokens(pieces):
    assert [PIECES[i] for i in pieces.encode("hello world")] == ["<bos>", "hell", "o" + SPACE, "w", "or", "ld"]
    assert [PIECES[i] for i in pieces.encode("o\n\n\nh", bos=False)] == ["o", "\n\n", "\n", "h"]
    assert [PIECES[i] for i in pieces.encode("\N{SNOWMAN}", bos=False)] == ["<0xE2>", "<0x98>", "<0x83>"]
    text = "hello\n\n \N{SNOWMAN} wörld 123"
    assert pieces.decode(pieces.encode(text)) == text


# The forward pass


def random_weights(rng):
    s, w = SHAPE, {}
    inner = s.heads * s.head_dim
    for i in range(s.layers):
        shapes = {"attn_q": (inner, WIDTH), "attn_k": (s.key_heads * s.head_dim, WIDTH), "attn_output": (WIDTH, inner)}
        shapes |= {"attn_v": shapes["attn_k"], "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
        shapes |= {"ffn_down": (WIDTH, INNER), "attn_q_norm": (s.head_dim,), "attn_k_norm": (s.head_dim,)}
        shapes |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (WIDTH,))
        for name, shape in shapes.items():
            w[f"blk.{i}.{name}.weight"] = rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.2)
            w[f"blk.{i}.{name}.weight"] += len(shape) == 1
    w["output_norm.weight"] = 1 + 0.2 * rng.standard_normal(WIDTH)
    w["token_embd.weight"] = 0.3 * rng.standard_normal((len(PIECES), WIDTH))
    return {name: x.astype(np.float32) for name, x in w.items()}


def plain_norm(x, gain):
    return x / np.sqrt(np.mean(x * x) + SHAPE.eps) * gain


def plain_turn(x, place, base):
    out, half = np.empty_like(x), len(x) // 2
    for i in range(half):
        angle = place * base ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def plain_forward(weights, tokens):
    """Logits after every token: one token, one head, one key after the other, in float64."""
    w, s = {name: x.astype(np.float64) for name, x in weights.items()}, SHAPE
    states = [w["token_embd.weight"][t] * np.sqrt(WIDTH) for t in tokens]
    for layer in range(s.layers):
        p = {name.split(".")[2]: x for name, x in w.items() if name.startswith(f"blk.{layer}.")}
        everywhere = layer == 5
        base = s.base if everywhere else 1e4
        keys, values = [], []
        for i, x in enumerate(states):
            y = plain_norm(x, p["attn_norm"])
            keys.append(plain_turn(plain_norm(p["attn_k"] @ y, p["attn_k_norm"]), i, base))
            values.append(p["attn_v"] @ y)
            out = []
            for q in (p["attn_q"] @ y).reshape(s.heads, s.head_dim):
                q = plain_turn(plain_norm(q, p["attn_q_norm"]), i, base)
                seen = [j for j in range(i + 1) if everywhere or i - j < s.window]
                e = np.array([np.exp(q @ keys[j] / np.sqrt(s.head_dim)) for j in seen])
                out.append(sum(a * values[j] for a, j in zip(e / e.sum(), seen, strict=True)))
            states[i] = x + plain_norm(p["attn_output"] @ np.concatenate(out), p["post_attention_norm"])
        for i, x in enumerate(states):
            y = plain_norm(x, p["ffn_norm"])
            gate = p["ffn_gate"] @ y
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            states[i] = x + plain_norm(p["ffn_down"] @ (gate * (p["ffn_up"] @ y)), p["post_ffw_norm"])
    return np.array([w["token_embd.weight"] @ plain_norm(x, w["output_norm.weight"]) for x in states])


def all_layers(model, tokens, attend):
    return model.through(model.embed(tokens), range(SHAPE.layers), attend)


def test_forward_pass(rng, monkeypatch):
    monkeypatch.setattr(gemma, "ROWS", 7)  # several passes through the matrices
    weights, tokens = random_weights(rng), rng.integers(0, len(PIECES), 37)
    model = gemma.Gemma(SHAPE, weights)
    expected = plain_forward(weights, tokens)
    x = all_layers(model, tokens, gemma.exact)
    np.testing.assert_allclose(model.scores(x), expected, rtol=1e-3, atol=1e-3)
    nats, likeliest = model.surprise(x[:-1], tokens[-9:], rows=4)
    log = expected - np.log(np.exp(expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(nats, -log[range(27, 36), tokens[-9:]], rtol=1e-3, atol=1e-4)
    assert likeliest.tolist() == (log[27:36].argmax(axis=1) == tokens[-9:]).tolist()


@pytest.mark.parametrize("tokens", [1, 8, 9, 40, 61])
def test_window(rng, tokens):
    q, k, v = (rng.standard_normal((h, tokens, 16), dtype=np.float32) for h in (4, 2, 2))
    offset = np.arange(tokens)[:, None] - np.arange(tokens)
    for got, width in ((gemma.banded(q, k, v, 0.3, 8), 8), (gemma.exact(q, k, v, 0.3, rows=16), tokens)):
        for h in range(4):
            scores = np.where((offset >= 0) & (offset < width), 0.3 * q[h] @ k[h // 2].T, -np.inf)
            e = np.exp(scores - scores.max(axis=1, keepdims=True))
            np.testing.assert_allclose(got[h], e / e.sum(axis=1, keepdims=True) @ v[h // 2], rtol=1e-4, atol=1e-5)


def test_streamed_attention_reads_the_same(rng):
    model, tokens = gemma.Gemma(SHAPE, random_weights(rng)), rng.integers(0, len(PIECES), 300)
    reader = language_model.Reader(model)
    exact, _, _ = reader.surprise("exact", tokens, 100)
    streamed, _, took = reader.surprise("streamed", tokens, 100)
    np.testing.assert_allclose(streamed, exact, rtol=1e-3, atol=1e-4)
    assert took["low_rank"] == "0 of 4"


# The commands


@pytest.fixture
def given(tmp_path, rng):
    """A folder with a tiny model, a text, and the options that name them."""
    metadata = {f"gemma3.{x}": v for x, v in {"block_count": 6, "rope.freq_base": 1e6}.items()}
    attention = {"head_count": 4, "head_count_kv": 1, "key_length": 16, "value_length": 16, "sliding_window": 8}
    attention |= {"layer_norm_rms_epsilon": 1e-6}
    metadata |= {f"gemma3.attention.{x}": v for x, v in attention.items()}
    about = {"tokens": PIECES, "scores": [-float(i) for i in range(len(PIECES))], "token_type": KINDS}
    metadata |= {f"tokenizer.ggml.{x}": v for x, v in {**about, "bos_token_id": 2}.items()}
    tensors = {name: (0, x.shape, x.tobytes()) for name, x in random_weights(rng).items()}
    write_gguf(tmp_path / "gemma-3-270m-q4_k_m.gguf", metadata, tensors)
    (tmp_path / "text.txt").write_text("".join(rng.choice(list("helowrd12 \n"), 2000)))
    return ["--models", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]


def test_perplexity(given, tmp_path):
    command = ["perplexity", "--tokens", "100,200", "--methods", "exact window", "--scored", "50", *given]
    result = CliRunner().invoke(language_model.main, command)
    assert result.exit_code == 0, result.output
    table = (tmp_path / "out" / "perplexity.md").read_text()
    assert table.count("| exact ") == table.count("| window ") == 2
    assert table.count("+0.0000") == table.count(" ± ") == 2
    lines = (tmp_path / "out" / "perplexity.jsonl").read_text()
    assert CliRunner().invoke(language_model.main, command).exit_code == 0  # nothing is computed again
    assert (tmp_path / "out" / "perplexity.jsonl").read_text() == lines
    result = CliRunner().invoke(language_model.main, ["perplexity", "--tokens", "5000", "--methods", "exact", *given])
    assert "too few" in result.output


def test_recall(given, tmp_path):
    command = ["recall", "--tokens", "300", "--methods", "exact window", "--depths", "0.2,0.8", "--seeds", "1", *given]
    result = CliRunner().invoke(language_model.main, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "recall.md").read_text().count(" of 2 ") == 2


def test_hidden_number(pieces):
    filler = pieces.encode("hello " * 300)
    text, answer = language_model.hidden_number(lambda x: pieces.encode(x, bos=False), filler, 400, 0.25, 3)
    written = pieces.decode(text)
    number = pieces.decode(text[-answer:]).strip()
    assert len(text) == 401
    assert len(number) == 5
    assert written.endswith(language_model.QUESTION + " " + number)
    assert written.index(language_model.NEEDLE.format(number)) < len(written) / 2
    other, _ = language_model.hidden_number(lambda x: pieces.encode(x, bos=False), filler, 400, 0.25, 4)
    assert not np.array_equal(text, other)


def test_options_of():
    assert options_of("streamed") == {"method": "exact"}
    assert options_of("tol=0.1") == {"tol": 0.1}
    assert options_of("rank=64,seed=3") == {"rank": 64, "seed": 3}
