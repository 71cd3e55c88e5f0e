import matplotlib.pyplot as plt
import numpy as np

import pda_numba
from pda_numba.data import real_heads

figure, panels = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
for panel, name in zip(panels, ("text", "speech"), strict=True):
    q, k, v, scale = real_heads(name)
    exact = pda_numba.attention(q, k, v, scale=scale, method="exact")
    for i, near in enumerate(("none", "window", "content", "both")):
        out = pda_numba.attention(
            q, k, v, scale=scale, method="pda", rank=64, tol=None, near=near
        )
        error = np.linalg.norm(out - exact, axis=(1, 2)) / np.linalg.norm(
            exact, axis=(1, 2)
        )
        panel.bar(np.arange(len(q)) + 0.2 * i - 0.3, error, 0.2, label=near)
    panel.set(
        title=f"{name}, rank 64", xlabel="head", xticks=range(len(q)), yscale="log"
    )
panels[0].set(ylabel="true error of the output")
figure.legend(*panels[0].get_legend_handles_labels(), title="near", loc="outside right")
