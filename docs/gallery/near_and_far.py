import matplotlib.pyplot as plt
import numpy as np

import pda_numba
from pda_numba.data import real_heads

q, k, _, scale = real_heads("speech")
q, k = q[7], k[7]
unit = np.eye(len(k), dtype=np.float32)  # with these values the output is the matrix

exact = pda_numba.attention(q, k, unit, scale=scale, method="exact")
whole = pda_numba.attention(
    q, k, unit, scale=scale, method="pda", rank=32, tol=None, window=32
)
apart = abs(np.subtract.outer(np.arange(len(q)), np.arange(len(k))))
near = np.where(apart <= 32, exact, 0)  # what a query attends to exactly
far = whole - near  # what the fit says of the rest

figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
titles = "exact attention", "near: a band, exact", "far: low rank 32"
for panel, matrix, title in zip(panels, (exact, near, far), titles, strict=True):
    blocks = matrix.reshape(75, 20, 75, 20).mean(axis=(1, 3))
    image = panel.imshow(
        np.log10(blocks.clip(1e-6)), extent=(0, 1500, 1500, 0), vmin=-5, vmax=-1
    )
    panel.set(title=title, xlabel="key")
panels[0].set(ylabel="query")
figure.colorbar(image, ax=panels, label="weight, power of ten")
