"""Transformers shaped at initialisation, so that they can be deep without skips (He et al. 2023, arXiv:2302.10322).

With softmax attention all tokens become alike with depth. Here attention takes the kernel of tokens, Σ = X Xᵀ/d, through a
schedule Σ_0, …, Σ_L. The attention matrices are A_l = R_l R_{l−1}^{-1} with R_l R_lᵀ = Σ_l (Eq. 8 and 9): see `schedules`,
`matrices` and `layers`. Value-SkipInit sets A_l = I (Eq. 7). The activation function of the MLPs is shaped for the depth of
the network: see `activations` (DKS, Martens et al. 2021).
"""
