# SPDX-License-Identifier: Apache-2.0
"""Letters of the library, and the array types built from them.

One table serves docstrings, annotations, C++ comments and error texts:

====== ============================== ====== ==================================
letter meaning                        letter meaning
====== ============================== ====== ==================================
B      batch                          K      key/value heads
S      global sequence                H      head dimension
T      local sequence, S / P          D      model dimension
N      query heads                    P      ranks on the context-parallel axis
====== ============================== ====== ==================================
"""

from collections.abc import Sequence

import jax
from jaxtyping import Float, Num, Shaped

type Array = jax.Array
type AxisName = str | Sequence[str]

# Sequence shards hold T tokens of all heads, head shards hold S tokens of some.
type SequenceShard = Shaped[Array, "B T N H"]
type HeadShard = Shaped[Array, "B S n H"]
type Activations = Float[Array, "B T D"]
type Numeric = Num[Array, "..."]
