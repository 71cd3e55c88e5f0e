import matplotlib.pyplot as plt
import numpy as np

import pda_numba
from pda_numba.data import real_heads

figure, panel = plt.subplots(figsize=(5, 4), layout="constrained")
for name, marker in ("text", "o"), ("speech", "s"):
    q, k, v, scale = real_heads(name)
    exact = pda_numba.attention(q, k, v, scale=scale, method="exact")
    for rank, colour in (32, "tab:blue"), (64, "tab:orange"), (128, "tab:green"):
        out, info = pda_numba.attention(
            q, k, v, scale=scale, method="pda", rank=rank, tol=None, return_info=True
        )
        true = np.linalg.norm(out - exact, axis=(1, 2)) / np.linalg.norm(
            exact, axis=(1, 2)
        )
        panel.vlines(true, info.error, info.error_limit, color=colour, alpha=0.5)
        panel.plot(true, info.error, marker, color=colour, label=f"{name}, rank {rank}")
ends = [3e-4, 0.5]
panel.plot(ends, ends, color="grey", lw=1)
panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
panel.set(xlabel="true error", ylabel="claimed error, line to its 95 % limit")
panel.legend(fontsize=8)
