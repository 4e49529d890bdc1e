"""Transformers shaped at initialisation, so that they can be deep without skips (He et al. 2023, arXiv:2302.10322).

With attention matrices A_l = R_l R_{l−1}^{-1}, where R_l R_lᵀ = Σ_l, the token kernel Σ = X Xᵀ/d follows the schedule
Σ_0, …, Σ_L (Eq. 8 and 9). With A_l = I (Value-SkipInit, Eq. 7), attention leaves Σ unchanged. Activation functions are
shaped for the depth of the network (DKS, Martens et al. 2021).
"""
