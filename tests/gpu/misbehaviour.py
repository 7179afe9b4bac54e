# SPDX-License-Identifier: Apache-2.0
"""Functions that a rig must survive."""

import os
import time


def fails(rank, text):
    raise RuntimeError(text)


def sleeps(rank, seconds):
    print("asleep", flush=True)
    time.sleep(seconds)


def dies(rank):
    os._exit(7)


def describes(rank, *args):
    return {
        "ranks": rank.num_ranks,
        "axes": dict(rank.mesh.shape),
        "implementation": rank.implementation,
        "args": args,
    }
