"""Attention as a differentiable function of other libraries: `autograd`, `jax` and `torch`, each imported on use."""
