"""What a fresh process pays: the import, and the first call with the kernels cached on disk."""

_ARRAYS = "import numpy as np; q, k, v = np.random.default_rng(0).standard_normal((3, 4096, 64), np.float32)"


class Startup:
    def timeraw_import(self):
        return "import pda_numba"

    def timeraw_first_call(self):
        return "import pda_numba; pda_numba.attention(q, k, v)", _ARRAYS
