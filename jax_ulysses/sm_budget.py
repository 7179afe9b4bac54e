# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors a rank's calls may take."""

# Most GPCs of a GPU. Source: NVIDIA H100 white paper, GH100: 8 of up to 18 SMs.
_GPCS = 8


def shared(num_sms: int, ranks: int) -> int:
    """Multiprocessors for a call of each of several ranks on one GPU.

    Less than an equal part: while all ranks but one wait inside their kernels, those of
    the last one must still find room. The CTAs of a cluster start together on free
    multiprocessors of one GPC, and the others may have left them anywhere.

    Args:
      num_sms: multiprocessors of the GPU.
      ranks: on it.
    """
    if ranks == 1:
        return num_sms
    # Ours are clusters of two: one multiprocessor a GPC may be left over.
    ours = (num_sms - _GPCS) // ranks
    # XLA's matrix products have up to eight: if more than seven a GPC are free on
    # average, one has eight. With equal parts the preset "small" stopped training on
    # eight ranks, four times of four (tests/gpu/RESULTS.md).
    others = (num_sms - 7 * _GPCS - 1) // (ranks - 1)
    return max(min(ours, others) // 2 * 2, 1)
