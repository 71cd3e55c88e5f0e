import matplotlib.pyplot as plt
import numpy as np

import pda_numba
from pda_numba.data import real_heads
from pda_numba.theory import permutation_attention

figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
q, k, _, scale = real_heads("text")
for head, tail in enumerate(
    pda_numba.spectrum(q, k, scale=scale, rank=64, n_iter=1).tail
):
    panel.plot(tail, label=f"text head {head}")
q, k = permutation_attention(1500)
panel.plot(
    pda_numba.spectrum(q, k, rank=64).tail, "k--", label="close to a permutation"
)
panel.axhline(0.1, color="grey", lw=0.8)
panel.set(
    yscale="log",
    xlabel="rank",
    ylabel="error of the best approximation",
    xticks=np.arange(0, 65, 16),
)
panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
