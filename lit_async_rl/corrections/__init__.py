"""Importance corrections: weights for the ratio of proximal policy to behavior policy.

`log_ratio` is log pi_prox - log mu of each token, r = exp(log_ratio), detached. Weights multiply the per-token loss; a
rejected token has weight 0, and stays in the denominator of the average.

Ratios come at three levels: of a token, of a completion (the product over its tokens, "sequence"), and of a completion
per token (the geometric mean, "geometric"). At each of them a ratio can be truncated (`...TruncatedIS`), zeroed outside
an interval (`...MaskedIS`, `IcePop`), or only reject (`...Rejection`, weight 1 or 0); `Product` combines several.
"""

from lit_async_rl.corrections.weights import (
    BatchNormalized,
    BlendedIS,
    Correction,
    CorrectionOutput,
    GeometricMaskedIS,
    GeometricRejection,
    GeometricTruncatedIS,
    IcePop,
    Product,
    SecondMomentMask,
    SequenceMaskedIS,
    SequenceRejection,
    SequenceTruncatedIS,
    TokenRejection,
    TokenTruncatedIS,
    Veto,
)

__all__ = [
    "BatchNormalized",
    "BlendedIS",
    "Correction",
    "CorrectionOutput",
    "GeometricMaskedIS",
    "GeometricRejection",
    "GeometricTruncatedIS",
    "IcePop",
    "Product",
    "SecondMomentMask",
    "SequenceMaskedIS",
    "SequenceRejection",
    "SequenceTruncatedIS",
    "TokenRejection",
    "TokenTruncatedIS",
    "Veto",
]
