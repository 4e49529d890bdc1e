"""Transformers shaped at initialisation, so that they can be deep without skips (He et al. 2023, arXiv:2302.10322).

Attention matrices A_l = R_l R_{l−1}^{-1} with R_l R_lᵀ = Σ_l take the tokens' kernel Σ = X Xᵀ/d through a schedule of
kernels Σ_0, …, Σ_L (Eq. 8 and 9), where softmax would make all tokens alike: `schedules`, `matrices` and `layers`.
Value-SkipInit makes A_l = I (Eq. 7). Between the attention layers stand MLPs whose activation is shaped for the depth of the
network: `activations` (DKS, Martens et al. 2021).
"""
