"""How the tiles of `kernels.tile` lie in shared memory and in registers, and how they get there from global memory.

Rows of a tile are shifted by `swizzle` so that neither the transposing writes nor the reads of four numbers at a time
meet in a bank.
"""

from numba.extending import overload

from .._jit import device_body
from .scalar import widen

THREADS = 64  # threads of a block, and queries of its panel
KEYS_PER_THREAD = 4  # keys of a thread's block of scores
CHUNK = 16  # columns of the keys per buffer

_STEP = 8  # how far the swizzle shifts the next group of rows

# --- elements of tiles: without the check for a negative index, and four at once ---


def load(array, i, j):
    """array[i, j] for i, j >= 0."""
    return array[i, j]


def store(array, i, j, x):
    """array[i, j] = x for i, j >= 0."""
    array[i, j] = x


def load4(array, i, j):
    """array[i, j : j + 4] as one load; the address must be a multiple of the four numbers' size."""
    return array[i, j], array[i, j + 1], array[i, j + 2], array[i, j + 3]


def store4(array, i, j, x, y, z, w):
    """array[i, j : j + 4] = x, y, z, w as one store."""
    array[i, j], array[i, j + 1], array[i, j + 2], array[i, j + 3] = x, y, z, w


@overload(load, target="cuda")
def _load_cuda(array, i, j):
    from .vector import load

    return lambda array, i, j: load(array, i, j)


@overload(store, target="cuda")
def _store_cuda(array, i, j, x):
    from .vector import store

    return lambda array, i, j, x: store(array, i, j, x)


@overload(load4, target="cuda")
def _load4_cuda(array, i, j):
    from .vector import load4

    return lambda array, i, j: load4(array, i, j)


@overload(store4, target="cuda")
def _store4_cuda(array, i, j, x, y, z, w):
    from .vector import store4

    return lambda array, i, j, x, y, z, w: store4(array, i, j, x, y, z, w)


# --- places ---


@device_body
def block_column(t, a):
    """Where thread t's block lies among the tile's keys (or value columns): in units of a group of four."""
    return t // 2 % a


@device_body
def block_row(t, a):
    """Where it lies among the queries. Neighbours in a warp share keys, or queries: both loads are then broadcasts."""
    return t // (2 * a) * 2 + t % 2


@device_body
def block_key(x, t, a):
    """Which key (or value column) of the tile is the x-th of thread t's block."""
    return (block_column(t, a) + x // 4 * a) * 4 + x % 4


@device_body
def block_query(y, t, a):
    """Which query is the y-th of thread t's block."""
    return (block_row(t, a) + y // 4 * (THREADS // a)) * 4 + y % 4


@device_body
def swizzle(group, column, width):
    """Where the rows 4 group .. 4 group + 3 of a shared tile keep a column; four neighbours stay together."""
    return column ^ ((group * _STEP) & (width - 1) & 31)


# --- from global memory ---


@device_body
def fetch(piece, source, first, stop, column, across, t, vector):
    """This thread's part of a chunk of `source` from (first, column) on: `across` groups of four to a row."""
    zero = piece.dtype.type(0)
    for i in range(piece.shape[0] // 4):
        row = first + t // across + THREADS // across * i
        start = column + t % across * 4
        if vector and row < stop and start + 4 <= source.shape[1]:
            x, y, z, w = load4(source, row, start)
            piece[4 * i], piece[4 * i + 1], piece[4 * i + 2], piece[4 * i + 3] = widen(x), widen(y), widen(z), widen(w)
        else:
            for c in range(4):
                inside = row < stop and start + c < source.shape[1]
                piece[4 * i + c] = widen(source[row, start + c]) if inside else zero


@device_body
def put_keys(buffers, current, piece, t, a):
    """A fetched chunk of keys into a buffer, transposed; a row of the buffer holds `fold` columns of the keys."""
    keys, fold, group = a * KEYS_PER_THREAD, a // KEYS_PER_THREAD, t % 4
    row = current * (buffers.shape[0] // 2) + 4 // fold * group
    for i in range(piece.shape[0] // 4):
        place = swizzle(group, t // 4 + THREADS // 4 * i, keys)
        for c in range(4):
            store(buffers, row + c // fold, place + c % fold * keys, piece[4 * i + c])


@device_body
def clean_piece(piece):
    """0 for what is not finite."""
    zero = piece.dtype.type(0)
    for i in range(piece.shape[0]):
        piece[i] = piece[i] if piece[i] - piece[i] == zero else zero


@device_body
def put_values(buffers, current, piece, t, a):
    """A fetched chunk of values into a buffer, as it is."""
    across = a * a // 4
    for i in range(piece.shape[0] // 4):
        row = current * (buffers.shape[0] // 2) + t // across + THREADS // across * i
        store4(buffers, row, t % across * 4, piece[4 * i], piece[4 * i + 1], piece[4 * i + 2], piece[4 * i + 3])


@device_body
def stage_queries(queries, q, row, first, factor, t, vector):
    """The columns from `first` on of the thread's own query, times `factor`; zero beyond its end."""
    zero = queries.dtype.type(0)
    for d in range(0, min(queries.shape[0], (q.shape[1] - first + CHUNK - 1) // CHUNK * CHUNK), 4):
        place = swizzle(d // 4, t, THREADS)
        start = first + d
        if vector and start + 4 <= q.shape[1]:
            x, y, z, w = load4(q, row, start)
            store(queries, d, place, widen(x) * factor)
            store(queries, d + 1, place, widen(y) * factor)
            store(queries, d + 2, place, widen(z) * factor)
            store(queries, d + 3, place, widen(w) * factor)
        else:
            for c in range(4):
                value = widen(q[row, start + c]) * factor if start + c < q.shape[1] else zero
                store(queries, d + c, place, value)


@device_body
def stage_columns(queries, columns, i, first, t):
    """The same for query i of `columns (depth, queries)`: transposed, and already multiplied by the factor."""
    zero = queries.dtype.type(0)
    for d in range(0, min(queries.shape[0], (columns.shape[0] - first + CHUNK - 1) // CHUNK * CHUNK)):
        value = columns[first + d, i] if first + d < columns.shape[0] else zero
        store(queries, d, swizzle(d // 4, t, THREADS), value)
