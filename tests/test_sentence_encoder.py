"""The example of a sentence encoder: its file reader, its tokens, its forward pass, its table; nothing is fetched."""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fetch_models
import minilm
import safetensors_file
import sentence_encoder
from word_pieces import WordPieces, words

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##want", "##ed", "runn", "##ing", ",", "low", "##er", "cafe", "!"]
WIDTH, INNER, KNOWN = 24, 40, 16


def write_safetensors(path, tensors):
    """`tensors` by name: dtype in the format's words, array."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_reads_safetensors(tmp_path, rng):
    x = rng.standard_normal((3, 4)).astype("<f4")
    short = (x.view("<u4") >> 16).astype("<u2")
    write_safetensors(tmp_path / "x", {"a": ("F32", x), "b": ("F16", x.astype("<f2")), "c": ("BF16", short)})
    got = safetensors_file.read(tmp_path / "x")
    assert list(got) == ["a", "b", "c"]
    np.testing.assert_array_equal(got["a"], x)
    np.testing.assert_array_equal(got["b"], x.astype("<f2"))
    np.testing.assert_allclose(got["c"], x, rtol=2**-7)


def test_tokens():
    pieces = WordPieces(PIECES)
    found = [PIECES[i] for i in pieces.encode("UNwanted running, LOWER Café! unrunn")]
    expected = ["[CLS]", "un", "##want", "##ed", "runn", "##ing", ",", "low", "##er", "cafe", "!", "[UNK]", "[SEP]"]
    assert found == expected
    assert words("a\u4e2db \u201cx\u201d") == ["a", "\u4e2d", "b", "\u201c", "x", "\u201d"]


def random_weights(rng):
    w = {f"embeddings.{name}_embeddings.weight": (n, WIDTH) for name, n in (("position", KNOWN), ("token_type", 2))}
    w |= {"embeddings.word_embeddings.weight": (len(PIECES), WIDTH)}
    norms = ["embeddings"]
    for i in range(2):
        layer = f"encoder.layer.{i}"
        dense = {f"attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
        dense |= {"attention.output.dense": (WIDTH, WIDTH), "intermediate.dense": (INNER, WIDTH)}
        dense |= {"output.dense": (WIDTH, INNER)}
        w |= {f"{layer}.{name}.weight": shape for name, shape in dense.items()}
        w |= {f"{layer}.{name}.bias": shape[:1] for name, shape in dense.items()}
        norms += [f"{layer}.attention.output", f"{layer}.output"]
    w |= {f"{name}.LayerNorm.{part}": (WIDTH,) for name in norms for part in ("weight", "bias")}
    return {name: (0.5 * rng.standard_normal(shape)).astype("<f4") for name, shape in w.items()}


def plain_embedding(weights, tokens, heads):
    """One text, one token and one head after the other, in float64."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}

    def normed(x, name):
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-12)
        return x * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    def dense(x, name):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    states = []
    for i, token in enumerate(tokens):
        at = i * (KNOWN - 1) / (len(tokens) - 1) if len(tokens) > KNOWN else i
        known = w["embeddings.position_embeddings.weight"]
        place = [np.interp(at, np.arange(KNOWN), known[:, j]) for j in range(WIDTH)]
        kind = w["embeddings.token_type_embeddings.weight"][0]
        states.append(normed(w["embeddings.word_embeddings.weight"][token] + place + kind, "embeddings"))
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = ([dense(x, f"{layer}.attention.self.{y}") for x in states] for y in ("query", "key", "value"))
        size = WIDTH // heads
        for i, x in enumerate(list(states)):
            out = np.empty(WIDTH)
            for h in (slice(at, at + size) for at in range(0, WIDTH, size)):
                e = np.array([np.exp(q[i][h] @ key[h] / np.sqrt(size)) for key in k])
                out[h] = sum(a * value[h] for a, value in zip(e / e.sum(), v, strict=True))
            x = normed(x + dense(out, f"{layer}.attention.output.dense"), f"{layer}.attention.output")
            inside = [0.5 * y * (1 + math.erf(y / math.sqrt(2))) for y in dense(x, f"{layer}.intermediate.dense")]
            states[i] = normed(x + dense(np.array(inside), f"{layer}.output.dense"), f"{layer}.output")
    mean = np.mean(states, axis=0)
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("tokens", [5, 16, 29])
def test_forward_pass(rng, tokens):
    weights, ids = random_weights(rng), rng.integers(0, len(PIECES), tokens)
    model = minilm.MiniLM(weights, heads=3)
    got = model.embed(ids[None], [tokens], minilm.exact)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[0], plain_embedding(weights, ids, 3), rtol=1e-3, atol=1e-4)


def test_padding_changes_nothing(rng):
    model = minilm.MiniLM(random_weights(rng), heads=3)
    texts = [rng.integers(0, len(PIECES), n) for n in (30, 7, 18)]
    tokens, lengths = sentence_encoder.padded(texts)
    for attend in (minilm.exact, minilm.average):
        together = model.embed(tokens, lengths, attend, key_lengths=lengths)
        alone = [model.embed(ids[None], [len(ids)], attend)[0] for ids in texts]
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_pda_embeds_the_same(rng):
    model, ids = minilm.MiniLM(random_weights(rng), heads=3), rng.integers(0, len(PIECES), 300)
    exact = model.embed(ids[None], [300], minilm.exact)
    for method in ("streamed", "tol=0.01", "rank=24"):
        got = model.embed(ids[None], [300], sentence_encoder.attend_by(method))
        assert np.sum(got * exact) > 0.999


def test_command(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(minilm, "HEADS", 3)
    monkeypatch.setattr(minilm.MiniLM.__init__, "__defaults__", (3,))
    folder = tmp_path / fetch_models.MINILM / "model"
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", {name: ("F32", x) for name, x in random_weights(rng).items()})
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["unwanted", "running", "lower", "cafe!"], 2000)))
    command = ["--out", str(tmp_path / "out"), "--models", str(tmp_path), "--text", str(tmp_path / "text.txt")]
    command += ["--texts", "2", "--tokens", "200", "--methods", "exact;average;first 512;streamed"]
    result = CliRunner().invoke(sentence_encoder.main, command)
    assert result.exit_code == 0, result.output
    table = (tmp_path / "out" / "encoder.md").read_text()
    row = next(line for line in table.splitlines() if line.startswith("| streamed"))
    assert float(row.split("|")[2]) > 0.9999
