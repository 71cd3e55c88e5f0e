import matplotlib.pyplot as plt

import pda_numba
from pda_numba.data import real_heads

q, k, _, scale = real_heads("text")
q, k = q[[0, 4, 5]], k[[0, 4, 5]]

figure, panel = plt.subplots(figsize=(5, 3.6), layout="constrained")
best = pda_numba.spectrum(q, k, scale=scale, rank=64)  # in quadratic time
ranks = 8, 16, 32, 64
made = [
    pda_numba.factorize(q, k, scale=scale, rank=rank) for rank in ranks
]  # in linear time
for i, head in enumerate((0, 4, 5)):
    (line,) = panel.plot(range(1, 65), best.tail[i, 1:], label=f"text head {head}")
    error, limit = (
        [getattr(f, name)[i] for f in made] for name in ("error", "error_limit")
    )
    panel.plot(ranks, error, "o", color=line.get_color())
    panel.vlines(ranks, error, limit, color=line.get_color())
panel.set(
    xlabel="rank", ylabel="relative error of the matrix", xscale="log", yscale="log"
)
panel.set_xticks(ranks, ranks)
panel.set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["5 %", "10 %", "20 %", "50 %", "100 %"])
panel.minorticks_off()
panel.legend(fontsize=8)
